"""`helix bench prefill` on the CPU with cut-down models: what it prints, and which chunks it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helix.bench.prefill import sampled
from helix.bench.variants import read_variants
from helix.cli import main
from helix.config import make_config
from helix.cost.choices import Placement, make_formats
from helix.cost.hardware import load_hardware
from helix.cost.prefill import Chunk, chunk_attention_work, chunk_cost, chunks_of
from helix.engine.build import resolve_spec
from helix.layout import Layout, PageRule
from tests.tiny import TinyModels

SET = ["--set", "engine.device=cpu", "--set", "cache.num_page_rows=10"]


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "prefill", *arguments])
    assert ended.value.code == 0


def test_ranks_that_it_starts_itself_and_ranks_alone(
    tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sizes in one run, and one rank of each without its peers; a prompt that does not fit is skipped."""
    model = ["--set", f"model={{path: {tiny.path('deepseek_v2')}}}", "--card", "smollm2-135m"]
    chosen = ["--layouts", "kvp=1;kvp=2,shared_projections=10", "--one-rank-of", "kvp=2;tp=2"]
    picture = tmp_path / "prefill.svg"
    run(*model, *chosen, "--prompt", "100,5K", "--chunk", "40,100", *SET, "--plot", str(picture))
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert report["bench"] == "prefill"
    # Ten page rows: a prompt of 5K does not fit anywhere.
    assert len(report["skipped"]) == 8
    timings = report["timings"]
    assert [(one["variant"], one["one_rank"]) for one in timings[::2]] == [
        ("kvp=1", False),
        ("kvp=2,shared_projections=10", False),
        ("kvp=2", True),
        ("tp=2", True),
    ]
    assert [one["shared_from"] for one in timings[2:4]] == [10, 10]
    for one in timings:
        assert one["starts"] == list(range(0, 100, one["chunk"]))
        assert one["compute_ms"] == pytest.approx(sum(one["chunk_ms"]))
        assert (one["collectives_ms"] > 0) == one["one_rank"]
        assert one["first_token_ms"] == one["compute_ms"] + one["collectives_ms"]
        assert one["tokens_per_s"] == pytest.approx(1e5 / one["first_token_ms"])
        assert 0 < one["ceiling_ms"] < one["predicted_ms"]
    assert "one rank of tp=2" in picture.read_text()


def test_straight_lines_between_sampled_chunks(tiny: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--set", f"model={{path: {tiny.path('qwen3_moe')}}}", "--card", "smollm2-135m"]
    run(*model, "--prompt", "400", "--chunk", "40", "--sample", "3", "--repeats", "2", *SET, "--json")
    (line,) = capsys.readouterr().out.strip().splitlines()
    (one,) = json.loads(line)["timings"]
    assert one["starts"] == [0, 160, 360]
    first, middle, last = one["chunk_ms"]
    assert one["compute_ms"] == pytest.approx(2.5 * (first + middle) - middle + 3 * (middle + last), rel=1e-6)
    assert sampled(range(0, 400, 40), None) == list(range(0, 400, 40))
    assert sampled(range(0, 80, 40), 5) == [0, 40]


def test_chunks_cover_a_prompt() -> None:
    chunks = list(chunks_of(100, 40, shared_from=30))
    assert [(one.start, one.tokens, one.last, one.shared) for one in chunks] == [
        (0, 40, False, True),
        (40, 40, False, True),
        (80, 20, True, False),
    ]


@pytest.mark.parametrize(("kvp", "start", "tokens"), [(1, 0, 64), (1, 4096, 2048), (8, 4096, 2048), (8, 0, 8192)])
def test_attention_of_a_chunk_is_counted_query_by_query(kvp: int, start: int, tokens: int) -> None:
    spec = resolve_spec(make_config(model={"card": "llama-3.1-8b", "load": "dummy"}))
    placement = Placement(layout=Layout(kvp=kvp, tpf=kvp))
    chunk = Chunk(start=start, tokens=tokens)
    work = chunk_attention_work(spec, placement, make_formats("bfloat16"), chunk, 64)
    (attention,) = [one for one in work if one.reads == "cache"]
    rule = PageRule(64, kvp)
    pairs = sum(rule.local_len(position + 1, 0) for position in range(start, start + tokens))
    assert attention.flops == pytest.approx(4 * pairs * 32 * 128, rel=0.06)


def test_more_ranks_take_less_time_by_the_model() -> None:
    """A prompt of 128K tokens: eight times the ranks is at least five times as fast."""
    config = make_config(model={"card": "llama-3.1-405b", "load": "dummy"})
    spec = resolve_spec(config)
    hardware, formats = load_hardware("h200-sxm"), make_formats("bfloat16")

    def total(text: str, shared: int | None) -> float:
        (variant,) = read_variants(config, spec, text, None)
        layout = variant.layout(spec)
        assert layout is not None
        placement = Placement(layout=layout)
        chunks = chunks_of(1 << 17, 8192, shared)
        return sum(chunk_cost(spec, placement, formats, hardware, one, 64).ttl_ms for one in chunks)

    one, repeated, shared = total("kvp=1", None), total("kvp=8", None), total("kvp=8", 64)
    assert shared < repeated < one
    assert one / shared > 5
