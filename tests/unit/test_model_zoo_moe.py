"""Mixtral and Qwen3-MoE: reading config.json, names of tensors, and what the ranks of a grid hold of the experts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helix.comm.mesh import planning_mesh
from helix.config import CommConfig
from helix.errors import CheckpointError
from helix.layers.decoder import Decoder
from helix.layers.mlp import MLP
from helix.layers.moe import MoE
from helix.layout import Layout, layout_problem
from helix.model_spec import ModelSpec, MoESpec
from helix.weights import Declaration, check_checkpoint, declare
from model_zoo import load_spec, spec_from_config, text_names
from tests.tiny import TinyModels

MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def experts_of(hf: dict[str, Any]) -> MoESpec:
    moe = spec_from_config(hf).moe
    assert moe is not None
    return moe


def test_mixtral_8x7b() -> None:
    spec = spec_from_config(MIXTRAL_8X7B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_context) == (32, 8, 128, 32768)
    assert (spec.norm_eps, spec.rotary.theta, spec.qk_norm) == (1e-5, 1e6, False)
    assert spec.moe == MoESpec(num_experts=8, experts_per_token=2, expert_width=14336, normalise=True)


def test_qwen3_235b() -> None:
    spec = spec_from_config(QWEN3_235B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_context) == (64, 4, 128, 40960)
    assert (spec.rotary.theta, spec.qk_norm, spec.qkv_bias) == (1e6, True, False)
    assert spec.moe == MoESpec(num_experts=128, experts_per_token=8, expert_width=1536, normalise=True)


@pytest.mark.parametrize("config_class", [transformers.MixtralConfig, transformers.Qwen3MoeConfig])
def test_absent_keys_are_what_transformers_assumes(config_class: Any) -> None:
    config = config_class()
    written = config.to_dict()
    assert spec_from_config({"model_type": config.model_type}) == spec_from_config(
        {key: value for key, value in written.items() if key not in ("dtype", "torch_dtype")}
    )
    spec = spec_from_config(written)
    assert spec.rotary.theta == written["rope_parameters"]["rope_theta"]
    assert spec.norm_eps == config.rms_norm_eps
    assert experts_of(written).num_experts == config.num_local_experts


def test_mixtral_window_cuts_the_context(caplog: pytest.LogCaptureFixture) -> None:
    assert spec_from_config(MIXTRAL_8X7B | {"sliding_window": 4096}).max_context == 4096
    assert "sliding_window 4096" in caplog.text
    caplog.clear()
    assert spec_from_config(MIXTRAL_8X7B | {"sliding_window": 65536}).max_context == 32768
    assert not caplog.text


def test_mixtral_names_of_tensors() -> None:
    name = text_names(spec_from_config(MIXTRAL_8X7B))
    assert name is not None
    layer = "model.layers.3"
    for files, layers in {
        f"{layer}.block_sparse_moe.gate.weight": f"{layer}.mlp.gate.weight",
        f"{layer}.block_sparse_moe.experts.2.w1.weight": f"{layer}.mlp.experts.2.gate_proj.weight",
        f"{layer}.block_sparse_moe.experts.2.w2.weight": f"{layer}.mlp.experts.2.down_proj.weight",
        f"{layer}.block_sparse_moe.experts.2.w3.weight": f"{layer}.mlp.experts.2.up_proj.weight",
        f"{layer}.self_attn.q_proj.weight": f"{layer}.self_attn.q_proj.weight",
    }.items():
        assert name(files) == layers


def test_qwen3_moe_dense_layers() -> None:
    layers = QWEN3_235B | {"num_hidden_layers": 6}
    assert experts_of(layers | {"decoder_sparse_step": 2}).dense_layers == (0, 2, 4)
    assert experts_of(layers | {"mlp_only_layers": [5, 0, 17]}).dense_layers == (0, 5)
    assert experts_of(layers | {"decoder_sparse_step": 3, "mlp_only_layers": [2]}).dense_layers == (0, 1, 2, 3, 4)
    assert experts_of(layers | {"mlp_only_layers": None}).dense_layers == ()


def test_qwen3_moe_without_a_sparse_layer_is_dense() -> None:
    spec = spec_from_config(QWEN3_235B | {"num_hidden_layers": 2, "decoder_sparse_step": 3})
    assert spec.moe is None
    assert layout_problem(spec, Layout(kvp=2, ep=2)) is not None


def test_qwen3_moe_reads_both_names_of_the_number_of_experts() -> None:
    without = {key: value for key, value in QWEN3_235B.items() if key != "num_experts"}
    assert experts_of(without | {"num_local_experts": 64}).num_experts == 64
    assert experts_of(QWEN3_235B | {"num_local_experts": 128}).num_experts == 128


@pytest.mark.parametrize(
    ("hf", "change", "message"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; .* at most num_local_experts \(8\)"),
        (MIXTRAL_8X7B, {"num_local_experts": "8"}, "num_local_experts is '8'; it must be an integer"),
        (MIXTRAL_8X7B, {"sliding_window": 0}, "sliding_window is 0"),
        (QWEN3_235B, {"num_experts_per_tok": 129}, r"num_experts_per_tok is 129; .* at most num_experts \(128\)"),
        (QWEN3_235B, {"num_local_experts": 64}, "num_experts is 128; it must be 64 as in num_local_experts"),
        (QWEN3_235B, {"mlp_only_layers": [True]}, "mlp_only_layers is"),
        (QWEN3_235B, {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        (QWEN3_235B, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_235B, {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        (QWEN3_235B, {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True"),
    ],
)
def test_wrong_settings_name_the_key(hf: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(hf | change)


def build(spec: ModelSpec, layout: Layout, rank: int) -> Decoder:
    mesh = planning_mesh(layout, rank)
    return Decoder(spec, mesh, CommConfig(), dtype=torch.float32, device=mesh.device)


GRIDS = [
    Layout(),
    Layout(kvp=2, tpf=1, ep=2),
    Layout(kvp=4, tpf=2, ep=2),
    Layout(kvp=6, tpf=2, ep=3),
    Layout(kvp=6, tpf=6),
]


@pytest.mark.parametrize("layout", GRIDS, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3_moe"])
def test_ranks_hold_each_expert_exactly_once(tiny: TinyModels, family: str, layout: Layout) -> None:
    spec = load_spec(Path(tiny.path(family)))
    held: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for rank in range(layout.num_ranks):
        declarations = tuple(declare(build(spec, layout, rank)))
        # From the headers alone: nothing is missing, misshapen or left over on any rank.
        check_checkpoint(declarations, Path(tiny.path(family)), rename=text_names(spec))
        for name, numel, total in expert_pieces(declarations):
            held[name] += numel
            sizes[name] = total
    assert dict(held) == sizes
    assert spec.moe is not None
    layers = sum(not spec.moe.is_dense(layer) for layer in range(spec.num_layers))
    assert len(held) == 3 * layers * (spec.moe.num_experts + bool(spec.moe.shared_width))


def expert_pieces(declarations: tuple[Declaration, ...]) -> list[tuple[str, int, int]]:
    """(tensor, values held, values in all) of routed and shared experts."""
    return [
        (piece.name, piece.numel, torch.Size(piece.shape).numel())
        for _, _, pieces in declarations
        for piece in pieces
        if "experts" in piece.name
    ]


def test_dense_layers_of_a_model_with_experts_run_over_all_ranks(tiny: TinyModels) -> None:
    spec = load_spec(Path(tiny.path("qwen3_moe")))
    model = build(spec, Layout(kvp=4, tpf=2, ep=2), 3)
    kinds = [type(layer.ffn) for layer in model.layers]
    assert kinds == [MLP, MoE]
    dense = model.layers[0].ffn
    assert isinstance(dense, MLP)
    assert dense.down.weight.shape == (spec.hidden_size, -(-spec.intermediate_size // 4))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_expert_is_found_on_every_rank(tiny: TinyModels, tmp_path: Path, rank: int) -> None:
    source = Path(tiny.path("mixtral"))
    spec = load_spec(source)
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    declarations = tuple(declare(build(spec, Layout(kvp=2, tpf=1, ep=2), rank)))
    last = "model.layers.1.block_sparse_moe.experts.6.w2.weight"
    save_file(tensors | {last: tensors[last][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=last):
        check_checkpoint(declarations, tmp_path, rename=text_names(spec))
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.6\.down_proj"):
        check_checkpoint(declarations, tmp_path, rename=text_names(spec))
    extra = last.replace("experts.6", "experts.7")
    save_file(tensors | {extra: tensors[last].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=extra):
        check_checkpoint(declarations, tmp_path, rename=text_names(spec))
