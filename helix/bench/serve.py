"""`helix bench serve`: what clients see of a server: time to first token, TTL and throughput under load.

Any server with OpenAI's API is driven, one that runs already (``--url``) or one that is started for the occasion
(``--config``, ``--card``), with streamed completions of random token ids. Closed loop (`concurrency`): so many clients,
each of which sends its next request when it has its answer. Open loop (`rate`): requests come at random times, so many
a second on average (a Poisson process), however the server keeps up.

Times are the client's: from sending a request to the chunk with its first token, between chunks with tokens (ITL), and,
for each request, the mean from its first to its last token (TTL), which is right also where a server holds back the
text of a token.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from helix.config import RunConfig, config_to_dict, dump_yaml, make_config
from helix.errors import ConfigError, HelixError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_START_S = 1800.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One cell of the benchmark: `num_requests` requests, `concurrency` at a time, or `rate` of them a second.

    The first `shared_tokens` of each prompt's `prompt_tokens` are the same in all prompts.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


@dataclass(slots=True)
class Answer:
    """What the client saw of one request; times are seconds after it was sent."""

    token_times: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    num_reused: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results of one `Load`; milliseconds, and tokens and requests a second over its whole time."""

    load: Load
    seconds: float
    num_errors: int
    first_error: str | None
    ttft_ms: dict[str, float]
    ttl_ms: dict[str, float]
    itl_ms: dict[str, float]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    reused_tokens: int


def bench_serve(
    client: AsyncOpenAI, model: str | None, loads: Sequence[Load], *, vocab_size: int, seed: int
) -> list[Figures]:
    """Drive the server behind `client` with one load after another. `vocab_size`: prompt ids are below it.

    Raises: HelixError where the server answers nothing at all.
    """
    return asyncio.run(_drive(client, model, loads, vocab_size, seed))


async def _drive(
    client: AsyncOpenAI, model: str | None, loads: Sequence[Load], vocab_size: int, seed: int
) -> list[Figures]:
    from openai import OpenAIError

    try:
        name = model or (await client.models.list()).data[0].id
    except OpenAIError as error:
        raise HelixError(f"the server does not answer: {type(error).__name__}: {error}") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    found = []
    async with client:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            for number, load in enumerate(loads):
                prompts = make_prompts(load, vocab_size, seed + number)
                warm = await _ask(client, name, [1] * min(load.prompt_tokens, 16), 2)
                if warm.error is not None:
                    raise HelixError(f"the server does not answer: {warm.error}")
                task = bar.add_task(load.name, total=load.num_requests)
                started = time.perf_counter()
                answers = await _run(client, name, load, prompts, seed + number, lambda task=task: bar.advance(task))
                found.append(summarise(load, answers, time.perf_counter() - started))
    return found


