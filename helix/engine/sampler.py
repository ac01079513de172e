"""What a request asks of its tokens (`SampleRow`), and the host's way from logits to token ids (`sample`).

A row's token is a function of its logits, its parameters, its seed and the number of its output tokens alone. The only
random number is one uniform per row and step, hashed on the host; nothing is drawn from a generator, so batch mates,
preemption, device and rank cannot shift it. The drawing itself is `helix.engine.draw`, here as on the device; this
module adds what needs the host: bias, penalties, grammars, log-probabilities, and nuclei of any size.

Shape letters: R rows, S rows that are drawn at random, C candidates of a row, V vocabulary, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from helix.engine.draw import WINDOW, draw, rank
from helix.engine.grammar import Grammar
from helix.engine.request import Choice
from helix.engine.sampling import SamplingParams
from helix.engine.scheduler import UNDECIDED

Alternatives = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities, best first."""

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_BLOCK_ENTRIES = 1 << 24
"""Logits taken to fp32 at a time where log-probabilities of many tokens are asked for."""


@dataclass(eq=False)
class SampleRow:
    """One row of a step: whose token it is. May be kept from step to step; `output_ids` may be the live list.

    `eos_token_ids` are masked, with the stop ids of `params`, until there are `min_tokens` output tokens. Tokens that
    `grammar` does not allow are masked too.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    eos_token_ids: frozenset[int]
    grammar: Grammar | None = None

    @property
    def choice(self) -> Choice:
        """The simplest way of choosing that gives `sample`'s token, once there are `min_tokens` of them."""
        params = self.params
        penalty = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        if params.logprobs is not None or params.logit_bias or penalty or self.grammar is not None:
            return "host"
        if params.temperature == 0:
            return "best"
        return "ranked" if params.top_k > 0 or params.top_p < 1 else "drawn"

    def numbers(self, step: int) -> tuple[float, float, float, float, float]:
        """What draws output token number `step`: temperature, top_k, top_p, min_p and the uniform number."""
        params = self.params
        return params.temperature, float(params.top_k), params.top_p, params.min_p, uniform(self.seed, step)

    @cached_property
    def prompt_set_P(self) -> Tensor:
        """The distinct token ids of the prompt, made once: a prompt may be millions of tokens long."""
        return torch.tensor(sorted(set(self.prompt_ids)), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token. `token_id` is -1 where `error` says why there is none.

    `logprob` and `top_logprobs` come from the log-softmax of the model's logits as they are: before bias, penalties,
    temperature and filters. `logprob` is None and `top_logprobs` empty where the row did not ask for them.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: Alternatives = ()
    error: str | None = None


def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """The next token of every row. `logits_RV` is not written to; its dtype may be fp32, fp16 or bf16.

    Padded vocabulary entries must be -inf, or cut off. A row that holds NaN or +inf, or has no finite entry left, gets
    an error in its `Sampled`; the other rows are not touched by it. Equal logits: the lowest id is the better one.
    """
    if logits_RV.dim() != 2 or logits_RV.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits_RV.shape)} do not fit {len(rows)} rows")
    if not rows:
        return []
    edited_RV = _edit(logits_RV, rows)
    best_R, token_R = edited_RV.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        drawn_S = torch.tensor(drawn, device=logits_RV.device)
        whole = len(drawn) == len(rows)
        logits_SV = edited_RV if whole else edited_RV[drawn_S]
        picked_S = _draw(logits_SV, token_R[drawn_S], [rows[index] for index in drawn])
        token_R = token_R.index_copy(0, drawn_S, picked_S)
    token_ids = torch.where(best_R.isfinite(), token_R, -1).tolist()
    logprobs = _row_logprobs(logits_RV, rows, token_ids)
    return [
        Sampled(token_id, *logprobs.get(index, (None, ())))
        if token_id >= 0
        else Sampled(-1, error=_reason(logits_RV[index]))
        for index, token_id in enumerate(token_ids)
    ]


