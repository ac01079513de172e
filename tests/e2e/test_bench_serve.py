"""``helix bench serve``: against a server that it starts itself, and one that is not there."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from helix.bench.serve import Answer, Load, make_prompts, summarise
from helix.cli import main
from tests.e2e.served import LIMIT_S, tiny_config
from tests.tiny import TinyModels


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(("bench", "serve", *arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


SIZES = ("--prompt-tokens", "30", "--shared-tokens", "16", "--output-tokens", "6", "--vocab-size", "97")


@pytest.mark.slow
def test_a_server_of_its_own(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_config(tiny.path("llama"))))
    code, out, err = run(capsys, "--config", str(config), *SIZES, "--requests", "8", "--concurrency", "1,4")
    assert code == 0, err
    for part in ("1 at a time", "4 at a time", "TTFT", "prompts of 30 tokens (16 of them shared)"):
        assert part in out
    report = json.loads(out.splitlines()[-1])
    assert report["config"]["cache"]["page_tokens"] == 4
    assert report["config"]["server"] == {}
    for found in report["loads"]:
        assert (found["num_errors"], found["load"]["num_requests"]) == (0, 8)
        assert found["reused_tokens"] >= 4 * 16
        for name in ("ttft_ms", "ttl_ms", "itl_ms"):
            assert 0 < found[name]["median"] <= found[name]["p99"]
        assert found["output_tokens_per_s"] == pytest.approx(8 * 6 / found["seconds"])
        assert found["total_tokens_per_s"] == pytest.approx(8 * 36 / found["seconds"])


def test_a_benchmark_that_is_told_to_end_takes_its_server_along(tiny: TinyModels, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_config(tiny.path("llama"))))
    words = ("bench", "serve", "--config", str(config), *SIZES, "--requests", "100000")
    servers: list[psutil.Process] = []
    process = psutil.Popen([sys.executable, "-c", f"from helix.cli import main; main({words})"])
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (servers and servers[0].net_connections("tcp")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            servers = process.children()
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + 15
        assert not servers[0].is_running()
    finally:
        for one in (*servers, process):
            if one.is_running():
                one.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "http://127.0.0.1:1/v1", "--config", "x.yaml"), "leave out --config"),
        ((), "--config FILE and --card NAME"),
        (("--url", "http://127.0.0.1:1/v1", "--concurrency", "1,x"), "--concurrency=1,x"),
        (("--url", "http://127.0.0.1:1/v1", "--rate", "nan"), "above 0"),
        (("--url", "http://127.0.0.1:1/v1", "--prompt-tokens", "8", "--shared-tokens", "9"), "--shared-tokens=9"),
    ],
)
def test_options_that_do_not_fit(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, _out, err = run(capsys, *arguments)
    assert code != 0
    assert words in err


@pytest.mark.parametrize("more", [(), ("--model", "x")])
def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _out, err = run(capsys, "--url", f"http://127.0.0.1:{port}/v1", *more)
    assert code != 0
    assert "the server does not answer: APIConnectionError" in err
    assert "Traceback" not in err


def test_figures_of_answers_that_are_known() -> None:
    load = Load(num_requests=3, prompt_tokens=8, output_tokens=3, rate=2.0)
    good = Answer(token_times=[1.0, 1.5, 2.0], num_prompt=8, num_output=3, num_reused=4)
    held_back = Answer(token_times=[3.0, 4.0], num_prompt=8, num_output=3)
    found = summarise(load, [good, held_back, Answer(error="lost")], seconds=4.0)
    assert (found.num_errors, found.first_error, found.reused_tokens) == (1, "lost", 4)
    assert found.ttft_ms["median"] == 2000
    assert found.ttl_ms["mean"] == 500, "two gaps between three tokens, in one second each"
    assert found.itl_ms["p99"] == pytest.approx(1000, rel=0.02)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.5, 1.5, 5.5)
    nothing = summarise(load, [Answer(error="lost")], seconds=1.0)
    assert (nothing.ttft_ms, nothing.output_tokens_per_s) == ({}, 0)


def test_prompts_share_what_they_should() -> None:
    prompts = make_prompts(Load(num_requests=5, prompt_tokens=20, output_tokens=1, shared_tokens=12), 1000, seed=1)
    assert len({tuple(one[:12]) for one in prompts}) == 1
    assert len({tuple(one) for one in prompts}) == 5
    assert {len(one) for one in prompts} == {20}
