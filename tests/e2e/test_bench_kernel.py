"""`helix bench kernel` on a machine without a GPU: the twins over a small grid, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
import torch

from helix.bench import kernels, products
from helix.cli import main


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernel", "--families", "mla"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert (report["bench"], report["device"]) == ("kernel", "cpu")
    assert [(one["family"], one["batch"], one["context"]) for one in report["records"]] == [
        ("mla, 8 heads", 1, 512),
        ("mla, 8 heads", 4, 512),
    ]
    for one in report["records"]:
        assert 0 < one["low_us"] <= one["median_us"] <= one["high_us"]
        assert one["share_of_ceiling"] > 0
        assert one["out_error"] < 1e-5
    assert any("4 x 512" in line for line in lines[:-1])


def test_a_family_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernel", "--families", "mamba"])
    assert ended.value.code == 2
    assert "gqa, 8 heads, 1 KV head" in capsys.readouterr().err


@pytest.mark.parametrize("grid", [kernels.GRID, kernels.CPU_GRID])
def test_floors_are_what_the_shapes_say(grid: dict[str, tuple[kernels.AttentionShape, ...]]) -> None:
    for shapes in grid.values():
        for shape in shapes:
            read = shape.kv_bytes / kernels.H200.read_bytes_per_s
            compute = shape.flops / kernels.H200.flops_per_s
            assert shape.floor_us(kernels.H200) == pytest.approx(1e6 * max(read, compute))
            assert compute > read or shape.num_heads / shape.num_kv_heads < 128


def test_products_of_every_kind_are_compared_with_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(calls: Sequence[Callable[[], object]]) -> tuple[float, float, float]:
        calls[-1]()
        return 2.0, 1.0, 3.0

    small = {"time_calls": run_once, "LINEARS": ((64, 32),), "HIDDEN": 32, "WIDTH": 16, "EXPERT_TOKENS": (1, 4)}
    for name, value in (small | {"_COLD_BYTES": 1 << 14}).items():
        monkeypatch.setattr(products, name, value)
    cpu = torch.device("cpu")
    records = [*products.bench_linear(cpu), *products.bench_experts(cpu), *products.bench_router(cpu)]
    assert [one["family"] for one in records] == ["linear"] * 3 + ["experts"] * 2 + ["router"] * 6
    assert all(one["out_error"] < 1e-2 for one in records)
    assert records[0]["tb_per_s"] == pytest.approx(64 * 32 * 2 / 2.0 / 1e6, abs=1e-3)
    monkeypatch.setattr(products, "linear", lambda x, weight: torch.full((len(x), len(weight)), torch.nan))
    with pytest.raises(AssertionError, match="64 x 32, 1 tokens"):
        next(products.bench_linear(cpu))
