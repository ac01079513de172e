"""Ranks with a GPU each: every collective, the direct way, parity and graphs over all two-rank layouts, and faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helix.config import make_config
from helix.layout import Layout, layout_problem
from helix.verify import verify
from model_zoo import spec_from_config
from tests.e2e.test_faults import LIMIT_S, Script
from tests.parallel import comm_jobs, jobs
from tests.parallel.test_parity import NUM_TOKENS, border_prompts, check_against_transformers, settings
from tests.ranks import RankPool
from tests.tiny import FAMILIES, TinyModels, prompt

pytestmark = pytest.mark.multi_gpu
TRANSPORTS: tuple[comm_jobs.Transport, ...] = ("collective", "symmetric")
LAYOUTS = [Layout(kvp=2, tpf=2), Layout(kvp=2, tpf=1, ep=2), Layout(tpa=2, tpf=2), Layout(tpa=2, tpf=1, ep=2)]


def legal_cases() -> list[tuple[str, Layout]]:
    cases = []
    for family, config in FAMILIES.items():
        spec = spec_from_config(config().to_dict())
        for layout in LAYOUTS:
            if layout_problem(spec, layout) is None and (layout.ep == 1 or spec.moe is not None):
                cases.append((family, layout))
    return cases


def sizes(layout: Layout) -> dict[str, int]:
    return {"kvp": layout.kvp, "tpa": layout.tpa, "tpf": layout.tpf, "ep": layout.ep}


def on_gpus(path: str, layout: Layout, transport: str, **sections: Any) -> dict[str, Any]:
    engine = {"device": "cuda"} | sections.pop("engine", {})
    return settings(path, sizes(layout), comm={"transport": transport}, engine=engine, **sections)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_collective(gpu_ranks: RankPool, transport: comm_jobs.Transport) -> None:
    gpu_ranks.run(2, comm_jobs.check_collectives, [LAYOUTS[0], LAYOUTS[3]], transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_exchange(gpu_ranks: RankPool, transport: comm_jobs.Transport) -> None:
    assert gpu_ranks.run(2, comm_jobs.check_exchange, [LAYOUTS[0]], transport) == [30, 30]


def test_kernels_through_peers_memory(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(2, comm_jobs.check_peers, LAYOUTS[0])


def test_chunks_side_by_side(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(2, comm_jobs.check_chunks_side_by_side)


def test_twenty_thousand_exchanges(gpu_ranks: RankPool) -> None:
    gpu_ranks.run(2, comm_jobs.check_many_exchanges, 500)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("family", "layout"), legal_cases(), ids=str)
def test_layout_equals_transformers(
    gpu_ranks: RankPool, tiny: TinyModels, family: str, layout: Layout, transport: str
) -> None:
    """fp32. Decode steps run as graphs wherever they can be captured (not for experts in fp32)."""
    config = on_gpus(tiny.path(family), layout, transport)
    check_against_transformers(gpu_ranks, tiny, family, config, 2, border_prompts(layout.kvp))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_both_forms_of_the_merge(gpu_ranks: RankPool, tiny: TinyModels, merge: str, transport: str) -> None:
    config = on_gpus(tiny.path("llama"), LAYOUTS[0], transport)
    config["comm"]["merge"] = merge
    check_against_transformers(gpu_ranks, tiny, "llama", config, 2, border_prompts(2))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", LAYOUTS[0]), ("qwen3", LAYOUTS[2]), ("deepseek_v3", LAYOUTS[0]), ("deepseek_v2_moe", LAYOUTS[1])],
    ids=str,
)
def test_replayed_graphs_equal_eager_steps(
    gpu_ranks: RankPool, tiny: TinyModels, family: str, layout: Layout, transport: str
) -> None:
    """bf16, with batches and lengths that grow and shrink; the same tokens are fed to both."""
    runs = []
    for graphs in ("on", "off"):
        engine = {"graphs": graphs, "max_batch": 6, "max_context": 128}
        config = on_gpus(tiny.path(family), layout, transport, model={"dtype": "bfloat16"}, engine=engine)
        runs.append(gpu_ranks.run(2, jobs.drive, config, jobs.logits_of_random_steps, 60)[0])
    (mode, replayed), (_, eager) = runs
    assert mode == "graph"
    assert len(replayed) == len(eager) > 30
    for got, want in zip(replayed, eager, strict=True):
        assert np.abs(got - want).max() < 0.03 * np.abs(want).max()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_verify(tiny: TinyModels, transport: str) -> None:
    """What a person runs, in a process of his own, which starts the other rank."""
    report = verify(make_config(None, **on_gpus(tiny.path("deepseek_v3"), LAYOUTS[0], transport)))
    assert report.exact


@pytest.fixture
def script(request: pytest.FixtureRequest, tiny: TinyModels) -> Iterator[Script]:
    config = on_gpus(
        tiny.path("llama"),
        LAYOUTS[0],
        request.param,
        model={"dtype": "bfloat16"},
        engine={"graphs": "on", "max_context": 128, "stall_timeout_s": 12.0},
    )
    started = Script(config, "long")
    yield started
    started.destroy()


@pytest.mark.parametrize(
    ("number", "rank", "words"),
    [(signal.SIGKILL, 1, "SIGKILL"), (signal.SIGKILL, 0, ""), (signal.SIGSTOP, 1, "stopped answering")],
)
@pytest.mark.parametrize("script", TRANSPORTS, indirect=True)
def test_a_rank_that_ends_inside_of_a_replayed_graph(
    script: Script, number: signal.Signals, rank: int, words: str
) -> None:
    """The other one waits on its device, in a kernel that never ends: its process ends all the same."""
    script.wait_ready()
    time.sleep(5.0)
    os.kill(script.pids[rank], number)
    started = time.monotonic()
    code, err = script.finish()
    assert code != 0
    if rank != 0:
        assert f"rank {rank} " in err
    assert words in err
    script.assert_no_rank_left()
    assert time.monotonic() - started < LIMIT_S


def test_long_prompts_beside_short_steps(gpu_ranks: RankPool, tiny: TinyModels) -> None:
    """Messages that are too large for the direct way go through NCCL, in turn with small ones."""
    config = on_gpus(tiny.path("llama"), LAYOUTS[0], "symmetric", engine={"prefill_chunk": 300})
    prompts = [prompt(290, 1), prompt(3, 2), prompt(200, 3)]
    tokens = gpu_ranks.run(2, jobs.drive, config, jobs.tokens_alone, prompts, NUM_TOKENS)[0]
    assert tokens == [tiny.greedy("llama", one, NUM_TOKENS) for one in prompts]
