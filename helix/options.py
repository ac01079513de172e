"""The options that every `helix` command takes in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", help="YAML file of the run.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: key.path=value. Repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]
