"""Choosing tokens on the device: tensors in, token ids out, no step of it read by the host, so a graph can hold it.

A row's token is a function of its logits and its numbers alone (see `helix.kernels.draw`, which does without ranks).

Shape letters: R rows, C candidates of a row, V vocabulary, P parts of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helix.engine.request import Choice
from helix.engine.scheduler import NOT_FINITE, UNDECIDED
from helix.kernels import best_tokens, draw_tokens
from helix.kernels.draw import pick, weigh

NUM_NUMBERS = 5
"""Numbers of a row: temperature, top_k, top_p, min_p, and one uniform number in [0, 1)."""

WINDOW = 1024
"""Candidates that are ranked: a nucleus is nearly always smaller, and ranking all of V is slow."""


def choose_tokens(logits_RV: Tensor, numbers_R5: Tensor | None, choice: Choice) -> Tensor:
    """int64 [R]: a token for each row; `NOT_FINITE` where its best logit is NaN or inf.

    With `choice` "drawn" rows of a temperature above 0 are drawn (without top-k and top-p), with "ranked" by all their
    numbers; then `UNDECIDED` marks a row whose nucleus `WINDOW` candidates do not hold. Otherwise each takes its best.
    """
    greedy_R = best_tokens(logits_RV, NOT_FINITE)
    if numbers_R5 is None or choice not in ("drawn", "ranked"):
        return greedy_R
    return draw(logits_RV, greedy_R, numbers_R5, ranked=choice == "ranked", window=WINDOW)


def draw(logits_RV: Tensor, greedy_R: Tensor, numbers_R5: Tensor, *, ranked: bool, window: int) -> Tensor:
    """int64 [R]: a token drawn for each row after temperature, top-k, top-p and min-p.

    `UNDECIDED` where the nucleus of a row is not among its `window` largest logits; never with a window of all of V.
    `greedy_R` are the ids of the largest logits; a row whose id is negative, or whose temperature is 0, keeps it.
    `numbers_R5` is fp64; a top_k below 1 is off. Without `ranked` no row may have a top-k or a top-p.
    """
    temperature_R, top_k_R, top_p_R, min_p_R, uniform_R = numbers_R5.unbind(1)
    token_R = draw_tokens(logits_RV, greedy_R, temperature_R, min_p_R, uniform_R)
    if not ranked:
        return token_R
    has_top_k_R = (top_k_R >= 1) & (top_k_R < logits_RV.shape[1])
    is_ranked_R = (has_top_k_R | (top_p_R < 1)) & (temperature_R > 0) & (greedy_R >= 0)
    ranked_R = _draw_ranked(logits_RV, greedy_R, numbers_R5, has_top_k_R[:, None], min(window, logits_RV.shape[1]))
    return torch.where(is_ranked_R, ranked_R, token_R)


def _draw_ranked(
    logits_RV: Tensor, greedy_R: Tensor, numbers_R5: Tensor, has_top_k_R1: Tensor, num_candidates: int
) -> Tensor:
    """int64 [R]: tokens of rows with top-k or top-p, drawn in the order of the ranks; `UNDECIDED` where they are not
    among the candidates."""
    temperature_R1, top_k_R1, top_p_R1, min_p_R1, uniform_R1 = numbers_R5.unsqueeze(1).unbind(2)
    vocab_size = logits_RV.shape[1]
    logits_RV = logits_RV.float()
    best_R1 = logits_RV.gather(1, greedy_R.clamp(min=0)[:, None])
    weight_RV = weigh(logits_RV, best_R1, temperature_R1)
    value_RC, id_RC = logits_RV.topk(num_candidates, dim=-1, sorted=False)
    id_RC = ids_of(sort_keys(value_RC, id_RC, vocab_size).sort(dim=-1, descending=True).values, vocab_size)
    weight_RC = weight_RV.gather(-1, id_RC)
    if num_candidates < vocab_size:
        # Which ones of several equal logits came in at the end is open, so those do not count.
        is_sure_RC = logits_RV.gather(-1, id_RC) > value_RC.amin(dim=-1, keepdim=True)
        is_whole_R1 = weight_RC.amin(dim=-1, keepdim=True) == 0
    else:
        is_sure_RC = torch.ones_like(id_RC, dtype=torch.bool)
        is_whole_R1 = torch.ones_like(has_top_k_R1)
    place_C = torch.arange(num_candidates, device=id_RC.device)
    weight_RC = weight_RC.where(is_sure_RC & (~has_top_k_R1 | (place_C < top_k_R1)), 0.0)
    sum_RC = weight_RC.cumsum(dim=-1)
    total_R1 = torch.where(has_top_k_R1, sum_RC[:, -1:], weight_RV.sum(dim=-1, keepdim=True))
    mass_R1 = top_p_R1 * total_R1
    num_sure_R1 = is_sure_RC.sum(dim=-1, keepdim=True)
    holds_R1 = torch.where(has_top_k_R1, num_sure_R1 >= top_k_R1, sum_RC[:, -1:] >= mass_R1)
    before_RC = torch.nn.functional.pad(sum_RC[:, :-1], (1, 0))
    in_nucleus_RC = (before_RC < mass_R1) | (top_p_R1 >= 1)
    kept_RC = weight_RC.where(in_nucleus_RC & (weight_RC >= min_p_R1), 0.0)
    place_R = pick(kept_RC, id_RC, uniform_R1)
    token_R = id_RC.gather(-1, place_R[:, None])[:, 0]
    return torch.where((holds_R1 | is_whole_R1)[:, 0], token_R, UNDECIDED)


def sort_keys(logits_RC: Tensor, id_RC: Tensor, vocab_size: int) -> Tensor:
    """int64 [R, C], ordered as the fp32 logits are, and equal ones by lowest id first; no two of a row are equal."""
    bits_RC = (logits_RC + 0.0).view(torch.int32)
    # Flipping the lower bits of negative floats makes integers that are ordered as the floats are.
    ordered_RC = bits_RC ^ (bits_RC >> 31 & 0x7FFFFFFF)
    return ordered_RC.long().mul_(1 << 32).add_(vocab_size - 1 - id_RC)


def ids_of(key_RC: Tensor, vocab_size: int) -> Tensor:
    """The ids that `sort_keys` put into its keys."""
    return vocab_size - 1 - (key_RC & 0xFFFFFFFF)


def rank(logits_RV: Tensor, num: int) -> Tensor:
    """Ids [R, num] of the largest fp32 logits, best first, equal ones by lowest id.

    torch.topk leaves the order of equals open; keys made of the logit and the id have no equals.
    """
    vocab_size = logits_RV.shape[1]
    keys_RV = sort_keys(logits_RV, torch.arange(vocab_size, device=logits_RV.device), vocab_size)
    return ids_of(keys_RV.topk(num, dim=-1).values, vocab_size)
