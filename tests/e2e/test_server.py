"""The HTTP server as its users meet it: through the `openai` client, through raw sockets, and when things break.

Two servers: SmolLM2 with its real weights on `HELIX_RANKS` ranks (1 unless it is set; slow with more), and a tiny model
with a poisoned token on three. All of it stays on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from safetensors.torch import load_file, save_file
from starlette.exceptions import HTTPException

from helix import Engine, SamplingParams
from helix.config import make_config
from helix.errors import ConfigError
from helix.server.desk import Desk
from helix.server.errors import ApiError
from helix.server.gate import Gate
from helix.server.metrics import Metrics
from helix.server.run import serve
from tests.e2e.served import LIMIT_S, Served, Starter, tiny_config
from tests.tiny import TinyModels, prompt

NUM_RANKS = int(os.environ.get("HELIX_RANKS", "1"))
KEY = "correct horse"
POISON = 5
"""Token whose embedding is NaN in the tiny model."""
REUSED = {"prompt_tokens_details"}
"""Part of a usage that depends on who asked before."""
OUTCOMES = ("length", "cancelled", "timeout")
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm(start: Starter, smollm2: Path) -> Served:
    return start(
        {
            "model": {"path": str(smollm2), "dtype": "float32"},
            "layout": {"kvp": NUM_RANKS},
            "cache": {"page_tokens": 16, "num_page_rows": 96},
            "engine": {"device": "cpu", "max_context": 512, "max_batch": 16, "prefill_chunk": 64},
            "server": {"api_key": KEY, "max_queue": 4, "max_body_bytes": 200_000, "model_name": "smol"},
        }
    ).wait_ready()


@pytest.fixture(scope="module")
def poisoned(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that answers NaN where a prompt holds `POISON`."""
    directory = tmp_path_factory.mktemp("models") / "poisoned"
    shutil.copytree(tiny.path("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def ranks(start: Starter, poisoned: Path) -> Served:
    return start(tiny_config(poisoned, kvp=3))


def safe_prompt(length: int) -> list[int]:
    return [POISON + 1 if token == POISON else token for token in prompt(length)]


def tokens_of(answer: httpx2.Response) -> list[str]:
    """Tokens of the one choice, which the tiny model has no text for."""
    assert answer.status_code == 200, answer.text
    tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


# ---- the API ----


def test_chat_and_models(smollm: Served) -> None:
    assert [one.id for one in smollm.openai.models.list()] == ["smol"]
    assert smollm.openai.models.retrieve("smol").owned_by == "helix"
    answer = smollm.openai.chat.completions.create(model="smol", messages=QUESTION, temperature=0)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    same = smollm.openai.chat.completions.create(model="smol", messages=parts, temperature=0, max_completion_tokens=99)
    assert same.choices[0].message.content == answer.choices[0].message.content


CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0, "stop": ["Paris"]},
    {"temperature": 1.5, "seed": 11, "n": 3, "logprobs": True, "top_logprobs": 2},
]


@pytest.mark.parametrize("case", CASES)
def test_chat_stream_adds_up_to_the_whole(smollm: Served, case: dict[str, Any]) -> None:
    create: Any = smollm.openai.chat.completions.create
    whole = create(model="smol", messages=QUESTION, max_tokens=12, **case)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    count = case.get("n", 1)
    texts, reasons, logprobs = [""] * count, [""] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
    usage = None
    options = {"include_usage": True}
    stream = create(model="smol", messages=QUESTION, max_tokens=12, stream=True, stream_options=options, **case)
    for chunk in stream:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.model_dump(exclude=REUSED) == whole.usage.model_dump(exclude=REUSED)
    if "logprobs" in case:
        assert logprobs == [choice.logprobs.content for choice in whole.choices]
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs[0])
        assert len(set(texts)) == 3


@pytest.mark.parametrize("text", ["Write an emoji: 🙂🙂", "def f(x):\n\treturn", "1 2 3 4"])
def test_completion_stream_adds_up_to_the_whole(smollm: Served, text: str) -> None:
    create: Any = smollm.openai.completions.create
    settings_: dict[str, Any] = {"model": "smol", "prompt": text, "max_tokens": 16, "temperature": 1.3, "seed": 5}
    whole = create(**settings_, logprobs=1)
    Completion.model_validate(whole.model_dump(), strict=True)
    found = whole.choices[0].logprobs
    assert found is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 16
    assert "".join(chunk.choices[0].text for chunk in create(**settings_, stream=True)) == whole.choices[0].text


