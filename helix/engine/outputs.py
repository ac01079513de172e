"""What the engine gives back: pieces of a stream and finished generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token in the model's own distribution, and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One step of a stream: the new token and the text that became certain with it (may be empty).

    The last piece carries `finish_reason`; its `token_id` is None where only held-back text was left.
    """

    text: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds: `first_token_s` from submission to the first token, `total_s` to the last one."""

    first_token_s: float
    total_s: float
    num_tokens: int

    @property
    def ttl_s(self) -> float:
        """Mean token-to-token latency after the first token; 0 where there was only one."""
        return (self.total_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One finished generation.

    `logprobs` has one entry a token where ``SamplingParams.logprobs`` asked for them. `prompt_logprobs` has one entry a
    prompt token, the first of them None. `error` says why where `finish_reason` is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    timing: Timing
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
