"""Helix: decoding of long-context language models on many GPUs, the KV cache cut along the sequence.

`Engine` runs a model, `SamplingParams` says how to sample, `HelixError` is the base of every error raised on purpose.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from helix.errors import HelixError

if TYPE_CHECKING:
    from helix.engine.engine import Engine
    from helix.engine.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "HelixError", "SamplingParams", "__version__"]

_LAZY = {"Engine": "helix.engine.engine", "SamplingParams": "helix.engine.sampling"}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `helix --help` and the planner do without it.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'helix' has no attribute {name!r}")
