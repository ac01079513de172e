"""Small kernels of a decode step against what the layers compute in plain PyTorch.

On a GPU they run as they are, in bf16 too; elsewhere through Triton's interpreter, in a process of its own, because the
interpreter must be chosen before the kernels are defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels import pointwise_cases

ON_GPU = torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", pointwise_cases.CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    pointwise_cases.CASES[name](torch.device("cuda"), dtype)


@pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU here")
def test_through_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.kernels.pointwise_cases"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == list(pointwise_cases.CASES)
