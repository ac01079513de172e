"""The exchange: its message bit for bit, and both forms on real ranks against a dense merge."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.bench.exchange import print_report
from helix.comm.group import Group
from helix.comm.world import single_world
from helix.layers.exchange import Exchange, pack, unpack
from helix.layout import Layout
from tests.kernels.cases import DTYPES, assert_same_bits, random_partials
from tests.parallel import comm_jobs
from tests.ranks import RankPool

LAYOUTS = {
    2: [Layout(kvp=2, tpf=2), Layout(tpa=2, tpf=2)],
    3: [Layout(kvp=3, tpf=3)],
    4: [Layout(kvp=4, tpf=4), Layout(kvp=2, tpa=2, tpf=4)],
    6: [Layout(kvp=6, tpf=6), Layout(kvp=3, tpa=2, tpf=6), Layout(kvp=2, tpa=3, tpf=6)],
}


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    width=st.sampled_from((1, 8, 64, 80)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_message_gives_back_the_bits(lead: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    out = torch.randint(low, high, (*lead, width), dtype=kind, generator=generator).view(dtype)
    lse = torch.randint(-(2**31), 2**31 - 1, tuple(lead), dtype=torch.int32, generator=generator).view(torch.float32)
    message = pack(out, lse)
    assert message.dtype == dtype
    assert message.nbytes == out.nbytes + lse.nbytes
    got_out, got_lse = unpack(message, width)
    assert_same_bits(got_out, out)
    assert_same_bits(got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_message_of_views_cut_by_destination(dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(1, 3, 6, 8, dtype)
    out, lse = out_ZTHD.view(3, 2, 3, 8).movedim(1, 0), lse_ZTH.view(3, 2, 3).movedim(1, 0)
    got_out, got_lse = unpack(pack(out, lse), 8)
    assert_same_bits(got_out, out.contiguous())
    assert_same_bits(got_lse, lse.contiguous())


@pytest.mark.parametrize("form", ["a2a", "ag_rs"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_gets_its_own_back(form: comm_jobs.Form, dtype: torch.dtype) -> None:
    out_ZTHD, lse_ZTH = random_partials(1, 7, 9, 8, dtype)
    out = Exchange(Group("kvp", (0,), 0), 9, form)(out_ZTHD[0], lse_ZTH[0])
    assert_same_bits(out, out_ZTHD[0])


def test_one_rank() -> None:
    assert comm_jobs.check_exchange(single_world(torch.device("cpu")), [Layout()]) == 30


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_equals_dense_merge_for_this_ranks_heads(ranks: RankPool, num_ranks: int) -> None:
    layouts = LAYOUTS[num_ranks]
    assert ranks.run(num_ranks, comm_jobs.check_exchange, layouts) == [30 * len(layouts)] * num_ranks


def test_bench_checks_and_times_each_transport(ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    report = ranks.run(3, comm_jobs.bench_small)[0]
    kinds = {(one.operation, one.transport) for one in report.timings}
    assert kinds == {
        ("exchange", "packed message"),
        ("exchange", "all-to-all alone"),
        ("exchange", "two messages"),
        ("exchange", "all-gather + reduce-scatter"),
        ("all-reduce", "library"),
    }
    assert all(0 < one.low_us <= one.median_us <= one.high_us for one in report.timings)
    print_report(report, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["backend"] == "gloo"
    assert "skipped symmetric memory: the ranks are not on GPUs" in lines
