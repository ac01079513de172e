"""A step between its launch and its tokens: what lets the next one be launched before this one is over.

The device works through launched steps in order, and the tokens of one are the next one's inputs without a visit to the
host. So while step n runs, the host plans and launches step n + 1, and only then reads the tokens of step n. What they
bring (a stop token, a stop string, a cancellation) is known one step late: step n + 1 then holds a row whose request
has ended. Its token is dropped, and what it stores is harmless: whoever gets the page row next writes to it in a later
step, and the device keeps that order.

A step whose tokens the host has to choose (grammars, penalties, log-probabilities, see `Request.next_choice`), or whose
logits somebody collects, is launched ahead like any other, but no further step is launched before its tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from helix.config import RunConfig
from helix.engine.request import Choice
from helix.engine.runner import StepRun
from helix.engine.scheduler import StepPlan

_ORDER: tuple[Choice, ...] = ("best", "drawn", "ranked", "host")


def choice_of(plan: StepPlan) -> Choice:
    """How the tokens of `plan`, not yet booked, are chosen: the way of the row that needs most."""
    if any(item.request.collect != "tokens" for item in plan.items):
        return "host"
    return max((item.request.next_choice for item in plan.items if item.samples), key=_ORDER.index, default="best")


class Readback:
    """Tokens on their way to the host; the copy is launched here and waited for in `wait`."""

    def __init__(self, token_R: Tensor) -> None:
        on_gpu = token_R.device.type == "cuda"
        self._host_R = torch.empty(token_R.shape, dtype=token_R.dtype, pin_memory=on_gpu)
        self._host_R.copy_(token_R, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[int]:
        """The tokens, once the step that chose them is over."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [int(token) for token in self._host_R.tolist()]


@dataclass(frozen=True, slots=True)
class Launched:
    """A booked step. `tokens` is None where the host chooses them, from the logits of `run`."""

    plan: StepPlan
    run: StepRun
    tokens: Readback | None


def plans_ahead(config: RunConfig, device: torch.device) -> bool:
    """Whether a step is launched before the tokens of the one before it are read.

    On a CPU a launch is the whole step, so that there is nothing to overlap and results would only come later.
    """
    setting: Literal["auto", "on", "off"] = config.engine.ahead
    return device.type != "cpu" if setting == "auto" else setting == "on"
