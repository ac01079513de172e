"""The planner: candidates under their own rules, ranking, explanation, groups, output, and `layout: auto`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helix.cli import app
from helix.config import make_config
from helix.cost.choices import Choices
from helix.cost.hardware import load_hardware
from helix.errors import ConfigError
from helix.layout import Layout, layout_problem, legal_layouts
from helix.planner.auto import choose_layout
from helix.planner.candidates import Candidate, Refused, refused_layouts
from helix.planner.command import read_gpus, read_tokens
from helix.planner.explain import explain, leader, tokens_text
from helix.planner.frontier import frontier, gpu_rate_at, sweep
from helix.planner.groups import map_groups, ranks_text
from helix.planner.rivals import rival_candidates
from helix.planner.search import Plan, Question, all_candidates, make_plan, sort_key
from model_zoo.cards import card_names, load_card
from tests.unit import golden_plans

MILLION = 1 << 20


def question(model: str = "llama-3.1-405b", gpus: int = 64, hardware: str = "h200-sxm", **changes: Any) -> Question:
    fields: dict[str, Any] = {
        "model": model,
        "spec": load_card(model),
        "hardware": load_hardware(hardware),
        "num_gpus": (gpus,),
        "context": MILLION,
    }
    return Question(**(fields | changes))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# ---- candidates ----


def test_every_layout_is_either_legal_or_refused_with_its_rule() -> None:
    spec = load_card("deepseek-r1")
    legal = {str(layout) for layout in legal_layouts(spec, 64)}
    refused = {one.label: one.reason for one in refused_layouts(spec, 64)}
    assert len(legal) + len(refused) == 49  # divisors of 64, squared
    assert not legal & set(refused)
    assert "the one MLA latent head" in refused["kvp=32 tpa=2 tpf=64 ep=1"]


def rivals(model: str, gpus: int) -> tuple[list[Candidate], list[Refused]]:
    found = list(rival_candidates(load_card(model), gpus, Choices()))
    return [one for one in found if isinstance(one, Candidate)], [one for one in found if isinstance(one, Refused)]


def test_dcp_follows_vllms_rules() -> None:
    """GQA: (tp // kv_heads) % dcp == 0; MLA: tp % dcp == 0."""
    fine, refused = rivals("llama-3.1-405b", 64)
    assert {one.placement.layout.kvp for one in fine if one.scheme == "dcp-a2a"} == {2, 4, 8}
    assert "(64 // 8) % 16" in next(one.reason for one in refused if one.label == "tp=64 dcp=16")
    fine, _ = rivals("llama-3.1-405b", 8)
    assert not [one for one in fine if one.scheme.startswith("dcp")]
    fine, _ = rivals("deepseek-r1", 8)
    assert {one.placement.layout.kvp for one in fine if one.scheme == "dcp-ag-rs"} == {2, 4, 8}


@settings(max_examples=60, deadline=None)
@given(model=st.sampled_from(card_names()), gpus=st.integers(1, 96))
def test_rivals_use_all_gpus_and_cut_heads_evenly(model: str, gpus: int) -> None:
    spec = load_card(model)
    for one in rivals(model, gpus)[0]:
        place = one.placement
        assert place.num_ranks == gpus, one
        assert spec.num_heads % place.layout.tpa == 0
        assert place.pp <= spec.num_layers
        if one.scheme == "dp-ep":
            assert place.layout.tpa * place.dp == gpus == place.ffn_ranks
        if one.scheme == "medha":
            assert place.ffn_ranks == place.layout.tpa
        if one.scheme == "tp" and gpus <= spec.cache_heads and spec.cache_heads % gpus == 0:
            assert not place.layout.duplicate_kv
            assert layout_problem(spec, place.layout) is None


def test_helix_without_sequence_shards_costs_what_plain_tp_costs() -> None:
    plan = make_plan(question("llama-3.1-8b", 8, context=1 << 17))
    tp = plan.best_of("tp")
    assert tp is not None
    helix = next(one for one in plan.helix if one.candidate.placement.layout.kvp == 1)
    assert helix.cost.ttl_us == pytest.approx(tp.cost.ttl_us)


# ---- ranking ----


def test_ranked_by_the_objective() -> None:
    for objective in ("ttl", "throughput", "concurrency"):
        asked = question("deepseek-r1", 16, hardware="gb200-nvl72", objective=objective, ttl_us=50e3)
        plan = make_plan(asked)
        keys = [sort_key(asked, one) for one in plan.ranked]
        assert keys == sorted(keys)
        late = [one.cost.ttl_us > 50e3 for one in plan.ranked]
        assert late == sorted(late)
        for one in plan.ranked:
            assert one.memory.fits
            assert one.cost.batch <= one.memory.largest_batch


def test_batch_within_the_target_is_the_largest() -> None:
    asked = question("deepseek-v2-lite", 8, context=1 << 17, objective="concurrency", ttl_us=15e3)
    best = make_plan(asked).winner
    assert best.batch_in_ttl is not None
    assert best.cost.batch == best.batch_in_ttl
    assert best.cost.ttl_us <= 15e3
    one_more = replace(asked, batch=best.batch_in_ttl + 1, objective="ttl")
    again = next(row for row in make_plan(one_more).ranked if row.candidate == best.candidate)
    assert again.cost.ttl_us > 15e3


def test_largest_batch_that_fits_does_and_one_more_does_not() -> None:
    asked = question("llama-3.1-70b", 8, context=1 << 17, batch=4)
    best = make_plan(asked).winner
    most = best.memory.largest_batch
    fits = make_plan(replace(asked, batch=most))
    assert any(one.candidate.placement.layout == best.candidate.placement.layout for one in fits.ranked)
    with pytest.raises(ConfigError, match=rf"KV of {most + 1} sequences takes"):
        make_plan(replace(asked, batch=most + 1))


def test_nothing_fits_names_what_is_missing() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no placement of deepseek-r1 on 1 GPUs works: the nearest, .* does not fit: .* leave nothing",
    ):
        make_plan(question("deepseek-r1", 1))


