"""The two forms of latent attention, counted: which costs less depends on a sequence's tokens in a step."""

from __future__ import annotations

from typing import Literal

from helix.model_spec import MLASpec


def attention_flops(mla: MLASpec, form: Literal["absorbed", "expanded"], num_tokens: int) -> int:
    """Floating-point operations for one head and one cached latent that `num_tokens` queries of a sequence see.

    Absorbed: a score over L + R and a sum over L for each query. Expanded: once the expansion to N + V, then a score
    over N + R and a sum over V for each query. Work that does not grow with the context is left out.
    """
    nope, rope, value, latent = mla.nope_dim, mla.rope_dim, mla.v_dim, mla.kv_lora_rank
    if form == "absorbed":
        return 2 * num_tokens * (2 * latent + rope)
    return 2 * latent * (nope + value) + 2 * num_tokens * (nope + rope + value)


def expand_from(mla: MLASpec) -> int | None:
    """The smallest number of a sequence's tokens in one step for which the expanded form costs less; None: never.

    171 for DeepSeek-V3. It does not depend on the context, so every rank finds the same without being told.
    """
    saved = (
        attention_flops(mla, "absorbed", 1) - attention_flops(mla, "expanded", 1) + attention_flops(mla, "expanded", 0)
    )
    return attention_flops(mla, "expanded", 0) // saved + 1 if saved > 0 else None
