"""What the kernel tests share: hostile cases, fp64 references that know nothing of pages, and one way to compare.

A case is first made as whole sequences. One KVP rank's part of them is then scattered over shuffled pages of a pool
whose every other slot is NaN, so that whatever reads a slot it should not read is found out.

Letters: T tokens, S sequences, H query heads, K KV heads, D and V widths of keys and values, P pages, B page_tokens,
R page rows of one sequence, L tokens of one sequence, Z partials.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.guarded import at_the_end

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Past the end of a sequence the page table holds what would crash or corrupt if it were read.
_ABSURD_PAGES = (2**31 - 1, -(2**31), 10**9, -1)
_NUM_UNUSED_PAGES = 3
_FEW_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element may be off by `absolute` or by `relative` times its size; all together by `overall` in norm.

    The norm is left out where there are too few elements for their sizes to even out.
    """

    absolute: float
    relative: float
    overall: float

    def times(self, factor: float) -> Tolerance:
        return Tolerance(self.absolute * factor, self.relative * factor, self.overall * factor)


# The 16-bit rows are two roundings wide for an element and one in norm. The lse is fp32, so the fp32 row is for it too.
TOLERANCES = {
    torch.float32: Tolerance(absolute=4e-6, relative=4e-6, overall=3e-6),
    torch.float16: Tolerance(absolute=1e-3, relative=1e-3, overall=4e-4),
    torch.bfloat16: Tolerance(absolute=8e-3, relative=8e-3, overall=3e-3),
}


def assert_close(got: Tensor, want: Tensor, tolerance: Tolerance | None = None) -> None:
    """Compare with an fp64 reference: places of NaN and inf, then each element, then the norm of the difference.

    The tolerance is that of `got`'s dtype where none is given.
    """
    limit = tolerance or TOLERANCES[got.dtype]
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.double(), want.double()
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = torch.nonzero(test(got) != test(want))
        assert not len(wrong), (
            f"{name} where it should not be, or missing, at {len(wrong)} places, first {wrong[0].tolist()}"
        )
    finite = torch.isfinite(want)
    error, size = (got - want)[finite].abs(), want[finite].abs()
    bad = (error > limit.absolute) & (error > limit.relative * size)
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} elements are off, the worst by {error[bad].max():.3g}"
    if error.numel() > _FEW_ELEMENTS:
        assert error.norm() <= limit.overall * size.norm(), f"norm is off by {error.norm():.3g} of {size.norm():.3g}"


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal shape, dtype and bits, so that NaN equals itself and -0 is not 0."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(bits(got), bits(want))


