"""Fixtures that the whole suite shares: one pool of ranks, one cache of tiny checkpoints, the real SmolLM2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from tests.tiny import TinyModels

# Said before anything imports deepspeed, which else guesses and prints a warning on stdout.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

SMOLLM2 = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if marker in item.keywords and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), {gpus} here"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close_workers()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Ranks with a GPU each: NCCL between them, and symmetric memory."""
    pool = RankPool("gpus")
    yield pool
    pool.close_workers()


@pytest.fixture(scope="session")
def crowded_ranks() -> Iterator[RankPool]:
    """Ranks that share one GPU: gloo between them."""
    pool = RankPool("one gpu")
    yield pool
    pool.close_workers()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct; `launch/test.sh` puts it there."""
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip("models/smollm2-135m-instruct is not there; launch/test.sh fetches it")
    return SMOLLM2