def token_logprobs(
    logits_TV: Tensor, token_ids_T: Tensor | Sequence[int], num_top: int
) -> list[tuple[float, Alternatives]]:
    """Log-probability of each given token and of the `num_top` best ones, from fp32 log-softmax of the raw logits.

    An alternative of probability 0 (padded vocabulary) is left out. The work goes in blocks of tokens, so that a long
    prompt needs little memory beside its logits.
    """
    num_tokens, vocab_size = logits_TV.shape
    ids_T = torch.as_tensor(token_ids_T, dtype=torch.int64, device=logits_TV.device)
    block = max(1, _BLOCK_ENTRIES // vocab_size)
    result: list[tuple[float, Alternatives]] = []
    for start in range(0, num_tokens, block):
        part_TV = logits_TV[start : start + block].float()
        norm_T1 = part_TV.logsumexp(dim=-1, keepdim=True)
        value_T1 = part_TV.gather(-1, ids_T[start : start + block, None]) - norm_T1
        top_TC = rank(part_TV, min(num_top, vocab_size))
        top_value_TC = part_TV.gather(-1, top_TC) - norm_T1
        for (value,), ids, values in zip(value_T1.tolist(), top_TC.tolist(), top_value_TC.tolist(), strict=True):
            best = zip(ids, values, strict=True)
            result.append((value, tuple((token_id, top) for token_id, top in best if top != -math.inf)))
    return result


def uniform(seed: int, step: int) -> float:
    """Number in [0, 1) for one step of one seed: output `step` of SplitMix64 started at the hashed seed.

    torch's CPU generator is not used: it keeps only 32 bits of a seed.
    """
    return (_mix64(_mix64(seed) + step * _GOLDEN64) >> 12) * 2.0**-52


def _mix64(value: int) -> int:
    """SplitMix64's step and finaliser (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN64) & _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def _edit(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Bias, penalties, grammars and EOS masks, in a fp32 copy; the logits themselves where no row has any."""
    vocab_size = logits_RV.shape[1]
    bias: dict[int, float] = {}
    penalties: list[tuple[Tensor, Tensor, Tensor]] = []
    for index, row in enumerate(rows):
        params, base = row.params, index * vocab_size
        bias.update((base + token_id, value) for token_id, value in params.logit_bias if token_id < vocab_size)
        if len(row.output_ids) < params.min_tokens:
            ends = row.eos_token_ids.union(params.stop_token_ids)
            bias.update((base + token_id, -math.inf) for token_id in ends if token_id < vocab_size)
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            seen_P, factor_P, minus_P = _penalty(row)
            penalties.append((seen_P + base, factor_P, minus_P))
    grammars = [(index, row.grammar) for index, row in enumerate(rows) if row.grammar is not None]
    if not bias and not penalties and not grammars:
        return logits_RV
    edited_RV = logits_RV.to(torch.float32, copy=True)
    flat = edited_RV.view(-1)
    if bias:
        where = torch.tensor(list(bias), device=flat.device)
        # Added, not assigned: a NaN stays loud under -inf.
        flat[where] += torch.tensor(list(bias.values()), dtype=torch.float32, device=flat.device)
    if penalties:
        where, factor, minus = (torch.cat(part).to(flat.device) for part in zip(*penalties, strict=True))
        old = flat[where].double()
        new = torch.where(old > 0, old / factor, old * factor) - minus
        limit = torch.finfo(torch.float32).max
        flat[where] = torch.where(old.isfinite(), new.clamp(-limit, limit), old).float()
    for index, grammar in grammars:
        banned_V = ~grammar.allowed(vocab_size)
        edited_RV[index] += torch.zeros(vocab_size).masked_fill_(banned_V, -math.inf).to(edited_RV.device)
    return edited_RV


def _penalty(row: SampleRow) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct token ids that a row's penalties touch, the repetition factor of each, and what is subtracted."""
    params = row.params
    output_P, count_P = torch.unique(torch.as_tensor(row.output_ids, dtype=torch.int64), return_counts=True)
    minus_P = params.presence_penalty + params.frequency_penalty * count_P.double()
    seen_P = output_P
    if params.repetition_penalty != 1:
        seen_P = torch.unique(torch.cat([row.prompt_set_P, output_P]))
        minus_P = minus_P.new_zeros(len(seen_P)).index_copy(0, torch.searchsorted(seen_P, output_P), minus_P)
    return seen_P, torch.full_like(minus_P, params.repetition_penalty), minus_P


def _draw(logits_SV: Tensor, greedy_S: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Token ids [S] drawn for rows of a temperature above 0. `greedy_S` are the ids of the largest logits."""
    numbers = [row.numbers(len(row.output_ids)) for row in rows]
    numbers_S5 = torch.tensor(numbers, dtype=torch.float64, device=logits_SV.device)
    ranked = any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows)
    token_S = draw(logits_SV, greedy_S, numbers_S5, ranked=ranked, window=WINDOW)
    left_L = (token_S == UNDECIDED).nonzero()[:, 0] if ranked else token_S[:0]
    if not len(left_L):
        return token_S
    parts = (logits_SV[left_L], greedy_S[left_L], numbers_S5[left_L])
    return token_S.index_copy(0, left_L, draw(*parts, ranked=True, window=logits_SV.shape[1]))


def _row_logprobs(
    logits_RV: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> dict[int, tuple[float, Alternatives]]:
    """Row index -> log-probability and alternatives, of the rows that ask for them and have a token."""
    asking = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    asking = [(index, num) for index, num in asking if token_ids[index] >= 0]
    if not asking:
        return {}
    indices = [index for index, _ in asking]
    num_top = max(num for _, num in asking)
    values = token_logprobs(
        logits_RV[torch.tensor(indices, device=logits_RV.device)], [token_ids[index] for index in indices], num_top
    )
    return {index: (value, top[:num]) for (index, num), (value, top) in zip(asking, values, strict=True)}


def _reason(logits_V: Tensor) -> str:
    """Why a row has no token."""
    if bool(logits_V.isnan().any()):
        return "the model's logits for this request hold NaN, so no token can be sampled"
    if bool(logits_V.isposinf().any()):
        return "the model's logits for this request hold +inf, so no token can be sampled"
    if bool(logits_V.isneginf().all()):
        return "the model's logits for this request are all -inf, so no token can be sampled"
    return "logit_bias and min_tokens leave this request no token that can be sampled"
