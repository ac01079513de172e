"""Tensors that end where the process may not read on, so that a read behind them ends it.

A load that no result depends on changes no number; on a GPU it faults when the memory behind happens to be nobody's.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def at_the_end(x: Tensor) -> Tensor:
    """A contiguous copy of `x`, on the CPU, whose last byte is the last before a page that may not be touched."""
    num_bytes = x.numel() * x.element_size()
    if not num_bytes:
        return x
    pages = -(-num_bytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(start + pages * mmap.PAGESIZE, mmap.PAGESIZE, _NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * mmap.PAGESIZE - num_bytes).view(
        x.shape
    )
    return copy.copy_(x)
