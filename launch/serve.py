"""Serve under the launcher: ``deepspeed launch/serve.py --config configs/X.yaml``; rank 0 answers HTTP."""

from __future__ import annotations

import sys

from helix.cli import main

if __name__ == "__main__":
    # The launcher hands each rank its number as an argument too; Helix reads it from the environment.
    main(["serve", *(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))])
