"""What simulated or real ranks run in the tests of `helix.kernels.triton_peers`, and what it must give.

Every rank knows what all of them hold, from seeds; so each checks its own result on the spot.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from helix.kernels import triton_peers as peers
from tests.kernels.cases import TOLERANCES, assert_close, assert_same_bits, dense_merge, random_partials

REGION_BYTES = 4096
Run = Callable[[peers.Channel], None]


def new_inbox(num_ranks: int, device: torch.device) -> Tensor:
    return torch.full((peers.inbox_bytes(num_ranks, REGION_BYTES),), 0xFF, dtype=torch.uint8, device=device)


def channel(inboxes: list[int], index: int, device: torch.device, limit_s: float = 60.0) -> peers.Channel:
    return peers.Channel(
        inbox_Z=torch.tensor(inboxes, dtype=torch.int64, device=device),
        turn_P=torch.zeros(peers.MAX_PROGRAMS, dtype=torch.int32, device=device),
        late=torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
        limit_s=limit_s,
        first_sender=5,
        index=index,
        region_bytes=REGION_BYTES,
    )


def hostile_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers, whose sums are exact, with places of all bits set (which mean absent), NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=generator).to(dtype)
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    flat = x.view(-1)
    flat[seed % 7 :: 11] = float("nan")
    flat.view(kind)[seed % 5 :: 13] = -1
    flat[seed % 3 :: 17] = float("inf")
    return x


def summed(parts: list[Tensor]) -> Tensor:
    """The contract of `all_reduce`: fp32 sums in the order of ranks, rounded once."""
    return torch.stack(parts).float().sum(0).to(parts[0].dtype)


def assert_equal_but_nan_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


def check_reductions(one: peers.Channel, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> None:
    """Sizes grow and shrink on one channel, both ways in turn, in place, off the alignment too."""
    for number, size in enumerate(sizes):
        parts = [hostile_values((size,), dtype, 10 * number + rank) for rank in range(one.size)]
        shots = 1 + number % 2
        room = torch.full((size + 3,), 5.0, dtype=dtype, device=device)
        x = room[number % 2 * 2 :][:size]
        x.copy_(parts[one.index])
        peers.all_reduce(one, x, shots=shots)
        assert_equal_but_nan_bits(x.cpu(), summed(parts))
        assert int((room == 5.0).sum()) >= 3
        out = torch.full((one.size, size), 5.0, dtype=dtype, device=device)
        peers.all_gather(one, out, parts[one.index].to(device))
        assert_equal_but_nan_bits(out.cpu(), torch.stack(parts))


def check_exchange(
    one: peers.Channel, dtype: torch.dtype, device: torch.device, shapes: tuple[tuple[int, int, int], ...]
) -> None:
    """(tokens, heads, width) on one channel: heads padded, views, a rank that is empty, and lse that are not finite."""
    for number, (tokens, heads, width) in enumerate(shapes):
        out, lse = random_partials(one.size, tokens, heads, width, dtype, seed=number)
        out[number % one.size].view(torch.int32 if dtype is torch.float32 else torch.int16).fill_(-1)
        lse[number % one.size] = (float("-inf"), float("inf"), float("nan"))[number % 3]
        if number % 3 == 2:
            lse.view(torch.int32)[number % one.size] = -1
        part_heads = -(-heads // one.size)
        mine = torch.zeros(tokens, heads + 1, width, dtype=dtype, device=device)[:, :heads]
        mine.copy_(out[one.index])
        my_lse = lse[one.index].t().contiguous().t().to(device)
        result = peers.exchange(one, mine, my_lse, part_heads)
        padding = part_heads * one.size - heads
        out = torch.nn.functional.pad(out, (0, 0, 0, padding))
        lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf)
        chosen = slice(one.index * part_heads, (one.index + 1) * part_heads)
        assert_close(result.cpu(), dense_merge(out[:, :, chosen], lse[:, :, chosen])[0], TOLERANCES[dtype])


def check_loud_nan(one: peers.Channel, dtype: torch.dtype, device: torch.device) -> None:
    """A NaN beside a finite lse stays a NaN, also one whose bits mean absent."""
    out = torch.ones(2, one.size, 8, dtype=dtype)
    out[1].view(torch.int32 if dtype is torch.float32 else torch.int16)[:, 3] = -1
    result = peers.exchange(one, out.to(device), torch.zeros(2, one.size, device=device), 1).cpu()
    assert result[1, 0, 3].isnan()
    result[1, 0, 3] = 1.0
    assert (result == 1.0).all()


def check_rank_that_sends_nothing(one: peers.Channel, device: torch.device) -> None:
    """Every collective ends, `late` names the rank, and no later wait takes its time again. `one.limit_s` is short."""
    x, out, lse = torch.ones(3000, device=device), torch.ones(2, 4, 16, device=device), torch.ones(2, 4, device=device)
    gathered = torch.empty(one.size, 3000, device=device)
    silent = one.first_sender + one.size  # the last rank's number, from 1
    calls: list[Callable[[], object]] = [
        lambda: peers.exchange(one, out, lse, -(-4 // one.size)),
        lambda: peers.all_gather(one, gathered, x),
        lambda: peers.all_reduce(one, x, shots=1),
        lambda: peers.all_reduce(one, x, shots=2),
    ]
    for call in calls:
        one.late.zero_()
        call()
        _finish(device)
        assert int(one.late) == silent
    started = time.perf_counter()
    for _ in range(10):
        for call in calls:
            call()
    _finish(device)
    assert int(one.late) == silent
    assert time.perf_counter() - started < (40 * one.limit_s if device.type == "cuda" else 100.0)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check_all(one: peers.Channel, dtype: torch.dtype, device: torch.device, *, long: bool) -> None:
    check_reductions(one, dtype, device, (1, 600, 3) + ((40, 9000, 70001, 512) if long else ()))
    shapes = ((3, 5, 16), (1, 3, 10), (2, 3, 7), (1, 1, 600))
    more = ((4, 6, 7), (2, 3, 80), (64, 16, 512), (8, 16, 512), (33, 9, 128), (64, 128, 64)) if long else ()
    check_exchange(one, dtype, device, tuple(shape for shape in (*shapes, *more) if _fits(one, shape, dtype)))
    check_loud_nan(one, dtype, device)


def _fits(one: peers.Channel, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    tokens, heads, width = shape
    return peers.exchange_region(tokens * -(-heads // one.size), width, dtype.itemsize) <= one.region_bytes
