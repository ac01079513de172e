"""Latent attention in expanded form against dense fp64 attention, and against the absorbed form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix import kernels
from helix.kernels import attend, expanded
from helix.kernels.expanded import attend_expanded, expand
from tests.kernels.cases import (
    DTYPES,
    TOLERANCES,
    AttentionCase,
    Shape,
    assert_close,
    assert_same_bits,
    bits,
    build_case,
    dense_attention,
)

NOPE, ROPE, LATENT, VALUE = 5, 4, 12, 3
BASE = Shape(
    lengths=(37, 9),
    queries=(12, 9),
    num_heads=3,
    num_kv_heads=1,
    width=LATENT + ROPE,
    v_width=LATENT,
    latent=True,
)
SHAPES = {
    "two chunks": BASE,
    "decode": replace(BASE, lengths=(5, 17, 64, 1), queries=(1, 1, 1, 1)),
    "whole prompt on the last of 3 ranks": replace(BASE, lengths=(41, 40), queries=(41, 3), kvp=3, kvp_rank=2),
    "first tokens see nothing": replace(BASE, lengths=(30, 7), queries=(30, 7), kvp=6, kvp_rank=4),
    "a sequence without tokens": replace(BASE, lengths=(30, 20, 9), queries=(4, 0, 9)),
    "odd heads and pages": replace(BASE, num_heads=7, page_tokens=5),
}


class Weights:
    """Queries [T, H, N + R] and the two up-projections for a case whose own queries are not used."""

    def __init__(self, case: AttentionCase, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens, heads, _ = case.q_THD.shape
        self.q_THQ = torch.randn(tokens, heads, NOPE + ROPE, generator=generator).to(dtype)
        self.w_uk_HNL = (torch.randn(heads, NOPE, LATENT, generator=generator) / LATENT**0.5).to(dtype)
        self.w_uv_HVL = (torch.randn(heads, VALUE, LATENT, generator=generator) / LATENT**0.5).to(dtype)
        self.scale = (NOPE + ROPE) ** -0.5


def run(case: AttentionCase, made: Weights, block_pages: int) -> tuple[Tensor, Tensor]:
    page_bytes = case.k_PBKD.shape[1] * case.q_THD.shape[1] * (NOPE + ROPE + VALUE) * made.q_THQ.element_size()
    return attend_expanded(
        made.q_THQ,
        case.k_PBKD,
        made.w_uk_HNL,
        made.w_uv_HVL,
        case.page_table_SR,
        case.query_start_S1,
        case.visible_len_T,
        made.scale,
        block_bytes=block_pages * page_bytes,
    )


def reference(case: AttentionCase, made: Weights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp64 attention of every sequence as a whole; keys and values are rounded to `dtype` as they are in the pool."""
    outs, lses, first = [], [], 0
    for one in case.sequences:
        rows = slice(first, first + len(one.q_THD))
        first = rows.stop
        latent, rope = one.k_LKD[:, 0, :LATENT].double(), one.k_LKD[:, 0, LATENT:].double()
        nope = torch.einsum("ld,hnd->lhn", latent, made.w_uk_HNL.double()).to(dtype).double()
        value = torch.einsum("ld,hvd->lhv", latent, made.w_uv_HVL.double()).to(dtype).double()
        key = torch.cat((nope, rope.unsqueeze(1).expand(-1, nope.shape[1], -1)), -1)
        out, lse = dense_attention(made.q_THQ[rows], key, value, one.seen_TL & one.owned_L, made.scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def check(shape: Shape, dtype: torch.dtype, block_pages: int, seed: int = 0) -> None:
    case = build_case(shape, dtype, seed)
    made = Weights(case, dtype, seed)
    out, lse = run(case, made, block_pages)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    want_out, want_lse = reference(case, made, dtype)
    # A key may fall on the other side of a rounding than fp64's, and each block rounds its own part.
    looser = TOLERANCES[dtype].times(1 if dtype is torch.float32 else 3)
    assert_close(out, want_out, looser)
    assert_close(lse, want_lse, looser)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_pages", [1, 3, 1000])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_dense_attention(shape: Shape, dtype: torch.dtype, block_pages: int) -> None:
    check(shape, dtype, block_pages)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=4))
    kvp = draw(st.sampled_from((1, 2, 3, 4, 6)))
    return replace(
        BASE,
        lengths=tuple(length for length, _ in sizes),
        queries=tuple(min(size) for size in sizes),
        num_heads=draw(st.integers(1, 5)),
        page_tokens=draw(st.integers(1, 9)),
        kvp=kvp,
        kvp_rank=draw(st.integers(0, kvp - 1)),
    )


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), block_pages=st.integers(1, 4), seed=st.integers(0, 99))
def test_equals_dense_attention_for_any_shape(shape: Shape, block_pages: int, seed: int) -> None:
    check(shape, torch.float32, block_pages, seed)


