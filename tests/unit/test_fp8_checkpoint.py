"""FP8 checkpoints as DeepSeek ships them: quantised here from known values, which every slice gives back exactly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from helix.check import check
from helix.comm.mesh import planning_mesh
from helix.config import CommConfig, make_config
from helix.engine import build
from helix.engine.build import ignored_tensors
from helix.engine.engine import Engine
from helix.errors import CheckpointError
from helix.layers.decoder import Decoder
from helix.layout import Layout, legal_layouts
from helix.weights import Packing, declare, fp8_tensors, held_in_fp8, load_weights
from model_zoo import load_spec, spec_from_config, text_names
from tests.parallel import jobs
from tests.ranks import RankPool
from tests.tiny import TinyModels, prompt

FAMILIES = ("llama", "mixtral", "deepseek_v2_moe", "deepseek_v3_moe")
# Sizes of the tiny models are no multiples of it, nor are the slices that ranks hold.
BLOCK = (16, 12)
# The router and what `modules_to_not_convert` of public checkpoints names stay as they are.
NOT_CONVERTED = ("embed_tokens", "lm_head", "gate", "layers.1.self_attn.o_proj")
CPU = torch.device("cpu")


def is_converted(name: str) -> bool:
    module = name.removesuffix(".weight")
    kept = any(module == one or module.endswith(f".{one}") for one in NOT_CONVERTED)
    return name.endswith(".weight") and "norm" not in name and not kept


def quantise(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, scales, and the fp32 weight that they stand for exactly.

    Values have four significant bits and scales are powers of two, so that no product is rounded.
    """
    values = (weight / weight.abs().max() * 15).round()
    blocks = [-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.exp2(torch.randint(-8, -3, blocks, generator=generator).float())
    spread = scales.repeat_interleave(BLOCK[0], 0)[: weight.shape[0]].repeat_interleave(BLOCK[1], 1)
    return values.to(torch.float8_e4m3fn), scales, values * spread[:, : weight.shape[1]]


class Pair:
    """One model twice: quantised under `fp8`, with the same values in fp32 under `plain` and in `values`."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.fp8, self.plain = folder / "fp8", folder / "plain"
        generator = torch.Generator().manual_seed(3)
        with safe_open(source / "model.safetensors", framework="pt") as reader:
            original = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (no mapping)
        stored: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        for name, tensor in original.items():
            if is_converted(name):
                stored[name], stored[f"{name}_scale_inv"], self.values[name] = quantise(tensor, generator)
            else:
                stored[name] = self.values[name] = tensor
        section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
        section["modules_to_not_convert"] = list(NOT_CONVERTED)
        config = json.loads((source / "config.json").read_text())
        for directory, tensors, extra in (
            (self.plain, self.values, {}),
            (self.fp8, stored, {"quantization_config": section}),
        ):
            directory.mkdir(parents=True)
            (directory / "config.json").write_text(json.dumps(config | extra))
            save_file(tensors, directory / "model.safetensors")
        self.num_converted = len(stored) - len(original)


@pytest.fixture(scope="module")
def pairs(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("fp8")
    return {family: Pair(Path(tiny.path(family)), folder / family) for family in FAMILIES}


def rank_model(directory: Path, layout: Layout, rank: int, comm: CommConfig, packing: Packing | None = None) -> Decoder:
    """What `rank` of `layout` holds of the checkpoint, in fp32 on the CPU, without the other ranks."""
    spec = load_spec(directory)
    mesh = replace(planning_mesh(layout, rank), device=CPU)
    model = Decoder(spec, mesh, comm, packing, dtype=torch.float32, device=CPU)
    load_weights(model, directory, ignore=ignored_tensors(model, spec), rename=text_names(spec))
    return model


def plain_weights(model: Decoder) -> list[Tensor]:
    """Everything that `model` declares, what is held in FP8 dequantised; no scale is left as it came."""
    held = {id(one.packed.values): one.packed for one in held_in_fp8(model)}
    assert held
    assert all(packed.scale.isfinite().all() for packed in held.values())
    return [
        held[id(tensor)].dequantise(torch.float32) if id(tensor) in held else tensor for _, tensor, _ in declare(model)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_slice_of_every_layout(pairs: dict[str, Pair], family: str, num_ranks: int) -> None:
    pair = pairs[family]
    assert pair.num_converted > 10
    rename = text_names(load_spec(pair.fp8)) or str
    values = {rename(name): tensor for name, tensor in pair.values.items()}
    spec = load_spec(pair.fp8)
    layouts = list(legal_layouts(spec, num_ranks))
    stored = fp8_tensors(pair.fp8, text_names(spec))
    assert layouts
    for layout in layouts:
        # What a rank holds of an MLA layer depends on these too.
        ways = (CommConfig(), CommConfig(query="gather", exchange_space="value"))
        for comm in ways:
            seen: dict[str, int] = {}
            for rank in range(num_ranks):
                for name, tensor, pieces in declare(rank_model(pair.fp8, layout, rank, comm)):
                    for piece in pieces:
                        index = tuple(slice(start, stop) for start, stop in piece.source)
                        wanted = values[piece.name][index].to(tensor.dtype)
                        assert torch.equal(piece.view(tensor), wanted), f"{layout} rank {rank}: {piece.name} in {name}"
                        seen[piece.name] = seen.get(piece.name, 0) + piece.numel
                held = plain_weights(rank_model(pair.fp8, layout, rank, comm, Packing(BLOCK, stored)))
                for (name, tensor, _), kept in zip(
                    declare(rank_model(pair.fp8, layout, rank, comm)), held, strict=True
                ):
                    assert torch.equal(tensor, kept), f"{layout} rank {rank}: {name} held in FP8"
            short = [name for name, count in seen.items() if count < values[name].numel()]
            assert not short, f"{layout}: no rank holds all of {short}"
            assert set(seen) == set(values)


def compressed_section(**weights: Any) -> dict[str, Any]:
    form = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": form}},
    }


@pytest.mark.parametrize(("family", "strategy"), [("llama", "tensor"), ("deepseek_v3_moe", "channel")])
def test_compressed_tensors_on_every_slice(tiny: TinyModels, tmp_path: Path, family: str, strategy: str) -> None:
    """One scale for a tensor or for each row, dequantised or held; scales fixed for activations are passed over."""
    source = Path(tiny.path(family))
    with safe_open(source / "model.safetensors", framework="pt") as reader:
        tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (no mapping)
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if is_converted(name):
            rounded = (tensor / tensor.abs().max() * 15).round()
            rows = len(tensor) if strategy == "channel" else 1
            scales = torch.exp2(torch.randint(-8, -3, (rows, 1), generator=generator).float())
            stored[name] = rounded.to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scales if strategy == "channel" else scales[0]
            stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(1)
            values[name] = rounded * scales
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": compressed_section(strategy=strategy)})
    )
    spec, block = load_spec(tmp_path), (1, 128) if strategy == "channel" else (128, 128)
    assert spec.fp8_block == block
    held = Packing(block, fp8_tensors(tmp_path))
    for num_ranks in (1, 3, 4):
        for layout in list(legal_layouts(spec, num_ranks))[-2:]:
            for rank in range(num_ranks):
                plain = rank_model(tmp_path, layout, rank, CommConfig())
                for _, tensor, pieces in declare(plain):
                    for piece in pieces:
                        index = tuple(slice(start, stop) for start, stop in piece.source)
                        assert torch.equal(piece.view(tensor), values[piece.name][index]), (layout, rank, piece.name)
                packed = plain_weights(rank_model(tmp_path, layout, rank, CommConfig(), held))
                assert all(
                    torch.equal(tensor, kept) for (_, tensor, _), kept in zip(declare(plain), packed, strict=True)
                )


def test_other_compressed_tensors_are_refused_by_name(tiny: TinyModels) -> None:
    for weights, words in (
        ({"num_bits": 4, "type": "int"}, "num_bits 4 and type 'int'; supported is FP8"),
        ({"num_bits": 4, "strategy": "tensor_group"}, "num_bits 4 and type 'float'; supported is FP8"),
        ({"strategy": "token"}, "strategy is 'token'"),
        ({"strategy": "block"}, "block_structure is None"),
    ):
        section = compressed_section(**weights)
        with pytest.raises(CheckpointError, match=words):
            spec_from_config(quantised_config("llama", tiny, section))
    section = compressed_section(strategy="block", block_structure=[128, 64])
    assert spec_from_config(quantised_config("llama", tiny, section)).fp8_block == (128, 64)


def settings(directory: Path, layout: dict[str, int]) -> dict[str, Any]:
    return {
        "model": {"path": str(directory), "dtype": "float32"},
        "layout": layout,
        "cache": {"page_tokens": 4, "num_page_rows": 60},
        "engine": {"device": "cpu"},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_is_not_quantised(pairs: dict[str, Pair], family: str) -> None:
    pair, token_ids = pairs[family], prompt(37)
    found = []
    for directory in (pair.fp8, pair.plain):
        with Engine(settings(directory, {"kvp": 1})) as engine:
            found.append(engine.logits(token_ids))
    assert torch.equal(*found)
    # transformers' other ways of computing experts need widths that are multiples of 16 bytes.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        pair.plain, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.inference_mode():
        wanted = model.eval()(torch.tensor([token_ids])).logits[0]
    np.testing.assert_allclose(found[0].numpy(), wanted.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "layout"), [("llama", {"kvp": 2, "tpa": 2}), ("deepseek_v3_moe", {"kvp": 4, "tpf": 2, "ep": 2})]
)
def test_logits_on_four_ranks(ranks: RankPool, pairs: dict[str, Pair], family: str, layout: dict[str, int]) -> None:
    prompts = [prompt(5), prompt(23)]
    found = []
    for directory, sizes, count in ((pairs[family].fp8, layout, 4), (pairs[family].plain, {"kvp": 1}, 1)):
        found.append(ranks.run(count, jobs.drive, settings(directory, sizes), jobs.logits_and_tokens, prompts, 12)[0])
    for ours, wanted in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)
    assert found[0][1] == found[1][1]


def test_the_dtype_of_a_tensor_decides_and_not_the_list(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """`modules_to_not_convert` may name what is converted and leave out what is not; nobody reads it."""
    pair = pairs["llama"]
    config = json.loads((pair.fp8 / "config.json").read_text())
    shutil.copy(pair.fp8 / "model.safetensors", tmp_path)
    for listed in (None, [], ["model.layers.0.mlp", "q_proj"]):
        config["quantization_config"]["modules_to_not_convert"] = listed
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = rank_model(tmp_path, Layout(), 0, CommConfig())
        for _, tensor, pieces in declare(model):
            for piece in pieces:
                assert torch.equal(piece.view(tensor), pair.values[piece.name])


@pytest.mark.parametrize("family", FAMILIES)
def test_check_reads_the_headers(pairs: dict[str, Pair], family: str) -> None:
    assert check(make_config(settings(pairs[family].fp8, {"kvp": 2}))).layout.kvp == 2


def quantised_config(family: str, tiny: TinyModels, section: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(tiny.path(family)) / "config.json").read_text())
    return config | {"quantization_config": section}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *FAMILIES[1:]])
def test_families_take_fp8_with_blocks_and_nothing_else(tiny: TinyModels, family: str) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    plain = spec_from_config(json.loads((Path(tiny.path(family)) / "config.json").read_text()))
    assert spec_from_config(quantised_config(family, tiny, section)) == replace(plain, fp8_block=(128, 128))
    for method in ("awq", "gptq", "fbgemm_fp8"):
        with pytest.raises(CheckpointError, match=rf"quantization_config .*quant_method '{method}'"):
            spec_from_config(quantised_config(family, tiny, {"quant_method": method, "weight_block_size": [128, 128]}))
    with pytest.raises(
        CheckpointError, match=r"quantization_config\.weight_block_size is None; it must be .*\[128, 128\]"
    ):
        spec_from_config(quantised_config(family, tiny, {"quant_method": "fp8"}))


def resident(directory: Path, layout: dict[str, int], **model: Any) -> dict[str, Any]:
    """`settings` with weights that stay FP8."""
    base = settings(directory, layout)
    return base | {"model": base["model"] | {"quantize": "fp8"} | model}


@pytest.mark.parametrize("family", FAMILIES)
def test_resident_weights_give_the_same_logits(pairs: dict[str, Pair], family: str) -> None:
    """With what the checkpoint stores in another format left as it is, as `auto` leaves it on a GPU."""
    spec = load_spec(pairs[family].fp8)
    stored = fp8_tensors(pairs[family].fp8, text_names(spec))
    with (
        mock.patch.object(build, "resolve_packing", return_value=Packing(BLOCK, stored)),
        Engine(settings(pairs[family].fp8, {"kvp": 1})) as engine,
    ):
        held = engine.logits(prompt(37))
    with Engine(settings(pairs[family].fp8, {"kvp": 1})) as engine:
        wanted = engine.logits(prompt(37))
    np.testing.assert_allclose(held.numpy(), wanted.numpy(), atol=1e-5, rtol=0)


LAYOUTS = [
    ("llama", {"kvp": 2, "tpa": 2}, "local"),
    ("llama", {"kvp": 3}, "local"),
    ("mixtral", {"kvp": 3, "tpf": 3, "ep": 1}, "local"),
    ("deepseek_v2_moe", {"kvp": 4, "tpf": 2, "ep": 2}, "alltoall"),
    ("deepseek_v3_moe", {"kvp": 6, "tpf": 2, "ep": 3}, "local"),
]


@pytest.mark.parametrize(("family", "layout", "dispatch"), LAYOUTS)
def test_layouts_agree_on_resident_weights(
    ranks: RankPool, pairs: dict[str, Pair], family: str, layout: dict[str, int], dispatch: str
) -> None:
    """From an FP8 checkpoint and from one that is quantised at load: slices cut blocks, values stay the same."""
    prompts = [prompt(5), prompt(23)]
    for directory in (pairs[family].fp8, pairs[family].plain):
        found = []
        for sizes in (layout, {"kvp": 1}):
            config = resident(directory, sizes)
            if family != "llama":
                config["comm"] = {"dispatch": dispatch}
            count = sizes["kvp"] * sizes.get("tpa", 1)
            found.append(ranks.run(count, jobs.drive, config, jobs.logits_and_tokens, prompts, 12)[0])
        for ours, wanted in zip(found[0][0], found[1][0], strict=True):
            np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)
        assert found[0][1] == found[1][1]