def test_helix_wins_long_contexts_and_says_where_it_stops() -> None:
    """DeepSeek-R1 on 64 GPUs: plain TP copies the latent cache on every rank."""
    asked = question("deepseek-r1", 64, hardware="gb200-nvl72")
    plan = make_plan(asked)
    why = explain(plan)
    assert plan.winner.candidate.scheme == "helix"
    tp = plan.best_of("tp")
    assert tp is not None
    assert tp.cost.parts.attention_read > 60 * plan.winner.cost.parts.attention_read
    assert why.why.startswith("Helix (kvp=64 tpa=1")
    candidates = [plan.winner.candidate, *(one.candidate for one in plan.ranked[1:])]
    for edge, beyond in ((why.wins_from, why.below), (why.wins_to, why.above)):
        if edge is not None:
            assert leader(asked, candidates, 1, edge) == plan.winner.candidate
            assert beyond is None or beyond != plan.winner.candidate


def test_short_contexts_are_given_to_plain_tp() -> None:
    plan = make_plan(question("deepseek-v2-lite", 2, context=4096))
    assert plan.winner.candidate.scheme != "helix"
    assert explain(plan).wins_to is not None


def test_overlap_never_makes_a_step_slower() -> None:
    """The planner may always choose lockstep."""
    asked = question("deepseek-r1", 32, hardware="gb200-nvl72", batch=32, context=1 << 18)
    for one in make_plan(asked).helix:
        assert one.cost.parts.overlap_gained >= 0


def test_frontier_is_a_frontier() -> None:
    asked = question("llama-3.1-70b", 8, context=1 << 17)
    points = sweep(asked, all_candidates(asked), max_batch=64)
    front = frontier(points)
    rates = [one.tokens_per_s_gpu for one in front]
    assert rates == sorted(rates, reverse=True)
    for point in points:
        assert gpu_rate_at(front, point.tokens_per_s_user) >= point.tokens_per_s_gpu


