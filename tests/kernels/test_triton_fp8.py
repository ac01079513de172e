"""FP8 kernels against their PyTorch twins: on a GPU in every dtype, elsewhere in fp32 through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import fp8_cache_cases, fp8_cases

ON_GPU = torch.cuda.is_available()
PARTS = {"fp8_cases": fp8_cases.CASES, "fp8_cache_cases": fp8_cache_cases.CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("part", "name"), [(part, name) for part, cases in PARTS.items() for name in cases])
def test_on_a_gpu(part: str, name: str, dtype: torch.dtype) -> None:
    PARTS[part][name](torch.device("cuda"), dtype)


@pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU here")
@pytest.mark.parametrize("part", PARTS)
def test_through_the_interpreter(part: str) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", f"tests.kernels.{part}"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(PARTS[part])