def make_prompts(load: Load, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; the first `shared_tokens` are the same in all."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, vocab_size, load.shared_tokens)
    own = random.integers(0, vocab_size, (load.num_requests, load.prompt_tokens - load.shared_tokens))
    return [np.concatenate((shared, one)).tolist() for one in own]


async def _run(
    client: AsyncOpenAI, model: str, load: Load, prompts: list[list[int]], seed: int, done: Any
) -> list[Answer]:
    gate = asyncio.Semaphore(load.concurrency or load.num_requests)

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            answer = await _ask(client, model, prompt, load.output_tokens)
        done()
        return answer

    tasks = [asyncio.create_task(one(prompt)) async for prompt in _arrivals(load, prompts, seed)]
    return list(await asyncio.gather(*tasks))


async def _arrivals(load: Load, prompts: list[list[int]], seed: int) -> AsyncIterator[list[int]]:
    """The prompts, each when it is time for it."""
    random = np.random.default_rng([seed, 1])
    due = time.perf_counter()
    for prompt in prompts:
        if load.rate is not None:
            due += random.exponential(1.0 / load.rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        yield prompt


async def _ask(client: AsyncOpenAI, model: str, prompt: list[int], num_tokens: int) -> Answer:
    from openai import OpenAIError

    answer = Answer()
    sent = time.perf_counter()
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            # The last chunk may bring the reason for the end alone.
            if any(choice.text or choice.finish_reason is None for choice in chunk.choices):
                answer.token_times.append(time.perf_counter() - sent)
            if chunk.usage is not None:
                answer.num_prompt, answer.num_output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                answer.num_reused = (details.cached_tokens or 0) if details else 0
    except OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def summarise(load: Load, answers: Sequence[Answer], seconds: float) -> Figures:
    """The figures of one load from its answers; those that failed count as errors and in no time."""
    good = [one for one in answers if one.error is None and one.token_times]
    errors = [one.error or "no token came" for one in answers if one.error is not None or not one.token_times]
    ttl = [
        (one.token_times[-1] - one.token_times[0]) / (one.num_output - 1)
        for one in good
        if one.num_output > 1 and len(one.token_times) > 1
    ]
    output = sum(one.num_output for one in good)
    return Figures(
        load=load,
        seconds=seconds,
        num_errors=len(errors),
        first_error=errors[0] if errors else None,
        ttft_ms=_spread([one.token_times[0] for one in good]),
        ttl_ms=_spread(ttl),
        itl_ms=_spread([after - before for one in good for before, after in pairwise(one.token_times)]),
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + sum(one.num_prompt for one in good)) / seconds,
        reused_tokens=sum(one.num_reused for one in good),
    )


def _spread(times_s: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in milliseconds; empty where there is nothing."""
    if not times_s:
        return {}
    times_ms = np.asarray(times_s) * 1e3
    return {
        "mean": float(times_ms.mean()),
        "median": float(np.median(times_ms)),
        "p99": float(np.percentile(times_ms, 99)),
    }


def make_client(url: str, api_key: str | None) -> AsyncOpenAI:
    """A client that retries nothing and waits as long as the server does. Raises: ConfigError without `openai`."""
    try:
        from openai import AsyncOpenAI
    except ModuleNotFoundError as error:
        raise ConfigError("helix bench serve needs openai: pip install 'helix-parallel[bench]'") from error
    return AsyncOpenAI(base_url=url, api_key=api_key or "none", max_retries=0, timeout=None)


@contextmanager
def own_server(run: RunConfig) -> Iterator[str]:
    """A server of `run` on a free port of this machine, ready; gives its URL and ends it afterwards.

    Raises: HelixError where it ends before it is ready; its messages go to stderr as they come.
    """
    settings = config_to_dict(run)
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings["server"] |= {"host": "127.0.0.1", "port": free.getsockname()[1]}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "serve.yaml"
        file.write_text(dump_yaml(make_config(settings)))
        file.chmod(0o600)  # it may hold a key
        start = "from helix.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", "--config", str(file)], stdout=subprocess.DEVNULL
        )
        # Else SIGTERM would end this process at once, and the server would stay.
        before = signal.signal(signal.SIGTERM, _leave)
        root = f"http://127.0.0.1:{settings['server']['port']}"
        try:
            _wait_ready(process, f"{root}/health")
            yield f"{root}/v1"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise HelixError(f"the server ended with code {process.returncode} before it was ready")
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise HelixError(f"the server was not ready within {_START_S:g} s")


def machine() -> str:
    """What the client runs on, in words."""
    return f"{os.cpu_count()} CPU cores, {platform.system()} {platform.machine()}"


def print_report(found: Sequence[Figures], server: dict[str, Any], *, as_json: bool) -> None:
    """A table for people (not `as_json`), and one JSON object as the last line."""
    if not as_json:
        table = Table("load", "requests", "TTFT ms", "p99", "TTL ms", "p99", "ITL ms", "p99", "tokens/s", "errors")
        for one in found:
            cells = [one.ttft_ms, one.ttl_ms, one.itl_ms]
            times = [f"{cell[name]:.1f}" if cell else "-" for cell in cells for name in ("median", "p99")]
            rate, errors = f"{one.output_tokens_per_s:.1f}", str(one.num_errors)
            table.add_row(one.load.name, str(one.load.num_requests), *times, rate, errors)
        load = found[0].load
        Console(width=140).print(table)
        print(
            f"prompts of {load.prompt_tokens} tokens ({load.shared_tokens} of them shared), answers of "
            f"{load.output_tokens}; medians; tokens/s are output tokens of all requests"
        )
        for one in found:
            if one.first_error is not None:
                print(f"{one.load.name}: {one.num_errors} errors, the first: {one.first_error}")
    print(json.dumps({"client": machine(), **server, "loads": [asdict(one) for one in found]}))