def test_equals_the_absorbed_form() -> None:
    """q.(W_UK c) = (W_UK^T q).c and W_UV sum(p c) = sum(p W_UV c): the same numbers by the other order of products."""
    case = build_case(SHAPES["whole prompt on the last of 3 ranks"])
    made = Weights(case, torch.float32)
    out, lse = run(case, made, 2)
    absorbed = torch.einsum("thn,hnd->thd", made.q_THQ[..., :NOPE], made.w_uk_HNL)
    q_THW = torch.cat((absorbed, made.q_THQ[..., NOPE:]), -1)
    out_THL, want_lse = attend(q_THW, case.k_PBKD, case.v_PBKV, *case.arguments[3:6], made.scale)
    assert_close(out, torch.einsum("thd,hvd->thv", out_THL, made.w_uv_HVL).double())
    assert_close(lse, want_lse.double())


def test_nothing_visible_reads_nothing() -> None:
    case = build_case(replace(BASE, lengths=(3, 12, 20), queries=(3, 1, 2), kvp=6, kvp_rank=5))
    assert case.k_PBKD.isnan().all()
    out, lse = run(case, Weights(case, torch.float32), 1)
    assert_same_bits(out, torch.zeros_like(out))
    assert_same_bits(lse, torch.full_like(lse, -torch.inf))


def test_nan_in_a_visible_latent_stays_loud() -> None:
    case = build_case(BASE)
    case.k_PBKD[case.page_table_SR[1, 0], 2, 0, 0] = torch.nan
    out, lse = run(case, Weights(case, torch.float32), 1)
    assert not out[:12].isnan().any(), "the other sequence"
    assert out[12 + 2 :].isnan().all(), "every token that sees the broken one"
    assert not lse.isnan().any()


def test_inputs_are_left_alone() -> None:
    case = build_case(BASE)
    made = Weights(case, torch.float32)
    tensors = [made.q_THQ, made.w_uk_HNL, made.w_uv_HVL, case.k_PBKD, case.visible_len_T]
    before = [bits(tensor) for tensor in tensors]
    run(case, made, 2)
    assert all(torch.equal(bits(tensor), was) for tensor, was in zip(tensors, before, strict=True))


def test_expansion_of_one_latent() -> None:
    latent = torch.tensor([[[[2.0, 3.0, 7.0]]]])
    keys = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    values = torch.tensor([[[1.0, 1.0]], [[5.0, 0.0]]])
    k_PBHQ, v_PBHV = expand(latent, keys, values)
    assert k_PBHQ.tolist() == [[[[2.0, 7.0], [30.0, 7.0]]]]
    assert v_PBHV.tolist() == [[[[5.0], [10.0]]]]


def test_its_parts_are_those_of_the_device() -> None:
    """The functions that choose by device, and not the PyTorch twins: those take seconds for a long chunk on a GPU."""
    for name in ("attend", "merge"):
        assert getattr(expanded, name) is getattr(kernels, name)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu() -> None:
    """DeepSeek's widths in bf16, several blocks, on two of three ranks' pages, against the twins in fp32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) / size[-1] ** 0.25

    q_THQ, pool_PB1W = normal(300, 16, 192), normal(40, 64, 1, 576)
    w_uk_HNL, w_uv_HVL = normal(16, 128, 512), normal(16, 128, 512)
    table_SM = torch.randperm(40, generator=generator).int().view(2, 20)
    starts = torch.tensor([0, 200, 300])
    visible_T = torch.cat((torch.arange(1000, 1200), torch.arange(1, 101)))
    arguments = (q_THQ, pool_PB1W, w_uk_HNL, w_uv_HVL, table_SM, starts, visible_T)
    call = partial(attend_expanded, scale=192**-0.5)
    want, want_lse = call(*(one.bfloat16().float() if one.is_floating_point() else one for one in arguments))
    on_gpu = [one.bfloat16().cuda() if one.is_floating_point() else one.cuda() for one in arguments]
    got, got_lse = call(*on_gpu, block_bytes=4 << 20)
    assert (got.float().cpu() - want).norm() < 1e-2 * want.norm()
    torch.testing.assert_close(got_lse.cpu(), want_lse, atol=2e-2, rtol=0)
