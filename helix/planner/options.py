"""`PlanOptions`: the words of a `helix plan` command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a person typed, still as text; None: not given."""

    hardware: str
    model: str | None = None
    gpus: str | None = None
    context: str | None = None
    batch: int | None = None
    ttl_ms: float | None = None
    objective: str = "ttl"
    weights: str = "auto"
    cache: str = "auto"
    page_tokens: int | None = None
    transport: str = "auto"
    rows: int = 12
    output: Literal["text", "json", "yaml"] = "text"
    show_groups: bool = False
    all_refused: bool = False
    plot: Path | None = None
    html: Path | None = None
