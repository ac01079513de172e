"""The GPU's merge: against the contract, from peers' memory by address, and behind the message that carries partials.

On a GPU it runs as it is; elsewhere through Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helix.layers import exchange
from tests.kernels import test_merge as contract
from tests.kernels.cases import TOLERANCES, assert_close, assert_same_bits, bits, dense_merge, random_partials

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    from helix.kernels.triton_merge import PeerLayout, merge, merge_peers, pack

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
GPU = torch.device("cuda")


def merged_on(device: torch.device) -> contract.Merge:
    """`merge` on this device for tensors of the CPU; views stay views."""

    def function(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = merge(out_ZTHD.to(device), lse_ZTH.to(device))
        return out.cpu(), lse.cpu()

    return function


def check_contract(device: torch.device, dtype: torch.dtype, parts: tuple[int, ...]) -> None:
    function = merged_on(device)
    for number in parts:
        contract.test_equals_dense_merge(function, number, 3, 5, 80, dtype)
        contract.test_all_parts_empty(function, number, float("nan"), float("inf"), dtype)
    contract.test_nan_output_with_finite_lse_stays_nan(function, -500.0, dtype)


def check_more_of_the_contract(device: torch.device, dtype: torch.dtype) -> None:
    """What takes many rows."""
    function = merged_on(device)
    contract.test_empty_parts_are_not_read(function, 3, dtype)
    contract.test_one_part_is_given_back_unchanged(function, dtype)
    for shift in (-3000.0, 3000.0):
        contract.test_size_of_the_lse_does_not_matter(function, shift)


def check_sizes(device: torch.device) -> None:
    """Parts far apart, views of a message, and more parts and columns than are read at once."""
    function = merged_on(device)
    contract.test_part_far_below_the_others_adds_nothing(function)
    contract.test_partials_may_be_views_of_a_message(function)
    contract.check(function, *random_partials(19, 2, 1, 600, seed=8))


def check_message(device: torch.device, dtype: torch.dtype) -> None:
    """`pack` writes what the exchange packs, heads padded; and the parts are merged from where they lie in it."""
    for parts, part_heads, heads in ((3, 2, 5), (2, 4, 8), (6, 1, 3), (1, 3, 3)):
        out, lse = (x[0] for x in random_partials(1, 4, heads, 16, dtype, seed=parts))
        message = pack(out.to(device), lse.to(device), parts, part_heads)
        padding = parts * part_heads - heads
        padded = torch.nn.functional.pad(out, (0, 0, 0, padding))
        padded_lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf)
        cut = padded.view(4, parts, part_heads, 16).movedim(1, 0), padded_lse.view(4, parts, part_heads).movedim(1, 0)
        assert_same_bits(message.cpu(), exchange.pack(*cut))
        want = merge(*(x.to(device) for x in exchange.unpack(exchange.pack(*cut), 16)))[0]
        assert_same_bits(merge_peers(addresses(message), message_layout(message, 16)).cpu(), want.cpu())


def addresses(parts: Tensor) -> Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=parts.device)


def message_layout(message: Tensor, width: int) -> PeerLayout:
    _, tokens, heads, row = message.shape
    floats = 4 // message.element_size()
    return PeerLayout(
        num_tokens=tokens,
        num_heads=heads,
        width=width,
        dtype=message.dtype,
        token_stride=heads * row,
        head_stride=row,
        lse_offset=width // floats,
        lse_token_stride=heads * row // floats,
        lse_head_stride=row // floats,
    )


def check_peers(device: torch.device, dtype: torch.dtype) -> None:
    """Heads 2 and 3 of outputs and lse that lie in separate memory, merged into a part of a larger result."""
    for parts in (1, 3, 8):
        out, lse = random_partials(parts, 5, 6, 80, dtype, seed=parts)
        # A peer's buffer: its outputs, then its lse, as 4-byte words.
        words = torch.cat((out.flatten(1).view(torch.float32), lse.flatten(1)), 1).to(device)
        layout = PeerLayout(
            num_tokens=5,
            num_heads=2,
            width=80,
            dtype=dtype,
            token_stride=6 * 80,
            head_stride=80,
            lse_offset=out[0].numel() * out.element_size() // 4 + 2 - 2 * 80 * out.element_size() // 4,
            lse_token_stride=6,
            lse_head_stride=1,
        )
        result = torch.full((5, 4, 80), 7.0, dtype=dtype, device=device)
        before = bits(words.cpu())
        merge_peers(addresses(words) + 2 * 80 * out.element_size(), layout, result[:, 1:3])
        want, _ = dense_merge(out[:, :, 2:4], lse[:, :, 2:4])
        assert_close(result[:, 1:3].cpu(), want, TOLERANCES[dtype])
        assert (result[:, ::3] == 7.0).all()
        assert torch.equal(bits(words.cpu()), before)


def interpret() -> None:
    for dtype, parts in ((torch.float32, 6), (torch.float16, 3)):
        check_contract(CPU, dtype, (parts,))
        check_message(CPU, dtype)
        check_peers(CPU, dtype)
    check_sizes(CPU)
    contract.test_empty_parts_are_not_read(merged_on(CPU), 3, torch.float16)


@pytest.mark.skipif(ON_GPU, reason="the kernels run on the GPU here")
def test_through_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.test_triton_merge"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["done"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check_contract(GPU, dtype, contract.PARTS)
    check_message(GPU, dtype)
    check_peers(GPU, dtype)
    check_more_of_the_contract(GPU, dtype)
    check_sizes(GPU)


if __name__ == "__main__":
    interpret()
    print("done")
