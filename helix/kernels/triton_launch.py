"""Programmatic dependent launch on a GPU: a kernel is made ready, and begins, while the one before it still runs.

How the kernels of a step use it. Each calls `begin` or `begin_late` once, before it reads anything that a kernel before
it may have written, and before its first store; what it reads earlier are weights alone, which no kernel writes. So
weights are on their way from memory while the kernel ahead still works, and a chain of short kernels keeps the memory
busy. Waiting is transitive: a kernel ends after its own wait, so whoever waits for it has waited for all before it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def begin(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be made ready at once, and wait for the ones before."""
    if DEPENDENT:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()


@triton.jit
def begin_late(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `begin`, but the next kernel starts only once all before this one are over, and may read what they wrote."""
    if DEPENDENT:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a launch on `device` is given: on Hopper and later it may be dependent."""
    return {"DEPENDENT": True, "launch_pdl": True} if _is_dependent(device) else {"DEPENDENT": False}


@cache
def _is_dependent(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