def bits(x: Tensor) -> Tensor:
    """A copy of `x` as integers of its item size."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sequences of `lengths` tokens, of which the last `queries` are the step's, as KVP rank `kvp_rank` sees them.

    `latent`: values are the first `v_width` places of the keys, in one pool, as in MLA.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    width: int = 8
    v_width: int = 8
    page_tokens: int = 4
    kvp: int = 1
    kvp_rank: int = 0
    latent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence as a whole: queries at `position_T`, all its keys and values, and which of them this rank owns."""

    q_THD: Tensor
    k_LKD: Tensor
    v_LKV: Tensor
    position_T: Tensor
    owned_L: Tensor

    @property
    def seen_TL(self) -> Tensor:
        """Which keys each query may see, on whatever rank."""
        return torch.arange(len(self.k_LKD)) <= self.position_T.unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The arguments of one `attend` call, and the sequences they were made from."""

    q_THD: Tensor
    k_PBKD: Tensor
    v_PBKV: Tensor
    page_table_SR: Tensor
    query_start_S1: Tensor
    visible_len_T: Tensor
    scale: float
    sequences: tuple[Sequence, ...]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return (
            self.q_THD,
            self.k_PBKD,
            self.v_PBKV,
            self.page_table_SR,
            self.query_start_S1,
            self.visible_len_T,
            self.scale,
        )

    def reference(self, *, all_ranks: bool = False) -> tuple[Tensor, Tensor]:
        """fp64 out [T, H, V] and lse [T, H] over this rank's keys, or over the keys of all ranks."""
        parts = [
            dense_attention(one.q_THD, one.k_LKD, one.v_LKV, one.seen_TL & (one.owned_L | all_ranks), self.scale)
            for one in self.sequences
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def dense_attention(
    q_THD: Tensor, k_LKD: Tensor, v_LKV: Tensor, seen_TL: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention in fp64 over the keys that `seen_TL` marks; 0 and -inf for a query that sees none."""
    group = q_THD.shape[1] // k_LKD.shape[1]
    k_LHD = k_LKD.double().repeat_interleave(group, 1)
    v_LHV = v_LKV.double().repeat_interleave(group, 1)
    score_THL = torch.einsum("thd,lhd->thl", q_THD.double(), k_LHD) * scale
    seen_T1L = seen_TL.unsqueeze(1)
    lse_TH = score_THL.masked_fill(~seen_T1L, -torch.inf).logsumexp(-1)
    weight_THL = torch.where(seen_T1L, (score_THL - lse_TH.unsqueeze(-1)).exp(), 0.0)
    return torch.einsum("thl,lhv->thv", weight_THL, v_LHV), lse_TH


def build_case(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> AttentionCase:
    """A case of this shape. Queries, keys and values depend on the seed but not on the rank, pages on both.

    Behind none of its tensors may anything be read.
    """
    content = torch.Generator().manual_seed(seed)
    sequences = tuple(
        _build_sequence(shape, length, count, dtype, content)
        for length, count in zip(shape.lengths, shape.queries, strict=True)
    )
    k_PBKD, v_PBKV, table = _scatter(shape, sequences, torch.Generator().manual_seed(1000 * seed + shape.kvp_rank))
    visible = [(one.seen_TL & one.owned_L).sum(1) for one in sequences]
    k_PBKD = at_the_end(k_PBKD)
    return AttentionCase(
        q_THD=at_the_end(torch.cat([one.q_THD for one in sequences])),
        k_PBKD=k_PBKD,
        v_PBKV=k_PBKD[..., : shape.v_width] if shape.latent else at_the_end(v_PBKV),
        page_table_SR=at_the_end(table),
        query_start_S1=at_the_end(torch.tensor([0, *shape.queries]).cumsum(0)),
        visible_len_T=at_the_end(torch.cat(visible)),
        scale=shape.width**-0.5,
        sequences=sequences,
    )


def _build_sequence(shape: Shape, length: int, count: int, dtype: torch.dtype, content: torch.Generator) -> Sequence:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=content).to(dtype)

    position_L = torch.arange(length)
    k_LKD = normal(length, shape.num_kv_heads, shape.width)
    v_LKV = normal(length, shape.num_kv_heads, shape.v_width)
    return Sequence(
        q_THD=normal(count, shape.num_heads, shape.width),
        k_LKD=k_LKD,
        v_LKV=k_LKD[..., : shape.v_width] if shape.latent else v_LKV,
        position_T=position_L[length - count :],
        owned_L=position_L // shape.page_tokens % shape.kvp == shape.kvp_rank,
    )


def _scatter(shape: Shape, sequences: tuple[Sequence, ...], pages: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pools and page table of this rank: no page serves two sequences, and what holds no token of them is NaN."""
    size = shape.page_tokens
    owned = [torch.nonzero(one.owned_L).squeeze(1) for one in sequences]
    counts = [-(-len(positions) // size) for positions in owned]
    num_pages = sum(counts) + _NUM_UNUSED_PAGES
    dtype = sequences[0].q_THD.dtype
    k_PBKD = torch.full((num_pages, size, shape.num_kv_heads, shape.width), torch.nan, dtype=dtype)
    v_PBKV = k_PBKD[..., : shape.v_width]
    if not shape.latent:
        v_PBKV = torch.full((num_pages, size, shape.num_kv_heads, shape.v_width), torch.nan, dtype=dtype)
    table = torch.tensor(_ABSURD_PAGES).repeat(len(sequences), 1 + max(counts))[:, : 2 + max(counts)].int()
    taken = torch.split(torch.randperm(num_pages, generator=pages), [*counts, _NUM_UNUSED_PAGES])
    for row, (one, positions, mine) in enumerate(zip(sequences, owned, taken, strict=False)):
        table[row, : len(mine)] = mine
        slots = torch.arange(len(positions))
        k_PBKD[mine[slots // size], slots % size] = one.k_LKD[positions]
        v_PBKV[mine[slots // size], slots % size] = one.v_LKV[positions]
    return k_PBKD, v_PBKV, table


def random_partials(
    parts: int, tokens: int, heads: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Partial outputs [Z, T, H, D] and lse [Z, T, H] in which much is empty (0 and -inf).

    With more than one part the last has nothing at all, and token 0 nothing in any part.
    """
    generator = torch.Generator().manual_seed(seed)
    out_ZTHD = torch.randn(parts, tokens, heads, width, generator=generator).to(dtype)
    lse_ZTH = 4 * torch.randn(parts, tokens, heads, generator=generator)
    empty_ZTH = torch.rand(parts, tokens, heads, generator=generator) < 0.3
    empty_ZTH[:, 0] = True
    if parts > 1:
        empty_ZTH[-1] = True
    out_ZTHD.masked_fill_(empty_ZTH.unsqueeze(-1), 0.0)
    return at_the_end(out_ZTHD), at_the_end(lse_ZTH.masked_fill(empty_ZTH, -torch.inf))


def dense_merge(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 merge of partials, an lse that is not finite being an empty part."""
    filled_ZTH = torch.isfinite(lse_ZTH)
    lse_TH = lse_ZTH.double().masked_fill(~filled_ZTH, -torch.inf).logsumexp(0)
    share_ZTH = torch.where(filled_ZTH, (lse_ZTH.double() - lse_TH).exp(), 0.0)
    parts_ZTHD = torch.where(filled_ZTH.unsqueeze(-1), out_ZTHD.double() * share_ZTH.unsqueeze(-1), 0.0)
    return parts_ZTHD.sum(0), lse_TH
