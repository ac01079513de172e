"""`helix bench kernel` on a machine without a GPU: the twins over a small grid, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from helix.bench import kernels
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