@pytest.mark.parametrize(("gpus", "seconds"), [(64, 2.0), (512, 10.0)])
def test_speed(gpus: int, seconds: float) -> None:
    start = time.process_time()
    plan = make_plan(question("deepseek-r1", gpus, hardware="gb200-nvl72", objective="concurrency", ttl_us=60e3))
    explain(plan)
    assert time.process_time() - start < seconds


# ---- groups ----


def test_groups_and_links() -> None:
    asked = question("llama-3.1-405b", 64)
    plan = make_plan(asked)
    found = map_groups(asked, plan.helix[0].candidate.placement, 1)
    assert len(found.coords) == 64
    links = {(one.purpose, one.axis): one.link for one in found.traffic}
    assert links["exchange", "kvp"] == "inside a node"
    assert links["all-reduce", "world"] == "between 8 nodes"
    for axis, groups in found.groups.items():
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(64)), axis


def test_exchange_inside_a_node_is_preferred() -> None:
    """With latency alone in the way, the layout whose KVP group leaves the node has the longer exchange."""
    plan = make_plan(question("llama-3.1-70b", 16))
    by_kvp = {one.candidate.placement.layout.kvp: one.cost.parts.exchange for one in plan.helix}
    assert by_kvp[16] > 1.5 * by_kvp[8]


def test_ranks_text() -> None:
    assert [ranks_text(one) for one in ((3,), (0, 1, 2), (0, 8), (0, 8, 16, 24))] == ["3", "0-2", "0,8", "0,8,..,24"]


# ---- the command ----

ARGUMENTS = ("--model", "deepseek-v2-lite", "--gpus", "2,4", "--context", "512K")


def test_table_names_parts_reason_and_refusals() -> None:
    text = run(*ARGUMENTS, "--batch", "4", "--show-groups")
    for word in (
        "TTL",
        "attn",
        "exch",
        "Helix",
        "plain TP",
        "DCP, A2A",
        "wins",
        "refused",
        "one MLA latent head",
        "kvp rank",
    ):
        assert word in text, word


def test_json_holds_everything() -> None:
    tree = json.loads(run(*ARGUMENTS, "--ttl-ms", "20", "--json").splitlines()[-1])
    best = tree["ranked"][0]
    parts = best["parts_us"]
    assert best["ttl_us"] == pytest.approx(sum(parts.values()) - 2 * parts["overlap_gained"])
    assert {"attention", "experts", "kv_cache", "embedding"} <= set(best["memory_bytes"])
    assert best["batch_in_ttl"] >= 1
    assert {one["num_gpus"] for one in tree["ranked"]} == {2, 4}
    assert tree["refused"]
    assert tree["why"]


def test_golden_plans() -> None:
    """What a change of a card or of a formula moves is seen here; look at it, then run the command below."""
    want = golden_plans.PATH.read_text(encoding="utf-8").splitlines()
    assert golden_plans.lines() == want, "if that is meant: python -m tests.unit.golden_plans"


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v2-lite", "qwen3-30b-a3b"])
@pytest.mark.parametrize("context", ["4K", "1M"])
def test_yaml_is_a_config_that_runs(model: str, context: str) -> None:
    text = run("--model", model, "--gpus", "4", "--context", context, "--yaml")
    config = make_config(yaml.safe_load(text))
    assert config.model.card == model
    assert config.layout != "auto"
    layout = Layout(**{"duplicate_kv": False, **config.layout.sizes()})  # type: ignore[arg-type]
    assert layout.num_ranks == 4
    assert layout_problem(load_card(model), layout) is None


def test_yaml_refuses_formats_the_engine_does_not_hold() -> None:
    with pytest.raises(ConfigError, match="does not hold weights as nvfp4"):
        run("--model", "llama-3.1-8b", "--gpus", "2", "--hardware", "b200", "--weights", "nvfp4", "--yaml")


