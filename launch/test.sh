#!/usr/bin/env bash
# The suite on the CPU but for its slow tests (`-m slow`), from a fresh checkout; arguments go to pytest, whose exit
# code this returns.
#
#   bash launch/test.sh                       everything that is not slow and needs no GPU
#   bash launch/test.sh tests/unit -k layout  a part of it
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
helix_setup test demo
cd "$HELIX_ROOT"

# One thread per rank: the suite starts more ranks than a small machine has cores.
export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONFAULTHANDLER=1
# Two files at a time: many tests wait for processes to start or to be missed, and the other file uses that time. In
# the order of their names: files with the fewest tests are the longest, and put last one would run alone.
exec "$HELIX_BIN/python" -m pytest -m "not gpu and not multi_gpu and not slow" \
    -n 2 --dist loadfile --no-loadscope-reorder "$@"
