"""HOP-B without ranks: how steps are cut, in which order chunks run, and when the cost model cuts at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.config import make_config
from helix.cost.choices import Choices, Formats, Placement, Workload
from helix.cost.hardware import Hardware, load_hardware
from helix.cost.overlap import CHUNK_COUNTS, best_overlap, with_overlap
from helix.cost.step import placement_cost
from helix.layers.overlap import Chunk, attend_and_exchange, cut
from helix.layout import Layout
from helix.planner.auto import overlap_rule
from model_zoo.cards import load_card

H200 = load_hardware("h200-sxm")
R1 = load_card("deepseek-r1")


def tables(sequences: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = sequences * each
    return torch.arange(2 * sequences).view(-1, 2), torch.arange(0, tokens + 1, each), torch.arange(tokens) + 7


@given(sequences=st.integers(1, 40), each=st.integers(1, 4), num_chunks=st.integers(1, 50))
def test_chunks_are_the_step_taken_apart(sequences: int, each: int, num_chunks: int) -> None:
    page_table, query_start, visible_len = tables(sequences, each)
    chunks = cut(num_chunks, page_table, query_start, visible_len)
    assert len(chunks) == min(num_chunks, sequences)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    sizes = [chunk.page_table_SR.shape[0] for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert torch.equal(torch.cat([chunk.page_table_SR for chunk in chunks]), page_table)
    assert torch.equal(torch.cat([chunk.visible_len_T for chunk in chunks]), visible_len)
    assert torch.equal(torch.cat([visible_len[chunk.tokens] for chunk in chunks]), visible_len)
    for chunk, size in zip(chunks, sizes, strict=True):
        assert chunk.query_start_S1.tolist() == list(range(0, size * each + 1, each))


def test_unequal_sequences_are_not_cut() -> None:
    page_table, _, visible_len = tables(3, 2)
    uneven = torch.tensor([0, 1, 3, 5])
    with pytest.raises(ValueError, match="5 tokens of 3 sequences"):
        cut(2, page_table, uneven, visible_len[:5])
    assert len(cut(1, page_table, uneven, visible_len[:5])) == 1


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_each_chunk_is_exchanged_behind_its_attention(num_chunks: int) -> None:
    events: list[str] = []

    def attend(chunk: Chunk) -> tuple[Tensor, Tensor]:
        events.append(f"attend {chunk.index}")
        lse_TH = chunk.visible_len_T.float().unsqueeze(1)
        return lse_TH.unsqueeze(2).repeat(1, 1, 4), lse_TH

    def exchange(out_THD: Tensor, lse_TH: Tensor, *, chunk: int) -> Tensor:
        events.append(f"exchange {chunk}")
        return out_THD + lse_TH.unsqueeze(2)

    given_tables = tables(5, 1)
    got = attend_and_exchange(cut(num_chunks, *given_tables), None, attend, exchange)
    assert torch.equal(got, 2 * given_tables[2].float().view(5, 1, 1).repeat(1, 1, 4))
    assert events == [f"{what} {index}" for index in range(num_chunks) for what in ("attend", "exchange")]


# ---- when the model cuts ----


def chosen(layout: Layout, batch: int, context: int, hardware: Hardware = H200, choices: Choices | None = None) -> int:
    placement = Placement(layout=layout, choices=choices or Choices())
    return best_overlap(R1, placement, Formats(), hardware, Workload(batch=batch, context=context))


def test_inside_a_node_messages_are_too_short_to_hide() -> None:
    """A chunk's kernels cost more than NVLink takes for half of a message."""
    layout = Layout(kvp=8, tpf=8)
    assert [chosen(layout, batch, 1 << 17) for batch in (1, 8, 64)] == [1, 1, 1]


def test_between_nodes_large_batches_are_cut() -> None:
    layout = Layout(kvp=64, tpf=64)
    assert chosen(layout, 1, 1 << 20) == 1
    assert chosen(layout, 64, 1 << 20) > 1
    assert chosen(layout, 64, 1 << 20, replace(H200, node_size=64)) == 1


def test_without_streams_nothing_is_cut() -> None:
    """On a CPU rank messages and attention take turns, and each chunk only adds its fixed costs."""
    assert not load_hardware("cpu").overlaps
    assert chosen(Layout(kvp=64, tpf=64), 64, 1 << 20, replace(H200, overlaps=False)) == 1


layouts = st.sampled_from([Layout(kvp=size, tpf=size) for size in (2, 8, 16, 64)])
ways = st.builds(Choices, exchange_space=st.sampled_from(("latent", "value")), merge=st.sampled_from(("a2a", "ag_rs")))


@settings(max_examples=60, deadline=None)
@given(layout=layouts, choices=ways, batch=st.integers(1, 200), bits=st.integers(10, 19))
def test_never_slower_and_gains_grow_with_the_context(layout: Layout, choices: Choices, batch: int, bits: int) -> None:
    placement = Placement(layout=layout, choices=choices)

    def step(num_chunks: int, context: int) -> float:
        load = Workload(batch=batch, context=context, page_tokens=1)
        return placement_cost(R1, with_overlap(placement, num_chunks), Formats(), H200, load).ttl_us

    short, long = 1 << bits, 2 << bits
    best = chosen(layout, batch, short, choices=choices)
    assert step(best, short) <= step(1, short)
    for count in CHUNK_COUNTS:
        gained = [step(1, context) - step(count, context) for context in (short, long)]
        assert gained[0] <= gained[1] + 1e-6 * step(1, long)


# ---- what the engine does with the setting ----


@pytest.mark.parametrize(
    ("setting", "device", "chunks"),
    [
        ("off", "NVIDIA H200", [1, 1, 1]),
        ("auto", "NVIDIA H200", [1, 1, 4]),
        ("auto", "a device of no card", [1, 1, 1]),
        ("auto", "cpu", [1, 1, 1]),
        (3, "cpu", [1, 3, 3]),
    ],
)
def test_setting(setting: str | int, device: str, chunks: list[int]) -> None:
    config = make_config(None, model={"card": "deepseek-r1", "load": "dummy"}, comm={"overlap": setting})
    rule = overlap_rule(config, R1, Layout(kvp=64, tpf=64), device, "bfloat16")
    assert [rule.num_chunks(batch, 1 << 20) for batch in (1, 8, 128)] == chunks


def test_one_part_of_the_sequence_has_nothing_to_hide() -> None:
    config = make_config(None, model={"card": "deepseek-r1", "load": "dummy"})
    rule = overlap_rule(config, R1, Layout(), "NVIDIA H200", "bfloat16")
    assert rule.num_chunks(128, 1 << 20) == 1
