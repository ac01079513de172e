"""`Generation`: what rank 0 keeps about one request beside the scheduler's `Request`: text, logprobs, timing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from helix.engine.outputs import FinishReason, Output, Piece, Timing, TokenLogprob
from helix.engine.request import Request
from helix.engine.sampler import Sampled, SampleRow, token_logprobs
from helix.engine.sampling import SamplingParams
from helix.engine.text import TextStream


@dataclass(slots=True)
class Generation:
    """One request on rank 0, from submission to its `Output`."""

    request: Request
    params: SamplingParams
    row: SampleRow
    stream: TextStream
    submitted: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    keep_logits: bool = False
    logits: Tensor | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    sampled: Sampled | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add_token(self, token_id: int) -> None:
        """Take the token of a step; a stop string that it completes ends the generation here and now."""
        self.token_times.append(time.perf_counter())
        self.token_ids.append(token_id)
        if self.row.grammar is not None:
            self.row.grammar.accept(token_id)
        logprob = None
        if self.params.logprobs is not None and self.sampled is not None and self.sampled.logprob is not None:
            logprob = TokenLogprob(token_id, self.sampled.logprob, self.sampled.top_logprobs)
            self.logprobs.append(logprob)
        silent = token_id in self.request.stop_token_ids and len(self.token_ids) >= self.request.min_tokens
        text = "" if silent else self.stream.push(token_id)
        self.pieces.append(Piece(text=text, token_id=token_id, logprob=logprob))
        if self.stream.stopped is not None:
            self.finish("stop")

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Close the text and mark the end; the first reason stays."""
        if self.finished:
            return
        self.finish_reason, self.error = reason, error
        self.pieces.append(Piece(text=self.stream.finish(), finish_reason=reason))

    def take_pieces(self) -> list[Piece]:
        """The pieces that came since the last call, oldest first."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def add_logits(self, first: int, logits_RV: Tensor) -> None:
        """Logits of prompt positions ``first ...``; a position fed again after a preemption overwrites itself."""
        if self.keep_logits:
            if self.logits is None:
                self.logits = torch.empty(len(self.request.prompt_ids), logits_RV.shape[1])
            self.logits[first : first + logits_RV.shape[0]] = logits_RV
        if self.params.prompt_logprobs is None:
            return
        following = self.request.prompt_ids[first + 1 : first + 1 + logits_RV.shape[0]]
        if following:
            ids = torch.tensor(following, device=logits_RV.device)
            rows = token_logprobs(logits_RV[: len(following)], ids, self.params.prompt_logprobs)
            for offset, (token_id, (value, top)) in enumerate(zip(following, rows, strict=True)):
                self.prompt_logprobs[first + 1 + offset] = TokenLogprob(token_id, value, top)

    def all_logits(self) -> Tensor:
        """fp32 logits [len, V] of the whole prompt, on the CPU."""
        if self.logits is None:
            raise ValueError(f"request {self.request.request_id} kept no logits")
        return self.logits

    def output(self) -> Output:
        """The finished generation."""
        if self.finish_reason is None:
            raise ValueError(f"request {self.request.request_id} is not finished")
        times = self.token_times
        return Output(
            text=self.stream.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            prompt_token_ids=self.request.prompt_ids,
            timing=Timing(
                first_token_s=times[0] - self.submitted if times else 0.0,
                total_s=times[-1] - self.submitted if times else 0.0,
                num_tokens=len(times),
            ),
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs(),
            error=self.error,
        )

    def _prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self.prompt_logprobs[position] for position in range(1, len(self.request.prompt_ids)))]


def sample_batch(sampler: Any, logits_RV: Tensor, generations: list[Generation]) -> list[int]:
    """Sample one token a generation and remember what came with it; -1 marks a row that cannot be sampled."""
    results = sampler(logits_RV, [one.row for one in generations])
    for one, sampled in zip(generations, results, strict=True):
        one.sampled = sampled
    return [sampled.token_id for sampled in results]
