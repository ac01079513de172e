"""Collectives through peers' memory between ranks that are processes of the CPU, or streams of one GPU.

On the CPU the kernels run through Triton's interpreter and the ranks share memory: they truly wait for each other. On
one GPU each rank is a stream. Ranks with a GPU each are in `tests/parallel/test_two_gpus.py`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import TOLERANCES, assert_close, dense_merge, random_partials

ON_GPU = torch.cuda.is_available()
if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
    from helix.kernels import triton_peers as peers
    from tests.kernels import peers_cases as cases

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def interpret_rank(index: int, inboxes: list[Tensor], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    one = cases.channel([inbox.data_ptr() for inbox in inboxes], index, CPU)
    cases.check_all(one, dtype, CPU, long=False)
    assert bool((inboxes[index] == peers.ABSENT_BYTE).all()), "what was read is absent again"


def interpret() -> None:
    """Ranks as processes: all end well, or the first that does not is an error."""
    for num_ranks, dtype in ((2, torch.float32), (3, torch.float16)):
        inboxes = [cases.new_inbox(num_ranks, CPU).share_memory_() for _ in range(num_ranks)]
        context = mp.get_context("fork")
        ranks = [
            context.Process(target=interpret_rank, args=(index, inboxes, dtype), daemon=True)
            for index in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100.0)
        if any(rank.exitcode != 0 for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.exitcode for rank in ranks]}")
    silent = [cases.new_inbox(2, CPU) for _ in range(2)]
    lone = cases.channel([inbox.data_ptr() for inbox in silent], 0, CPU, limit_s=0.02)
    cases.check_rank_that_sends_nothing(lone, CPU)


@pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU here")
def test_through_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.test_triton_peers"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["done"]


@pytest.mark.gpu
def test_a_rank_that_sends_nothing() -> None:
    inboxes = [cases.new_inbox(2, GPU) for _ in range(2)]
    addresses = [inbox.data_ptr() for inbox in inboxes]
    cases.check_rank_that_sends_nothing(cases.channel(addresses, 0, GPU, limit_s=0.5), GPU)


class Streams:
    """Ranks on one GPU: a stream each. What they wait for comes from the other streams."""

    def __init__(self, num_ranks: int) -> None:
        self.inboxes = [torch.zeros_like(cases.new_inbox(num_ranks, GPU)) for _ in range(num_ranks)]
        addresses = [inbox.data_ptr() for inbox in self.inboxes]
        self.channels = [cases.channel(addresses, index, GPU) for index in range(num_ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        torch.cuda.synchronize()

    def load(self, call: Callable[[], object]) -> None:
        """Run `call` once where nothing is absent, so that nothing is waited for.

        Loading a kernel may wait for those that run, and these for one that is not loaded yet.
        """
        for inbox in self.inboxes:
            inbox.zero_()
        call()
        torch.cuda.synchronize()

    def start(self) -> None:
        torch.cuda.synchronize()
        for inbox, channel in zip(self.inboxes, self.channels, strict=True):
            inbox.fill_(peers.ABSENT_BYTE)
            channel.turn_P.zero_()
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ranks_as_streams_of_one_gpu(num_ranks: int, dtype: torch.dtype) -> None:
    """In one graph with a branch for each rank, replayed: no launch of one rank can wait for another's."""
    simulated = Streams(num_ranks)
    size = 700
    parts = [cases.hostile_values((size,), dtype, rank) for rank in range(num_ranks)]
    out, lse = random_partials(num_ranks, 3, 2 * num_ranks - 1, 80, dtype)
    sources = [part.to(GPU) for part in parts]
    partials = [(one.to(GPU), other.to(GPU)) for one, other in zip(out, lse, strict=True)]
    sums = [[torch.empty_like(part) for part in sources] for _ in range(2)]
    gathered = [torch.empty(num_ranks, size, dtype=dtype, device=GPU) for _ in range(num_ranks)]
    merged: list[Tensor] = [torch.empty(0)] * num_ranks

    def reduce(rank: int, shots: int) -> None:
        sums[shots - 1][rank].copy_(sources[rank])
        peers.all_reduce(simulated.channels[rank], sums[shots - 1][rank], shots=shots)

    def merge(rank: int) -> None:
        merged[rank] = peers.exchange(simulated.channels[rank], *partials[rank], 2)

    def calls(rank: int) -> list[Callable[[], object]]:
        gather = partial(peers.all_gather, simulated.channels[rank], gathered[rank], sources[rank])
        return [partial(reduce, rank, 1), partial(reduce, rank, 2), gather, partial(merge, rank)]

    def all_ranks() -> None:
        for rank, stream in enumerate(simulated.streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in calls(rank):
                    call()
        for stream in simulated.streams:
            torch.cuda.current_stream().wait_stream(stream)

    for rank in range(num_ranks):
        for call in calls(rank):
            simulated.load(call)
    simulated.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_ranks()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    want = dense_merge(out, lse)[0]
    want = torch.nn.functional.pad(want, (0, 0, 0, 1))
    for rank in range(num_ranks):
        for shots in (1, 2):
            cases.assert_equal_but_nan_bits(sums[shots - 1][rank].cpu(), cases.summed(parts))
        cases.assert_equal_but_nan_bits(gathered[rank].cpu(), torch.stack(parts))
        assert_close(merged[rank].cpu(), want[:, 2 * rank : 2 * rank + 2], TOLERANCES[dtype])
        assert bool((simulated.inboxes[rank] == peers.ABSENT_BYTE).all())


@pytest.mark.gpu
def test_many_exchanges_right_behind_each_other() -> None:
    """Tiles that are larger and smaller than a program; an lse is read by threads of several warps."""
    simulated = Streams(2)
    partials = []
    for tokens, heads, width in ((1, 16, 512), (8, 16, 512), (3, 5, 16), (2, 4, 80)):
        out, lse = torch.randn(2, tokens, heads, width).bfloat16(), 2 * torch.randn(2, tokens, heads)
        mine = [(out[rank].to(GPU), lse[rank].to(GPU), -(-heads // 2)) for rank in range(2)]
        partials.append((mine, dense_merge(out, lse)[0]))

    def calls(rank: int) -> list[Callable[[], Tensor]]:
        return [partial(peers.exchange, simulated.channels[rank], *mine[rank]) for mine, _ in partials]

    for rank in range(2):
        for call in calls(rank):
            simulated.load(call)
    simulated.start()
    merged: list[list[Tensor]] = [[], []]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rank, stream in enumerate(simulated.streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(5):
                    merged[rank] = [call() for call in calls(rank)]
        for stream in simulated.streams:
            torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    assert [int(channel.late) for channel in simulated.channels] == [0, 0]
    for (mine, want), *got in zip(partials, *merged, strict=True):
        assert_close(torch.cat(got, 1)[:, : want.shape[1]].cpu(), want, TOLERANCES[torch.bfloat16])
        assert mine[0][2] == got[0].shape[1]


if __name__ == "__main__":
    interpret()
    print("done")
