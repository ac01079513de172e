"""The `deepspeed` launcher with a YAML file: text from real ranks, one message for a wrong config, no hang."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.planted_fault import ROOT, plant
from tests.tiny import TinyModels

LIMIT_S = 30.0


def launch(
    num_ranks: int, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``deepspeed launch/generate.py ARGUMENTS`` on `num_ranks` CPU ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile=/dev/null",
        f"--num_accelerators={num_ranks}",
        f"--master_port={port}",
        "launch/generate.py",
        *arguments,
    ]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (environment or {})
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=180, check=False
    )


def test_real_text_on_three_ranks(smollm2: Path) -> None:
    done = launch(3, "--config", "configs/smollm2.yaml", "--prompt", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    text = [line for line in done.stdout.splitlines() if "Paris" in line or line.startswith("layout ")]
    assert len(text) == 2, done.stdout
    assert "Paris" in text[0]
    for part in ("kvp=3", "tokens", "time to first token", "TTL", "tokens/s"):
        assert part in text[1]


def test_a_wrong_config_is_one_message_and_no_traceback(tiny: TinyModels) -> None:
    done = launch(
        2, "--config", "configs/smollm2.yaml", "--set", f"model.path={tiny.path('llama')}", "--set", "cahce.x=1"
    )
    assert done.returncode != 0
    assert done.stderr.count("cahce") == 1, done.stderr
    assert "cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_number_of_ranks_than_the_layout(tiny: TinyModels) -> None:
    done = launch(2, "--config", "configs/smollm2.yaml", "--set", f"model.path={tiny.path('smollm')}")
    assert done.returncode != 0
    assert "2 were started" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fault", ["step:kill", "step:exit0"])
def test_a_rank_that_ends_is_named(tiny: TinyModels, tmp_path: Path, fault: str) -> None:
    done = launch(
        3,
        *("--config", "configs/smollm2.yaml", "--set", f"model.path={tiny.path('llama')}"),
        *("--prompt-ids", "1,2,3", "--max-tokens", "100"),
        environment=plant(tmp_path, 1, fault),
    )
    assert done.returncode != 0
    assert "rank 1 " in done.stderr
    assert time.time() - float((tmp_path / "when").read_text()) < LIMIT_S
