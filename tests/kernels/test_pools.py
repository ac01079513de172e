"""The page pools: shapes and bytes for GQA and MLA, and that a pool starts with nothing that is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helix.cache.pools import KVCache, build_cache, page_bytes
from helix.kernels import append, attend
from helix.layout import Layout, attention_shard
from helix.model_spec import MLASpec, ModelSpec, RotarySpec
from tests.kernels.cases import assert_same_bits

GQA = ModelSpec(
    model_type="llama",
    num_layers=3,
    hidden_size=72,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    intermediate_size=50,
    vocab_size=97,
    max_context=512,
    norm_eps=1e-5,
    rotary=RotarySpec(theta=10000.0, dim=8),
)
MLA = replace(
    GQA,
    model_type="deepseek_v3",
    num_heads=16,
    num_kv_heads=16,
    mla=MLASpec(q_lora_rank=None, kv_lora_rank=64, nope_dim=16, rope_dim=16, v_dim=16),
)
CPU = torch.device("cpu")
LAYOUTS = [
    (GQA, Layout(), 3),
    (GQA, Layout(kvp=3, tpf=3), 3),
    (GQA, Layout(kvp=2, tpa=3, tpf=6), 1),
    (GQA, Layout(tpa=9, tpf=9, duplicate_kv=True), 1),
    (MLA, Layout(), 1),
    (MLA, Layout(kvp=4, tpf=4), 1),
]


def held_bytes(cache: KVCache) -> int:
    """Bytes of the distinct storages behind all pools."""
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spec", "layout", "num_kv"), LAYOUTS, ids=str)
def test_shapes_and_bytes(spec: ModelSpec, layout: Layout, num_kv: int, dtype: torch.dtype) -> None:
    for rank in range(layout.num_ranks):
        cache = build_cache(spec, layout, rank, num_rows=5, page_tokens=4, dtype=dtype, device=CPU)
        assert (cache.num_rows, cache.page_tokens, len(cache.layers)) == (5, 4, spec.num_layers)
        widths = (80, 64) if spec.mla else (8, 8)
        for layer in cache.layers:
            assert layer.k.shape == (5, 4, num_kv, widths[0])
            assert layer.v.shape == (5, 4, num_kv, widths[1])
            assert {layer.k.dtype, layer.v.dtype} == {dtype}
        assert held_bytes(cache) == 5 * page_bytes(spec, layout, 4, dtype.itemsize)


@pytest.mark.parametrize(
    ("spec", "layout", "expected"),
    [
        (GQA, Layout(kvp=2, tpa=3, tpf=6), 3 * 64 * 2 * 1 * 8 * 2),
        (GQA, Layout(kvp=6, tpf=6), 3 * 64 * 2 * 3 * 8 * 2),
        (MLA, Layout(kvp=8, tpf=8), 3 * 64 * 80 * 2),
    ],
    ids=str,
)
def test_bytes_of_a_page(spec: ModelSpec, layout: Layout, expected: int) -> None:
    assert page_bytes(spec, layout, page_tokens=64, itemsize=2) == expected


def test_latent_pool_is_keys_and_values_at_once() -> None:
    cache = build_cache(MLA, Layout(), 0, num_rows=2, page_tokens=4, dtype=torch.float32, device=CPU)
    layer = cache.layers[1]
    latent = torch.randn(1, 1, 80, generator=torch.Generator().manual_seed(0))
    assert isinstance(layer.k, torch.Tensor)
    assert isinstance(layer.v, torch.Tensor)
    append(layer.k, latent, torch.tensor([6]))
    assert_same_bits(layer.k[1, 2], latent[0])
    assert_same_bits(layer.v[1, 2], latent[0, :, :64])


@pytest.mark.parametrize(("spec", "layout", "num_kv"), LAYOUTS, ids=str)
def test_what_was_appended_is_what_is_attended(spec: ModelSpec, layout: Layout, num_kv: int) -> None:
    cache = build_cache(spec, layout, 0, num_rows=3, page_tokens=4, dtype=torch.float32, device=CPU)
    layer, generator = cache.layers[-1], torch.Generator().manual_seed(0)
    for one in cache.layers:
        for tensor in one.tensors:
            tensor.fill_(torch.nan)
    width, v_width = layer.k.shape[-1], layer.v.shape[-1]
    keys, values = (
        torch.randn(1, num_kv, width, generator=generator),
        torch.randn(1, num_kv, v_width, generator=generator),
    )
    if spec.mla:
        values = keys[..., :v_width]
    append(layer.k, keys, torch.tensor([8]))
    append(layer.v, values, torch.tensor([8]))
    shard = attention_shard(spec, layout, 0)
    q_THD = torch.randn(1, shard.num_q, width, generator=generator)
    out, _ = attend(
        q_THD, layer.k, layer.v, torch.tensor([[2, 99]]), torch.tensor([0, 1]), torch.tensor([1]), spec.attention_scale
    )
    assert_same_bits(out, values.repeat_interleave(shard.num_q // num_kv, 1))
    assert all(tensor.isnan().all() for tensor in cache.layers[0].tensors)
