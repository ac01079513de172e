"""Generate under the launcher: ``deepspeed launch/generate.py --config configs/X.yaml --prompt "..."``."""

from __future__ import annotations

import sys

from helix.cli import main

if __name__ == "__main__":
    # The launcher hands each rank its number as an argument too; Helix reads it from the environment.
    main(["generate", *(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))])
