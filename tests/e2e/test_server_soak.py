"""The HTTP server under traffic that nobody would send by hand: every case of its schema, and mixed load for long.

`HELIX_FUZZ` (cases for each operation) and `HELIX_SOAK` (requests of each half) make both longer.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import schemathesis
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from tests.e2e.served import Served, Starter, tiny_config
from tests.tiny import TinyModels, prompt

NUM_CASES = int(os.environ.get("HELIX_FUZZ", "5"))
NUM_REQUESTS = int(os.environ.get("HELIX_SOAK", "40"))
MOST_GROWTH_BYTES = 8 << 20
LENGTHS = (1, 9, 40, 41, 90)
NUM_TOKENS = 30


# ---- every case of the schema ----


@pytest.fixture(scope="module")
def small_chat(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer and chat template with a random model of one narrow layer behind them."""
    directory = tmp_path_factory.mktemp("models") / "small"
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in (*smollm2.glob("*token*"), *smollm2.glob("vocab*"), *smollm2.glob("merges*"), *smollm2.glob("*.jinja")):
        shutil.copy(file, directory)
    return directory


@pytest.fixture(scope="module")
def api(start: Starter, small_chat: Path) -> Any:
    config = tiny_config(small_chat) | {"server": {"model_name": "small", "max_queue": 4}}
    config["engine"]["max_context"] = 96
    served = start(config).wait_ready()
    yield schemathesis.openapi.from_url(f"http://127.0.0.1:{served.port}/openapi.json")
    assert served.process.poll() is None
    served.wait_free()


def nearly_right(body: dict[str, Any], keep: set[str]) -> dict[str, Any]:
    """`body` with what would end every request early put right: the model's name, and what is asked of it."""
    right: dict[str, Any] = {"model": "small", "prompt": "Once", "messages": [{"role": "user", "content": "Hi"}]}
    kept = {name: value for name, value in body.items() if name in keep}
    return kept | {name: right[name] for name in body if name in right and name not in keep}


@pytest.mark.slow
def test_no_case_of_the_schema_makes_a_server_error(api: Any) -> None:
    """Bodies that fit the schema, parts of them beside what is right, and bodies that break it, for every operation."""
    checks = CHECKS.get_by_names(["not_a_server_error", "status_code_conformance", "content_type_conformance"])
    answers: Counter[str] = Counter()
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) == 8
    for operation in operations:
        for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:

            @settings(max_examples=NUM_CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
            def check(case: Any, data: st.DataObject) -> None:
                if isinstance(case.body, dict) and data.draw(st.booleans()):
                    case.body = nearly_right(case.body, data.draw(st.sets(st.sampled_from(sorted(case.body) or [""]))))
                response = case.call(timeout=60)
                answers[f"{case.method} {case.path} {response.status_code}"] += 1
                case.validate_response(response, checks=checks)

            check()
    print(f"{sum(answers.values())} cases: {dict(sorted(answers.items()))}")
    assert NUM_CASES < 50 or (answers["POST /v1/completions 200"] and answers["POST /v1/chat/completions 200"])


# ---- mixed load ----


@pytest.fixture(scope="module")
def pressed(start: Starter, tiny: TinyModels) -> Served:
    """Two ranks with hardly more page rows than the longest request needs, which compare schedules at every step."""
    config = tiny_config(tiny.path("llama"), kvp=2)
    config["cache"]["num_page_rows"] = 28
    return start(config).wait_ready()


def ask(length: int, **fields: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    return {"prompt": prompt(length)} | greedy | fields


def tokens_of(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in tokens]


def test_hits_and_preemptions_change_no_token(pressed: Served, tiny: TinyModels) -> None:
    """Each twice, one after another; then all at once in too small a pool, with several priorities."""
    right = {length: tiny.greedy("llama", prompt(length), NUM_TOKENS) for length in LENGTHS}
    for length in LENGTHS:
        for turn in range(2):
            answer = pressed.post("/v1/completions", ask(length))
            assert tokens_of(answer) == right[length]
            reused = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert reused == ((length - 1) // 8 * 8 if turn else 0), "every full row before the last token's"
    assert pressed.metric("preemptions_total") == 0
    before = pressed.metric("prefix_hit_tokens_total")
    assert before > 0
    with ThreadPoolExecutor(8) as pool:
        lengths = [length for length in LENGTHS for _ in range(4)]
        bodies = [ask(length, priority=at % 3) for at, length in enumerate(lengths)]
        jobs = [pool.submit(pressed.post, "/v1/completions", body) for body in bodies]
        for length, job in zip(lengths, jobs, strict=True):
            assert tokens_of(job.result()) == right[length]
    assert pressed.metric("prefix_hit_tokens_total") > before
    pressed.wait_free()


def test_a_soak_of_mixed_traffic_leaves_nothing_behind(pressed: Served, tiny: TinyModels) -> None:
    """A third of the requests are left at a random moment. Then every page is free, and the second half of the
    traffic has made no process larger than the first one did."""
    dice = random.Random(6)
    right = {length: tiny.greedy("llama", prompt(length), NUM_TOKENS) for length in LENGTHS}

    def one(length: int, leave_after_s: float | None, fields: dict[str, Any]) -> None:
        body = ask(length, **fields)
        if leave_after_s is not None:
            connection = pressed.send_raw("/v1/completions", body)
            time.sleep(leave_after_s)
            connection.close()
        elif body.get("stream"):
            answer = pressed.post("/v1/completions", body)
            assert (answer.status_code, answer.text.count('"token_logprobs"')) == (200, NUM_TOKENS)
        else:
            assert tokens_of(pressed.post("/v1/completions", body)) == right[length]

    def half(pool: ThreadPoolExecutor) -> int:
        jobs = []
        for _ in range(NUM_REQUESTS):
            fields = {"priority": dice.randint(-1, 1), "stream": dice.random() < 0.5}
            leave = dice.choice([None, None, dice.random() / 4])
            jobs.append(pool.submit(one, dice.choice(LENGTHS), leave, fields))
        for job in jobs:
            job.result()
        pressed.wait_free()
        process = psutil.Process(pressed.process.pid)
        return sum(rank.memory_info().rss for rank in (process, *process.children(recursive=True)))

    with ThreadPoolExecutor(8) as pool:
        sizes = [half(pool) for _ in range(2)]
    print(f"{2 * NUM_REQUESTS} requests, {pressed.metric('preemptions_total'):.0f} preemptions, RSS {sizes}")
    assert sizes[1] - sizes[0] < MOST_GROWTH_BYTES
    for name in ("preemptions_total", "sampled_exchange_seconds_total", 'requests_total{outcome="cancelled"}'):
        assert pressed.metric(name) > 0, name
    assert pressed.metric("sampled_exchange_seconds_total") < pressed.metric("sampled_step_seconds_total")