@pytest.mark.parametrize(("arguments", "message"), [
    (("--gpus", "2"), "needs --model"),
    (("--model", "llama-9"), "neither a model card"),
    (("--model", "llama-3.1-8b", "--hardware", "h20"), "not a hardware card"),
    (("--model", "llama-3.1-8b", "--gpus", "0"), "--gpus '0'"),
    (("--model", "llama-3.1-8b", "--context", "1T"), "--context '1T'"),
    (("--model", "llama-3.1-8b", "--objective", "fast"), "--objective 'fast'"),
    (("--model", "llama-3.1-8b", "--transport", "pigeon"), "--transport 'pigeon' must be auto"),
    (("--model", "llama-3.1-8b", "--batch", "0"), "--batch 0"),
    (("--model", "llama-3.1-8b", "--ttl-ms", "-1"), "--ttl-ms -1"),
    (("--model", "llama-3.1-8b", "--weights", "int3"), "number format 'int3'"),
    (("--model", "llama-3.1-8b", "--plot", "x.txt"), "must end in one of"),
    (("--model", "llama-3.1-8b", "--html", "nowhere/x.html"), "no folder nowhere"),
    (("--reproduce", "everything"), "must be one of helix-paper"),
])  # fmt: skip
def test_wrong_words_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def test_a_config_is_placed_among_the_others(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "{model: {card: deepseek-v2-lite, load: dummy}, layout: {kvp: 4, ep: 4}, engine: {max_context: 1M}}"
    )
    text = run("--config", str(path), "--batch", "4")
    assert "deepseek-v2-lite on 4 x NVIDIA H200 SXM, context 1M, batch 4" in text
    assert "The config's layout, kvp=4 tpa=1 tpf=1 ep=4, has " in text
    tree = json.loads(run("--config", str(path), "--set", "layout.ep=1", "--json").splitlines()[-1])
    assert "kvp=4 tpa=1 tpf=4 ep=1, is the best here" in tree["own"]
    assert "is refused: layout.tpa=2" in run("--config", str(path), "--set", "layout.tpa=2", "--gpus", "8")
    assert "has 4 ranks, which --gpus does not name" in run("--config", str(path), "--gpus", "2")


def test_sizes_as_people_write_them() -> None:
    assert [read_tokens(text, "--context") for text in ("131072", "128K", "1M", "1.5m")] == [
        131072,
        131072,
        1 << 20,
        3 << 19,
    ]
    assert read_gpus("8, 16,8") == (8, 16)
    assert [tokens_text(tokens) for tokens in (500, 4096, 131072, 1 << 20)] == ["500", "4K", "128K", "1M"]


def test_planning_imports_no_torch() -> None:
    script = (
        "import sys; from helix.cli import main\n"
        "try: main(['plan', '--model', 'llama-3.1-8b', '--gpus', '8'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip().endswith("False"), done.stderr
    assert "wins" in done.stdout


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, page = tmp_path / "plan.png", tmp_path / "plan.html"
    run(*ARGUMENTS, "--plot", str(picture), "--html", str(page), "--show-groups")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("data:image/png") == 3
    assert "DP attention" in text


# ---- layout: auto ----


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(card_names()),
    num_ranks=st.integers(1, 16),
    device=st.sampled_from(("cpu", "NVIDIA H200", "X")),
)
def test_auto_is_legal_and_repeatable(model: str, num_ranks: int, device: str) -> None:
    spec = load_card(model)
    config = make_config(model={"card": model, "load": "dummy"})
    layout, reason = choose_layout(config, spec, num_ranks, device, "bfloat16")
    assert layout.num_ranks == num_ranks
    assert layout_problem(spec, layout) is None
    assert reason
    assert choose_layout(config, spec, num_ranks, device, "bfloat16") == (layout, reason)


def test_auto_agrees_with_the_plan() -> None:
    config = make_config(
        model={"card": "llama-3.1-405b", "load": "dummy"}, engine={"max_batch": 1, "max_context": 131072}
    )
    layout, reason = choose_layout(config, load_card("llama-3.1-405b"), 64, "NVIDIA H200", "bfloat16")
    plan: Plan = make_plan(question("llama-3.1-405b", 64, context=131072))
    assert layout == plan.helix[0].candidate.placement.layout
    assert "h200-sxm" in reason
