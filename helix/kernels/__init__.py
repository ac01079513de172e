"""What layers compute: one file per operation or family of them, each with a plain PyTorch twin.

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
from helix.kernels.choice import best_tokens as best_tokens_twin
from helix.kernels.draw import draw_tokens as draw_tokens_twin
from helix.kernels.embedding import embed as embed_twin
from helix.kernels.fp8 import Packed
from helix.kernels.fp8 import linear_fp8 as linear_fp8_twin
from helix.kernels.fp8_cache import Fp8Rows
from helix.kernels.fp8_cache import append_fp8 as append_fp8_twin
from helix.kernels.heads import store_heads as store_heads_twin
from helix.kernels.latent import absorb as absorb_twin
from helix.kernels.latent import store_latents as store_latents_twin
from helix.kernels.linear import gated_linear as gated_linear_twin
from helix.kernels.linear import head_linear as head_linear_twin
from helix.kernels.linear import linear as linear_twin
from helix.kernels.linear import linear_fp32 as linear_fp32_twin
from helix.kernels.merge import merge as merge_twin
from helix.kernels.norm import add_rms_norm as add_rms_norm_twin
from helix.kernels.norm import rms_norm as rms_norm_twin
from helix.kernels.rotary import apply_rotary as apply_rotary_twin
from helix.kernels.router import route as route_twin
from helix.kernels.swiglu import swiglu as swiglu_twin
from helix.model_spec import MoESpec

__all__ = [
    "TWINS",
    "absorb",
    "add_rms_norm",
    "append",
    "apply_rotary",
    "attend",
    "best_tokens",
    "draw_tokens",
    "embed",
    "gated_linear",
    "head_linear",
    "implementation",
    "linear",
    "linear_fp8",
    "linear_fp32",
    "merge",
    "rms_norm",
    "route",
    "store_heads",
    "store_latents",
    "swiglu",
]

TWINS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "absorb": absorb_twin,
        "add_rms_norm": add_rms_norm_twin,
        "append": append_twin,
        "append_fp8": append_fp8_twin,
        "attend": attend_twin,
        "draw_tokens": draw_tokens_twin,
        "linear_fp8": linear_fp8_twin,
        "apply_rotary": apply_rotary_twin,
        "best_tokens": best_tokens_twin,
        "embed": embed_twin,
        "gated_linear": gated_linear_twin,
        "head_linear": head_linear_twin,
        "linear": linear_twin,
        "linear_fp32": linear_fp32_twin,
        "merge": merge_twin,
        "rms_norm": rms_norm_twin,
        "route": route_twin,
        "store_heads": store_heads_twin,
        "store_latents": store_latents_twin,
        "swiglu": swiglu_twin,
    }
)
# Where other devices' implementations are. These modules need a compiler, so they are imported on first use only.
_MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cuda": MappingProxyType(
            {
                "absorb": "helix.kernels.triton_latent",
                "add_rms_norm": "helix.kernels.triton_norm",
                "append": "helix.kernels.triton_append",
                "append_fp8": "helix.kernels.triton_fp8_cache",
                "attend": "helix.kernels.triton_attention",
                "draw_tokens": "helix.kernels.triton_draw",
                "linear_fp8": "helix.kernels.triton_fp8_linear",
                "apply_rotary": "helix.kernels.triton_rotary",
                "best_tokens": "helix.kernels.triton_choice",
                "embed": "helix.kernels.triton_embedding",
                "gated_linear": "helix.kernels.triton_linear",
                "head_linear": "helix.kernels.triton_linear",
                "linear": "helix.kernels.triton_linear",
                "linear_fp32": "helix.kernels.triton_linear",
                "merge": "helix.kernels.triton_merge",
                "rms_norm": "helix.kernels.triton_norm",
                "route": "helix.kernels.triton_router",
                "store_heads": "helix.kernels.triton_heads",
                "store_latents": "helix.kernels.triton_latent",
                "swiglu": "helix.kernels.triton_swiglu",
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


def apply_rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, interleaved: bool, start: int = 0) -> Tensor:
    """See `helix.kernels.rotary.apply_rotary`."""
    function = implementation("apply_rotary", x_THD.device.type)
    result: Tensor = function(x_THD, cos_TR, sin_TR, interleaved=interleaved, start=start)
    return result


def store_heads(
    heads_THD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    rotary: tuple[Tensor, Tensor],
    k_PBKD: Tensor | Fp8Rows,
    v_PBKD: Tensor | Fp8Rows,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """See `helix.kernels.heads.store_heads`."""
    function = implementation("store_heads", heads_THD.device.type)
    if isinstance(k_PBKD, Fp8Rows) or isinstance(v_PBKD, Fp8Rows):
        # No kernel stores these with the rotation in one; the twin is made of the device's operations.
        function = store_heads_twin
    result: Tensor = function(heads_THD, num_heads, norms, rotary, k_PBKD, v_PBKD, slot_T, interleaved=interleaved)
    return result


def store_latents(
    latent_TW: Tensor,
    weight_L: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    pool_PB1W: Tensor | Fp8Rows,
    slot_T: Tensor,
    *,
    interleaved: bool,
) -> None:
    """See `helix.kernels.latent.store_latents`."""
    function = implementation("store_latents", latent_TW.device.type)
    if isinstance(pool_PB1W, Fp8Rows):
        # As in `store_heads`.
        function = store_latents_twin
    function(latent_TW, weight_L, eps, rotary, pool_PB1W, slot_T, interleaved=interleaved)


def absorb(query_TGQ: Tensor, w_uk_GNL: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """See `helix.kernels.latent.absorb`."""
    function = implementation("absorb", query_TGQ.device.type)
    result: Tensor = function(query_TGQ, w_uk_GNL, rotary, interleaved=interleaved)
    return result


def route(logits_TE: Tensor, bias_E: Tensor | None, moe: MoESpec) -> tuple[Tensor, Tensor]:
    """See `helix.kernels.router.route`."""
    result: tuple[Tensor, Tensor] = implementation("route", logits_TE.device.type)(logits_TE, bias_E, moe)
    return result


def swiglu(both_TW: Tensor) -> Tensor:
    """See `helix.kernels.swiglu.swiglu`."""
    result: Tensor = implementation("swiglu", both_TW.device.type)(both_TW)
    return result


def embed(token_ids_T: Tensor, weight_VC: Tensor, start: int, size: int) -> Tensor:
    """See `helix.kernels.embedding.embed`."""
    result: Tensor = implementation("embed", weight_VC.device.type)(token_ids_T, weight_VC, start, size)
    return result


def best_tokens(logits_RV: Tensor, not_finite: int) -> Tensor:
    """See `helix.kernels.choice.best_tokens`."""
    result: Tensor = implementation("best_tokens", logits_RV.device.type)(logits_RV, not_finite)
    return result


def linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """See `helix.kernels.linear.linear`."""
    result: Tensor = implementation("linear", x_TC.device.type)(x_TC, weight_NC, bias_N)
    return result


def linear_fp32(x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    """See `helix.kernels.linear.linear_fp32`."""
    result: Tensor = implementation("linear_fp32", x_TC.device.type)(x_TC, weight_NC)
    return result


def gated_linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """See `helix.kernels.linear.gated_linear`."""
    result: Tensor = implementation("gated_linear", x_TC.device.type)(x_TC, weight_NC, bias_N)
    return result


def head_linear(x_THC: Tensor, weight_HNC: Tensor) -> Tensor:
    """See `helix.kernels.linear.head_linear`."""
    result: Tensor = implementation("head_linear", x_THC.device.type)(x_THC, weight_HNC)
    return result