def test_alone_equals_in_a_batch_of_sixteen(smollm: Served) -> None:
    prompts = [f"Number {index} is" for index in range(16)]
    create: Any = smollm.openai.completions.create
    for case in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 9}):
        batch = create(model="smol", prompt=prompts, max_tokens=6, **case)
        assert [choice.index for choice in batch.choices] == list(range(16))
        for index in (0, 7, 15):
            alone = create(model="smol", prompt=prompts[index], max_tokens=6, **case)
            assert alone.choices[0].text == batch.choices[index].text


def test_choices_have_seeds_of_their_own(smollm: Served) -> None:
    create: Any = smollm.openai.completions.create
    three = create(model="smol", prompt="Once", max_tokens=8, seed=21, n=3, best_of=3)
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert create(model="smol", prompt="Once", max_tokens=8, seed=21).choices[0].text == texts[0]


def test_echo_scores_the_prompt(smollm: Served) -> None:
    text = "The capital of France is"
    create: Any = smollm.openai.completions.create
    answer = create(model="smol", prompt=text, max_tokens=2, temperature=0, echo=True, logprobs=0)
    choice = answer.choices[0]
    assert choice.text.startswith(text + " Paris")
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs[0] is None
    assert [choice.text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens, strict=True)]
    assert answer.usage is not None
    assert len(found.tokens) == answer.usage.total_tokens
    plain = create(model="smol", prompt=text, max_tokens=2, temperature=0).choices[0].text
    assert choice.text == text + plain
    stream = create(model="smol", prompt=text, max_tokens=2, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text


def test_where_a_generation_ends(smollm: Served) -> None:
    ask = {"model": "smol", "messages": QUESTION, "temperature": 0}

    def answer(**changes: Any) -> Any:
        return smollm.post("/v1/chat/completions", ask | changes).json()

    plain = answer()
    assert plain["choices"][0]["finish_reason"] == "stop"
    longer = answer(max_tokens=20, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == 20
    assert longer["choices"][0]["finish_reason"] == "length"
    assert answer(max_tokens=20, min_tokens=12)["usage"]["completion_tokens"] >= 12
    token = smollm.post("/tokenize", {"prompt": " Rome"}).json()["tokens"][0]
    assert answer(max_tokens=2, logit_bias={str(token): 100})["choices"][0]["message"]["content"] == " Rome Rome"
    cut = answer(stop="Paris", include_stop_str_in_output=True)["choices"][0]
    assert cut["message"]["content"].endswith("is Paris")
    assert answer(tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=1)["choices"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_that_follows_a_schema(smollm: Served, temperature: float) -> None:
    """Also beside a request without a schema, and the same in a stream."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    ask: dict[str, Any] = {
        "model": "smol",
        "messages": QUESTION,
        "temperature": temperature,
        "seed": 2,
        "max_tokens": 60,
    }
    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(smollm.post, "/v1/chat/completions", ask)
        choice = smollm.openai.chat.completions.create(**ask, response_format=form).choices[0]
        assert plain.result().status_code == 200
    assert choice.finish_reason == "stop"
    found = json.loads(choice.message.content or "")
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 8
    assert 1 <= found["age"] <= 99
    stream: Any = smollm.openai.chat.completions.create(**ask, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content


def test_tokens_there_and_back(smollm: Served) -> None:
    text = "Grüße, 世界 🙂"
    found = smollm.post("/tokenize", {"prompt": text}).json()
    assert found["count"] == len(found["tokens"])
    assert smollm.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = smollm.post("/tokenize", {"messages": QUESTION}).json()
    answer = smollm.openai.chat.completions.create(model="smol", messages=QUESTION, max_tokens=1)
    assert answer.usage is not None
    assert chat["count"] == answer.usage.prompt_tokens


# ---- what is refused ----

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"tool": []}, "tool"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "json_schema"),
    ("chat", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ("chat", {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"temperature": "hot"}, "temperature"),
    ("chat", {"n": True}, "n"),
    ("plain", {"best_of": 2}, "best_of"),
    ("plain", {"suffix": "end"}, "suffix"),
    ("plain", {"max_tokens": 0}, "max_tokens"),
    ("plain", {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("plain", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("plain", {"logit_bias": {"99999999": 1}}, "logit_bias"),
    ("plain", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("plain", {"stream": True, "stream_options": {"includ_usage": True}}, "stream_options"),
    ("plain", {"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ("plain", {"prompt": [1, 10**30]}, "prompt"),
    ("plain", {"prompt": ["a", [1]]}, "prompt"),
    ("plain", {"prompt": [[{"role": "user"}]]}, "prompt"),
    ("plain", {"prompt": []}, "prompt"),
    ("plain", {"prompt": [1] * 600}, "600"),
    ("plain", {"prompt": ["a"] * 21}, "n"),
]


def send(served: Served, kind: str, body: dict[str, Any]) -> httpx2.Response:
    if kind == "chat":
        return served.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2} | body)
    return served.post("/v1/completions", {"prompt": "x", "max_tokens": 2} | body)


@pytest.mark.parametrize(("kind", "body", "words"), REFUSED)
def test_refused_by_name(smollm: Served, kind: str, body: dict[str, Any], words: str) -> None:
    answer = send(smollm, kind, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"] or words in str(error["param"])


def test_errors_reach_the_client_as_its_own(smollm: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        smollm.openai.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        smollm.openai.completions.create(model="smol", prompt="x", temperature=-1)
    for headers in ({"Authorization": ""}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            refused = smollm.http.get(path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert smollm.http.get("/health").json() == {"status": "ready"}
    elsewhere = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for method in ("GET", "OPTIONS"):
        answer = smollm.http.request(method, "/v1/models", headers=smollm.headers | elsewhere)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


HOSTILE = [
    b"",
    b"\xff\xfe{",
    b'{"prompt": "\xc3("}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": [1' + b"0" * 400 + b"]}",
    b'{"prompt": "\\ud800", "max_tokens": 1}',
    b'{"prompt": "x", "model": "\\udfff"}',
    b'{"prompt": "x", "stop": "\\ud800"}',
    b'{"prompt": "x", "\\ud800": 1}',
    b'{"prompt": "x", "prompt": {"a": 1}}',
    b'{"prompt": null}',
    b'"prompt"',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bodies(smollm: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = smollm.post(path, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert answer.json()["error"]["message"]
        assert not re.search(r"Traceback|\.py|site-packages|/[a-z]+/[a-z]+/[a-z]+", answer.text.replace(path, ""))


def test_bodies_that_are_too_large(smollm: Served) -> None:
    big = {"prompt": "x" * 300_000}
    assert smollm.post("/v1/completions", big).status_code == 413

    def in_pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 10_000

    answer = smollm.post("/v1/completions", content=in_pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert smollm.post("/v1/completions", content=b'{"prompt": "x"}').status_code == 400
    assert smollm.http.get("/v1/completions", headers=smollm.headers).status_code == 405
    assert smollm.http.get("/nowhere", headers=smollm.headers).status_code == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = (
    *("prompt", "messages", "model", "n", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "min_tokens", "echo", "best_of", "tools", "priority"),
    *("repetition_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids", "user", "tool_choice", "tokens"),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_no_body_makes_a_server_error(smollm: Served, path: str, fields: dict[str, Any]) -> None:
    base: dict[str, Any] = {}
    if path.startswith("/v1"):
        base = {"max_tokens": 1} | ({"messages": QUESTION} if "chat" in path else {"prompt": "x"})
    body = json.dumps(base | fields).encode()
    answer = smollm.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)


# ---- load ----


def test_a_full_queue_says_when_to_come_back(smollm: Served) -> None:
    ask = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 20, "stream": True}
    holding = smollm.send_raw("/v1/completions", ask)
    holding.recv(100)
    refused = smollm.post("/v1/completions", {"prompt": "x"})
    holding.close()
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.json()["error"]["code"] == "queue_full"
    smollm.wait_free()
    assert smollm.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.5])
def test_a_client_that_leaves_frees_its_pages(smollm: Served, stream: bool, delay_s: float) -> None:
    before = smollm.metric('requests_total{outcome="cancelled"}')
    ask = {"prompt": "word " * 400, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    connection = smollm.send_raw("/v1/completions", ask)
    time.sleep(delay_s)
    connection.close()
    deadline = time.monotonic() + LIMIT_S
    while smollm.metric('requests_total{outcome="cancelled"}') == before and delay_s:
        assert time.monotonic() < deadline, "nobody noticed"
        time.sleep(0.02)
    smollm.wait_free()


def test_metrics_tell_what_happened(smollm: Served) -> None:
    counts = ("time_to_first_token_seconds_count", "token_to_token_seconds_count", "output_tokens_total")
    before = [smollm.metric(name) for name in counts]
    smollm.post("/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True})
    after = [smollm.metric(name) for name in counts]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 4, 5]
    assert smollm.metric("page_rows") == 96
    assert smollm.metric('requests_total{outcome="stop"}') > 0


# ---- three ranks ----


def test_ranks_answer_as_one_model(ranks: Served, tiny: TinyModels) -> None:
    ranks.wait_ready()
    ids = safe_prompt(20)
    answer: Any = ranks.openai.completions.create(model="poisoned", prompt=ids, max_tokens=8, temperature=0, logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert [int(token.removeprefix("token_id:")) for token in found.tokens] == tiny.greedy("llama", ids, 8)


def test_a_generation_that_fails_fails_alone(ranks: Served) -> None:
    ranks.wait_ready()
    ask = {"max_tokens": 40, "temperature": 0, "logprobs": 0}
    alone = tokens_of(ranks.post("/v1/completions", {"prompt": safe_prompt(9)} | ask))
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(ranks.post, "/v1/completions", {"prompt": safe_prompt(9)} | ask)
        bad = ranks.post("/v1/completions", {"prompt": [1, POISON, 3]} | ask)
        assert tokens_of(good.result()) == alone
    assert bad.status_code == 500
    assert "not finite" in bad.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="not finite"):
        list(ranks.openai.completions.create(model="poisoned", prompt=[POISON], stream=True))
    ranks.wait_free()


def test_mixed_traffic_leaves_nothing_behind(ranks: Served) -> None:
    """Requests of all lengths, a third of them left at a random moment; the ranks compare schedules at every step."""
    ranks.wait_ready()
    dice = random.Random(4)
    ask = {"temperature": 0, "logprobs": 0, "ignore_eos": True}
    lengths = (3, 11, 40, 90)
    asks = {length: {"prompt": safe_prompt(length), "max_tokens": 20} | ask for length in lengths}
    alone = {length: tokens_of(ranks.post("/v1/completions", asks[length])) for length in lengths}

    def one(length: int, leave_after_s: float | None, priority: int) -> None:
        body = asks[length] | {"priority": priority}
        if leave_after_s is not None:
            connection = ranks.send_raw("/v1/completions", body | {"stream": True})
            time.sleep(leave_after_s)
            connection.close()
            return
        assert tokens_of(ranks.post("/v1/completions", body)) == alone[length]

    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(one, dice.choice(lengths), dice.choice([None, None, dice.random() / 3]), dice.randint(-1, 1))
            for _ in range(24)
        ]
        for job in jobs:
            job.result()
    ranks.wait_free()


def test_a_dead_rank_ends_the_server(ranks: Served) -> None:
    """The last test of this server."""
    ranks.wait_ready()
    victim = psutil.Process(ranks.process.pid).children()[1]
    answers: list[Any] = []

    def ask() -> None:
        try:
            body = {"prompt": [1], "max_tokens": 400, "ignore_eos": True}
            answers.append(ranks.post("/v1/completions", body).status_code)
        except httpx2.HTTPError as error:
            answers.append(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.3)
    victim.kill()
    client.join(LIMIT_S)
    assert len(answers) == 1
    assert answers[0] != 200
    assert ranks.process.wait(LIMIT_S) not in (0, None)
    assert re.search(r"rank 2 .*SIGKILL", ranks.log()), ranks.log()


def test_a_stuck_rank_ends_the_server(start: Starter, tiny: TinyModels) -> None:
    """A stream is under way: it ends without its last line, /health is never 200 again, and the log says why."""
    served = start(tiny_config(tiny.path("llama"), kvp=2)).wait_ready()
    body = {"prompt": prompt(9), "max_tokens": 200, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    with served.http.stream("POST", "/v1/completions", json=body) as streamed:
        arriving = streamed.iter_lines()
        lines.append(next(arriving))
        psutil.Process(served.process.pid).children()[0].suspend()
        try:
            lines.extend(arriving)
        except httpx2.TransportError:
            lines.append("closed")
    assert '"error"' in "".join(lines) or lines[-1] == "closed"
    assert "data: [DONE]" not in lines
    deadline = time.monotonic() + LIMIT_S
    while served.process.poll() is None:
        assert time.monotonic() < deadline, served.log()
        try:
            assert served.http.get("/health").json() == {"status": "failed"}
        except httpx2.TransportError:
            time.sleep(0.02)
    assert served.process.returncode != 0
    assert re.search(r"rank 1 .*stopped answering", served.log()), served.log()


# ---- the end ----


@pytest.mark.slow
def test_real_text_from_launched_ranks_which_finish_after_sigterm(start: Starter, smollm2: Path) -> None:
    """The launcher hands SIGTERM to every rank: none may leave before rank 0 has answered what it admitted."""
    config = tiny_config(smollm2, kvp=3) | {"server": {"model_name": "smol"}}
    served = start(config, num_launched=3).wait_ready()
    answer = served.openai.chat.completions.create(model="smol", messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "logprobs": 0, "temperature": 0}
    before = served.post("/v1/completions", body).json()["choices"][0]["text"]
    children = psutil.Process(served.process.pid).children(recursive=True)
    launched = [process for process in children if "--local_rank" in " ".join(process.cmdline())]
    assert len(launched) == 3
    with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
        lines = streamed.iter_lines()
        first = next(lines)
        for process in launched:
            process.terminate()
        deadline = time.monotonic() + LIMIT_S
        while served.http.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        refused = served.post("/v1/completions", body)
        rest = list(lines)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert rest[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:]) for line in (first, *rest) if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == before
    assert served.process.wait(LIMIT_S) == 0, served.log()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = make_config(model="deepseek-r1", server={"port": port})
        with pytest.raises(ConfigError, match=f"server.port={port} cannot be listened on"):
            serve(config, lambda _: pytest.fail("loaded a model for a port that is taken"))


def test_the_desk_keeps_nothing_of_what_is_done(tiny: TinyModels) -> None:
    """Finished, ended by a stop token, left by the client, too late: afterwards neither desk nor engine knows them."""
    config = tiny_config(tiny.path("llama"))
    metrics = Metrics()
    desk = Desk(max_batch=2, max_queue=8, timeout_s=60, metrics=metrics)
    errors: list[int] = []
    with Engine(**config) as engine:

        def prepare(**params: Any) -> Any:
            return engine.prepare([1, 2, 3], SamplingParams(temperature=0.0, **params))

        async def use(max_tokens: int, num_pieces: int | None, late: bool = False) -> int:
            desk.admit(1)
            call = desk.submit([prepare(max_tokens=max_tokens)], time.perf_counter() - 120 * late)
            taken = 0
            try:
                async for _ in call.pieces():
                    taken += 1
                    if taken == num_pieces:
                        break
            except ApiError as error:
                errors.append(error.status)
            finally:
                call.close()
            return taken

        async def everyone() -> list[int]:
            while desk.state != "ready":
                await asyncio.sleep(0.01)
            jobs = (use(5, None), use(200, 3), use(200, 1), use(9, None), use(50, None, late=True))
            return list(await asyncio.gather(*jobs))

        def client() -> list[int]:
            try:
                return asyncio.run(everyone())
            finally:
                desk.drain()

        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(client)
            desk.run(engine)
            assert taken.result() == [6, 3, 1, 10, 0]
        assert errors == [504]
        assert (engine._generations, desk._open, engine.num_free_rows) == ({}, {}, engine.num_page_rows)
    ended = {one: metrics.registry.get_sample_value("helix_requests_total", {"outcome": one}) for one in OUTCOMES}
    assert ended == {"length": 2, "cancelled": 2, "timeout": 1}


def test_nothing_is_admitted_before_the_model_is_there() -> None:
    desk = Desk(max_batch=1, max_queue=1, timeout_s=1, metrics=Metrics())
    with pytest.raises(ApiError, match="loaded") as refused:
        desk.admit(1)
    assert refused.value.status == 503


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def silent() -> Any:
        await asyncio.sleep(60)

    async def read(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    gate = Gate(read, api_key=None, max_body_bytes=10, body_timeout_s=0.02)
    with pytest.raises(HTTPException) as refused:
        asyncio.run(gate({"type": "http", "path": "/v1/completions", "headers": []}, silent, silent))
    assert refused.value.status_code == 408
