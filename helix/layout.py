"""Layouts as integers: which ranks exist, which group each belongs to, and which slice of what each rank holds.

The attention phase runs N = kvp x tpa ranks, the FFN phase the same N = tpf x ep (see `Layout`). This module imports
no torch: every rule is a pure function, so that the planner can ask about 512 ranks and tests can check all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from helix.errors import LayoutError
from helix.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Slice:
    """Half-open range [start, stop) of a dim of size `total`, held in `padded` places (the rest is zero)."""

    start: int
    stop: int
    padded: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """Places that hold no real entry."""
        return self.padded - self.size


def padded_slice(total: int, parts: int, index: int) -> Slice:
    """Part `index` of `total` entries in `parts` equally wide parts; the last ones are padded if it does not divide."""
    width = -(-total // parts)
    start = min(index * width, total)
    return Slice(start, min(start + width, total), width, total)


def uneven_slice(total: int, parts: int, index: int) -> Slice:
    """Part `index` of `total` entries, sizes differing by at most one and nothing padded (experts over EP)."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    stop = start + base + (index < extra)
    return Slice(start, stop, stop - start, total)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Which scale belongs to value (i, j) of a block-scaled matrix: scale (i // rows, (j + skip) // cols)."""

    rows: int
    cols: int
    skip: int

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Rows and columns of the scales of an [outputs, inputs] matrix; columns in whole fours, which scaled products
        on a GPU ask for."""
        columns = -(-(self.skip + inputs) // self.cols)
        return -(-outputs // self.rows), columns + -columns % 4


def scale_grid(block: tuple[int, int], cuts: Iterable[tuple[int, int, int]]) -> ScaleGrid:
    """The coarsest grid on which a matrix made of slices of block-scaled tensors keeps each value's own scale.

    `block` is the size of the tensors' blocks, which count from a tensor's own origin; each cut is (first row in the
    tensor, first row in the matrix, first column in the tensor). Rows that cut a block split it into cells of the
    greatest common divisor, whose scales are repeated (the waste: `ScaleGrid.shape` times four bytes); a column that
    cuts one leaves its rest, `skip` columns narrower, as the first block.

    Raises ValueError where slices side by side cut different columns of a block: no layer does that.
    """
    cuts = tuple(cuts)
    skips = {column % block[1] for _, _, column in cuts} or {0}
    if len(skips) > 1:
        raise ValueError(f"slices begin {sorted(skips)} columns inside blocks of {block[1]}; they must begin alike")
    rows = gcd(block[0], *(start for source, target, _ in cuts for start in (source, target)))
    return ScaleGrid(rows, block[1], skips.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """Where one rank stands in both grids."""

    kvp_rank: int
    tpa_rank: int
    tpf_rank: int
    ep_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The four sizes of a Helix layout.

    Rank order: ``rank = tpa_rank * kvp + kvp_rank`` and ``rank = ep_rank * tpf + tpf_rank``. With KVP the fast axis,
    the head slice that a rank holds after the exchange is slice number ``rank`` of the output projection.

    `duplicate_kv` is the baseline that Helix replaces: TPA beyond the number of KV heads, each KV head copied.
    """

    kvp: int = 1
    tpa: int = 1
    tpf: int = 1
    ep: int = 1
    duplicate_kv: bool = False

    @property
    def num_ranks(self) -> int:
        return self.kvp * self.tpa

    def coords(self, rank: int) -> Coords:
        """Coordinates of `rank` in the attention grid and in the FFN grid."""
        return Coords(
            kvp_rank=rank % self.kvp, tpa_rank=rank // self.kvp, tpf_rank=rank % self.tpf, ep_rank=rank // self.tpf
        )

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All rank groups along `axis` (``kvp``, ``tpa``, ``tpf``, ``ep`` or ``world``), in a fixed order."""
        n, kvp, tpf = self.num_ranks, self.kvp, self.tpf
        if axis == "world":
            return (tuple(range(n)),)
        if axis in ("kvp", "tpf"):
            size = kvp if axis == "kvp" else tpf
            return tuple(tuple(range(first, first + size)) for first in range(0, n, size))
        if axis in ("tpa", "ep"):
            stride = kvp if axis == "tpa" else tpf
            return tuple(tuple(range(first, n, stride)) for first in range(stride))
        raise ValueError(f"unknown axis {axis!r}")

    def __str__(self) -> str:
        text = f"kvp={self.kvp} tpa={self.tpa} tpf={self.tpf} ep={self.ep}"
        return text + (" duplicate_kv" if self.duplicate_kv else "")


@dataclass(frozen=True, slots=True)
class PageRule:
    """Ownership of KV tokens as a pure function of the global position (DESIGN section 3).

    Page ``i = position // page_tokens`` belongs to KVP rank ``i % kvp``; `kvp` consecutive pages make a page row, and
    all ranks allocate rows in step. Local slots of one rank are ordered by global position.
    """

    page_tokens: int
    kvp: int

    @property
    def row_tokens(self) -> int:
        """Tokens of the sequence in one page row."""
        return self.page_tokens * self.kvp

    def owner(self, position: int) -> int:
        """KVP rank that stores the token at `position`."""
        return position // self.page_tokens % self.kvp

    def local_slot(self, position: int) -> int:
        """Slot of `position` among its owner's slots of this sequence."""
        return position // self.row_tokens * self.page_tokens + position % self.page_tokens

    def local_len(self, num_tokens: int, kvp_rank: int) -> int:
        """How many of the first `num_tokens` positions `kvp_rank` owns."""
        rows, rest = divmod(num_tokens, self.row_tokens)
        return rows * self.page_tokens + min(max(rest - kvp_rank * self.page_tokens, 0), self.page_tokens)

    def rows_for(self, num_tokens: int) -> int:
        """Page rows that `num_tokens` tokens take."""
        return -(-num_tokens // self.row_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShard:
    """Heads of one rank in the attention phase.

    The rank attends with query heads ``[q_start, q_stop)`` over KV heads ``[kv_start, kv_stop)``. For the exchange the
    shard's heads are padded to ``kvp * exchange_heads``; afterwards the rank holds ``exchange_heads`` heads, of which
    the real ones are global heads ``[out_start, out_stop)``.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    exchange_heads: int
    out_start: int
    out_stop: int

    @property
    def num_q(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_kv(self) -> int:
        return self.kv_stop - self.kv_start


def attention_shard(spec: ModelSpec, layout: Layout, rank: int) -> AttentionShard:
    """Head slices of `rank`; the layout must be legal (see `check_layout`)."""
    at = layout.coords(rank)
    heads_per_shard = spec.num_heads // layout.tpa
    q_start = at.tpa_rank * heads_per_shard
    cache_heads = spec.cache_heads
    if layout.tpa <= cache_heads:
        kv_per_shard = cache_heads // layout.tpa
        kv_start = at.tpa_rank * kv_per_shard
    else:
        kv_per_shard = 1
        kv_start = at.tpa_rank // (layout.tpa // cache_heads)
    out = padded_slice(heads_per_shard, layout.kvp, at.kvp_rank)
    return AttentionShard(
        q_start=q_start,
        q_stop=q_start + heads_per_shard,
        kv_start=kv_start,
        kv_stop=kv_start + kv_per_shard,
        exchange_heads=out.padded,
        out_start=q_start + out.start,
        out_stop=q_start + out.stop,
    )


def cache_token_bytes(spec: ModelSpec, layout: Layout, value_bytes: float, dense_bytes: int = 2) -> float:
    """Bytes that one token takes in one layer's cache on a rank, with `value_bytes` for each value.

    One byte means FP8 (`helix.kernels.fp8_cache`): each head's key and value, or the latent, has an fp32 scale, and
    rotary values of a latent stay in `dense_bytes`.
    """
    rows = 1 if spec.mla else 2 * attention_shard(spec, layout, 0).num_kv
    width = spec.cache_values_per_token if spec.mla else spec.head_dim
    if value_bytes != 1:
        return rows * width * value_bytes
    tail = spec.mla.rope_dim if spec.mla else 0
    return rows * (width - tail + tail * dense_bytes + 4)


def layout_problem(spec: ModelSpec, layout: Layout) -> str | None:
    """Why `layout` is not legal for `spec`, naming field, value and rule; None where it is legal."""
    for name in ("kvp", "tpa", "tpf", "ep"):
        if getattr(layout, name) < 1:
            return f"layout.{name}={getattr(layout, name)} must be at least 1"
    n = layout.num_ranks
    if layout.tpf * layout.ep != n:
        return (
            f"layout.tpf={layout.tpf} x layout.ep={layout.ep} is {layout.tpf * layout.ep} ranks, but "
            f"kvp={layout.kvp} x tpa={layout.tpa} is {n}: the same ranks serve both phases, so both must give the same"
        )
    return _attention_problem(spec, layout) or _ffn_problem(spec, layout)


def _attention_problem(spec: ModelSpec, layout: Layout) -> str | None:
    cache_heads, tpa = spec.cache_heads, layout.tpa
    kind = "the one MLA latent head" if spec.mla else f"{cache_heads} KV heads"
    if spec.num_heads % tpa:
        return f"layout.tpa={tpa} does not divide the model's {spec.num_heads} query heads"
    if layout.duplicate_kv:
        if layout.kvp != 1:
            return f"layout.duplicate_kv is the plain tensor-parallel baseline and needs kvp=1, not kvp={layout.kvp}"
        if tpa % cache_heads and cache_heads % tpa:
            return f"layout.tpa={tpa} with duplicate_kv must divide or be a multiple of {cache_heads} KV heads"
        return None
    if tpa > cache_heads:
        return (
            f"layout.tpa={tpa} is more than {kind}, which would copy the KV cache; raise kvp instead, "
            "or set layout.duplicate_kv: true for the plain tensor-parallel baseline"
        )
    if cache_heads % tpa:
        return f"layout.tpa={tpa} does not divide {kind}"
    return None


def _ffn_problem(spec: ModelSpec, layout: Layout) -> str | None:
    if spec.moe is None:
        if layout.ep != 1:
            return f"layout.ep={layout.ep} needs a model with experts; {spec.model_type} is dense, so ep must be 1"
        width = spec.intermediate_size
    else:
        if layout.ep > spec.moe.num_experts:
            return f"layout.ep={layout.ep} is more than the model's {spec.moe.num_experts} experts"
        width = spec.moe.expert_width
    if layout.tpf > width:
        return f"layout.tpf={layout.tpf} is more than the FFN width {width}"
    return None


def legal_layouts(spec: ModelSpec, num_ranks: int) -> Iterator[Layout]:
    """Every legal Helix layout on `num_ranks` ranks (the duplicating baseline is not among them)."""
    for tpa in range(1, min(num_ranks, spec.cache_heads) + 1):
        if num_ranks % tpa:
            continue
        for ep in range(1, num_ranks + 1):
            if num_ranks % ep:
                continue
            layout = Layout(kvp=num_ranks // tpa, tpa=tpa, tpf=num_ranks // ep, ep=ep)
            if layout_problem(spec, layout) is None:
                yield layout


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raise `LayoutError` naming what is wrong and the nearest legal layouts."""
    problem = layout_problem(spec, layout)
    if problem is None:
        return
    near = nearest_layouts(spec, layout)
    hint = "; nearest legal: " + " | ".join(str(one) for one in near) if near else ""
    raise LayoutError(problem + hint)


def nearest_layouts(spec: ModelSpec, layout: Layout, count: int = 3) -> list[Layout]:
    """Up to `count` legal layouts on the same number of ranks, the most similar first."""

    def distance(other: Layout) -> tuple[int, int]:
        pairs = ((other.kvp, layout.kvp), (other.tpa, layout.tpa), (other.tpf, layout.tpf), (other.ep, layout.ep))
        return sum(a != b for a, b in pairs), sum(abs(a - b) for a, b in pairs)

    num_ranks = max(layout.num_ranks, 1)
    return sorted(legal_layouts(spec, num_ranks), key=distance)[:count]


def default_layout(spec: ModelSpec, num_ranks: int) -> tuple[Layout, str]:
    """A legal layout for `num_ranks` ranks by rule, where nothing is known of the hardware, and why this one.

    No KV is copied, and the largest TPA (TPA shards the QKV weights, KVP repeats them; the number of padded query heads
    is the same for all), then experts spread over EP.
    """
    options = list(legal_layouts(spec, num_ranks))
    if not options:
        raise LayoutError(f"no legal layout on {num_ranks} ranks for {spec.model_type}")
    best = max(options, key=lambda layout: (layout.tpa, layout.ep))
    return best, "no KV copied, and the largest tpa, since kvp repeats the QKV weights and tpa cuts them"


def padded_heads(spec: ModelSpec, layout: Layout) -> int:
    """Query heads, over all ranks, that the exchange carries although they are only padding."""
    return layout.num_ranks * attention_shard(spec, layout, 0).exchange_heads - spec.num_heads


def with_defaults(sizes: dict[str, int | bool], num_ranks: int | None = None) -> Layout:
    """A `Layout` from the sizes a person gave: absent `tpf`/`ep` follow from N, an absent `kvp` from `num_ranks`."""
    tpa = int(sizes.get("tpa", 1))
    kvp = sizes.get("kvp")
    if kvp is None:
        kvp = 1 if sizes.get("duplicate_kv") or num_ranks is None else max(num_ranks // max(tpa, 1), 1)
    layout = Layout(kvp=int(kvp), tpa=tpa, duplicate_kv=bool(sizes.get("duplicate_kv", False)))
    n = layout.num_ranks
    if "tpf" in sizes and "ep" not in sizes:
        tpf = int(sizes["tpf"])
        ep = n // tpf if tpf > 0 and n % tpf == 0 else 1
    else:
        ep = int(sizes.get("ep", 1))
        tpf = int(sizes.get("tpf", n // ep if ep > 0 and n % ep == 0 else n))
    return replace(layout, tpf=tpf, ep=ep)
