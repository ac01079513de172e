"""Operations on paged KV and partial attention results: one file per operation, each with a plain PyTorch twin.

The functions here take the implementation that belongs to the tensors' device; the twins' docstrings are the contract.

Shape letters: T tokens of the step, S sequences, H query heads, K KV heads, D head width, P pages of the pool,
B page_tokens, R page rows of one sequence, Z partials to merge (the KVP ranks), C width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import Tensor

from helix.kernels.append import append as append_twin
from helix.kernels.attention import attend as attend_twin
from helix.kernels.draw import draw_tokens as draw_tokens_twin
from helix.kernels.fp8 import Packed
from helix.kernels.fp8 import linear_fp8 as linear_fp8_twin
from helix.kernels.fp8_cache import Fp8Rows
from helix.kernels.fp8_cache import append_fp8 as append_fp8_twin
from helix.kernels.merge import merge as merge_twin
from helix.kernels.norm import add_rms_norm as add_rms_norm_twin
from helix.kernels.norm import rms_norm as rms_norm_twin

__all__ = [
    "TWINS",
    "add_rms_norm",
    "append",
    "attend",
    "draw_tokens",
    "implementation",
    "linear_fp8",
    "merge",
    "rms_norm",
]

TWINS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add_rms_norm": add_rms_norm_twin,
        "append": append_twin,
        "append_fp8": append_fp8_twin,
        "attend": attend_twin,
        "draw_tokens": draw_tokens_twin,
        "linear_fp8": linear_fp8_twin,
        "merge": merge_twin,
        "rms_norm": rms_norm_twin,
    }
)
# Where other devices' implementations are. These modules need a compiler, so they are imported on first use only.
_MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cuda": MappingProxyType(
            {
                "add_rms_norm": "helix.kernels.triton_norm",
                "append": "helix.kernels.triton_append",
                "append_fp8": "helix.kernels.triton_fp8_cache",
                "attend": "helix.kernels.triton_attention",
                "draw_tokens": "helix.kernels.triton_draw",
                "linear_fp8": "helix.kernels.triton_fp8_linear",
                "merge": "helix.kernels.triton_merge",
                "rms_norm": "helix.kernels.triton_norm",
            }
        )
    }
)


def implementation(operation: str, device_type: str) -> Callable[..., Any]:
    """The function that does `operation` on tensors of this type of device; the PyTorch twin if there is no other."""
    module = _MODULES.get(device_type, {}).get(operation)
    if module is None:
        return TWINS[operation]
    function: Callable[..., Any] = getattr(import_module(module), operation)
    return function


def append(pool_PB: Tensor | Fp8Rows, values_T: Tensor, slot_T: Tensor) -> None:
    """See `helix.kernels.append.append`, and `helix.kernels.fp8_cache.append_fp8` for a pool in FP8."""
    operation = "append_fp8" if isinstance(pool_PB, Fp8Rows) else "append"
    implementation(operation, pool_PB.device.type)(pool_PB, values_T, slot_T)


def attend(
    q_THD: Tensor,
    k_PBKD: Tensor | Fp8Rows,
    v_PBKV: Tensor | Fp8Rows,
    page_table_SR: Tensor,
    query_start_S1: Tensor,
    visible_len_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `helix.kernels.attention.attend`."""
    function = implementation("attend", q_THD.device.type)
    result: tuple[Tensor, Tensor] = function(q_THD, k_PBKD, v_PBKV, page_table_SR, query_start_S1, visible_len_T, scale)
    return result


def draw_tokens(
    logits_RV: Tensor, greedy_R: Tensor, temperature_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """See `helix.kernels.draw.draw_tokens`."""
    function = implementation("draw_tokens", logits_RV.device.type)
    result: Tensor = function(logits_RV, greedy_R, temperature_R, min_p_R, uniform_R)
    return result


def linear_fp8(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """See `helix.kernels.fp8.linear_fp8`."""
    result: Tensor = implementation("linear_fp8", x.device.type)(x, weight, bias)
    return result


def merge(out_ZTHD: Tensor, lse_ZTH: Tensor) -> tuple[Tensor, Tensor]:
    """See `helix.kernels.merge.merge`."""
    result: tuple[Tensor, Tensor] = implementation("merge", out_ZTHD.device.type)(out_ZTHD, lse_ZTH)
    return result


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """See `helix.kernels.norm.rms_norm`."""
    result: Tensor = implementation("rms_norm", x_TC.device.type)(x_TC, weight_C, eps)
    return result


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `helix.kernels.norm.add_rms_norm`."""
    result: tuple[Tensor, Tensor] = implementation("add_rms_norm", x_TC.device.type)(x_TC, residual_TC, weight_C, eps)
    return result
