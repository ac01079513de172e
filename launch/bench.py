"""Time decode steps under the launcher: ``deepspeed launch/bench.py decode --card llama-3.1-8b --cells 1x1M``."""

from __future__ import annotations

import sys

from helix.cli import main

if __name__ == "__main__":
    # The launcher hands each rank its number as an argument too; Helix reads it from the environment.
    main(["bench", *(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))])
