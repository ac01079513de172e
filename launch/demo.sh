#!/usr/bin/env bash
# Real text from a real model on three CPU ranks: sets everything up the first time, then answers a question.
#
#   bash launch/demo.sh                                     the question of the README
#   bash launch/demo.sh --prompt "Why is the sky blue?"     arguments go to launch/generate.py
#
# PYTHON names another Python than the first python3 that is new enough.
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
helix_setup demo
cd "$HELIX_ROOT"

ranks=3
cores="$(nproc)"
threads=$((cores > ranks ? cores / ranks : 1))
port="$("$HELIX_BIN/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"

prompt=(--prompt "What is the capital of France?")
for argument in "$@"; do
    case "$argument" in
    --prompt | --prompt=* | --prompt-ids | --prompt-ids=* | --help) prompt=() ;;
    esac
done

# No hostfile: one that lies at the launcher's default place would send this demo to other machines.
export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
unset CUDA_VISIBLE_DEVICES
exec "$HELIX_BIN/deepspeed" --quiet --hostfile /dev/null --num_accelerators "$ranks" --master_port "$port" \
    launch/generate.py --config configs/smollm2.yaml ${prompt[@]+"${prompt[@]}"} "$@"
