# shellcheck shell=bash
# What demo.sh, test.sh and .ci/run share: the virtual environment, the install and the model. Sourced, not run.
#
# An install is recorded in .venv by a stamp that holds a hash of pyproject.toml, so it is made once and again when the
# file changes. A marker lies in .venv while an install runs: one that was broken off is thrown away and made anew.

HELIX_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
HELIX_VENV="$HELIX_ROOT/.venv"
HELIX_BIN="$HELIX_VENV/bin"
HELIX_MARKER="$HELIX_VENV/.helix-installing"

# Nothing of the caller's Python may leak into the environment, and nothing here asks or waits for a person.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}"
# Models and tokenizers come from directories here; no library is to look for them on a hub.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

helix_say() { printf '==> %s\n' "$*" >&2; }

helix_die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

helix_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the Python to use: PYTHON if set, else the first of the usual names that is new enough.
helix_find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || helix_die "PYTHON=$PYTHON is not a program"
        helix_is_new_enough "$PYTHON" ||
            helix_die "PYTHON=$PYTHON is not Python 3.11 or newer; it says: $("$PYTHON" -V 2>&1 | head -n 1)"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && helix_is_new_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    if command -v python3 >/dev/null; then
        helix_die "python3 is $(python3 -V 2>&1), and Helix needs Python 3.11 or newer; where your system has one:" \
            "apt-get install python3.11 python3.11-venv, or name another one with PYTHON=/path/to/python"
    fi
    helix_die "there is no python3; on Debian or Ubuntu: apt-get install python3 python3-venv"
}

helix_make_venv() {
    local python version
    python="$(helix_find_python)"
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        helix_die "Python $version lacks its venv module; on Debian or Ubuntu: apt-get install python$version-venv"
    helix_say "making .venv with Python $version"
    mkdir -p "$HELIX_VENV"
    touch "$HELIX_MARKER"
    "$python" -m venv "$HELIX_VENV"
}

# helix_stamp EXTRA: what the stamp of that extra must hold. A moved checkout needs a new install, so the path counts.
helix_stamp() {
    { printf '%s\n%s\n' "$1" "$HELIX_ROOT" && cat "$HELIX_ROOT/pyproject.toml"; } | sha256sum | cut -d ' ' -f 1
}

helix_is_installed() {
    local stamp="$HELIX_VENV/.helix-$1"
    [ ! -e "$HELIX_MARKER" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(helix_stamp "$1")" ] && helix_is_new_enough "$HELIX_BIN/python"
}

# helix_install EXTRA...: installs the extras; the stamps are written last.
helix_install() {
    local extra extras
    if [ -e "$HELIX_MARKER" ]; then
        helix_say "the last install was broken off; starting it again"
        rm -rf "$HELIX_VENV"
    elif [ -e "$HELIX_VENV" ] && { ! helix_is_new_enough "$HELIX_BIN/python" || ! "$HELIX_BIN/python" -m pip -V >/dev/null 2>&1; }; then
        helix_say ".venv does not run; making it again"
        rm -rf "$HELIX_VENV"
    fi
    [ -e "$HELIX_VENV" ] || helix_make_venv
    touch "$HELIX_MARKER"
    extras="$(IFS=,; printf '%s' "$*")"
    helix_say "installing Helix [$extras] into .venv; the first time this takes some minutes"
    "$HELIX_BIN/python" -m pip install --upgrade pip || helix_die "pip could not upgrade itself (its message is above)"
    (cd "$HELIX_ROOT" && "$HELIX_BIN/python" -m pip install --editable ".[$extras]") ||
        helix_die "the install failed (pip's message is above); run this command again to go on"
    for extra in "$@"; do
        helix_stamp "$extra" >"$HELIX_VENV/.helix-$extra"
    done
    rm "$HELIX_MARKER"
}

# helix_setup EXTRA...: afterwards the environment with these extras, first in PATH, and the model are there. The lock on
# the checkout's directory makes a second caller wait for the first.
helix_setup() {
    local extra
    exec 9<"$HELIX_ROOT"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        helix_say "another set-up of this checkout is running; waiting for it"
        flock 9
    fi
    for extra in "$@"; do
        if ! helix_is_installed "$extra"; then
            helix_install "$@"
            break
        fi
    done
    [ -d "$HELIX_ROOT/models/smollm2-135m-instruct" ] || helix_say "getting and converting SmolLM2-135M-Instruct, once"
    TQDM_DISABLE=1 "$HELIX_BIN/python" "$HELIX_ROOT/launch/fetch_smollm2.py" || exit
    exec 9<&-
    export PATH="$HELIX_BIN:$PATH"
}

# Format, lint and types. Runs all three and is false when any of them is.
helix_lint() {
    local status=0
    "$HELIX_BIN/ruff" format --check . || status=1
    "$HELIX_BIN/ruff" check . || status=1
    "$HELIX_BIN/mypy" || status=1
    return "$status"
}
