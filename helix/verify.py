"""`helix verify`: the configured layout against one unsharded rank on the same weights, layer by layer.

Both engines see the same token ids. Compared are every layer's output, the logits, and the greedy tokens. Where
weights or cache are FP8, a third engine without it says what that costs: the distance of the predicted distributions,
and the perplexity of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from helix.comm.world import pick_device, single_world
from helix.config import RunConfig, config_to_dict
from helix.engine.build import resolve_dtype, resolve_packing
from helix.engine.engine import Engine
from helix.engine.sampling import SamplingParams
from helix.layers.batch import Batch
from helix.layout import Layout

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Bound on the absolute error of a logit. 16-bit sums round differently in another order, fp32 ones hardly."""

FP8_CACHE_TOLERANCE = 1e-1
"""The same with an FP8 cache: a key that another order of sums moves by a rounding may be stored as e4m3's other
neighbour."""

FP8_DIVERGENCE = 0.05
"""Bound on the mean divergence, in nats, of what a model with FP8 predicts from what it predicts without."""

_WINDOW = 512

_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker who",
    "1",
)
_TOKEN_IDS = ((1, 2, 3, 4, 5), tuple(range(10, 70)), (1,))


@dataclass(frozen=True, slots=True)
class Trace:
    """What one engine computed from one prompt: ``layers[i + 1]`` is layer i's output [T, C] (0: the embedding)."""

    layers: tuple[Tensor, ...]
    logits: Tensor
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two traces of one prompt. `first_layer` is the first layer beyond the tolerance (-1: the embedding), if any."""

    num_tokens: int
    max_error: float
    mean_error: float
    equal_tokens: int
    checked_tokens: int
    first_layer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Predictions with FP8 against those of the same model without it, over `num_tokens` places of the same texts.

    `mean_divergence` and `max_divergence` are Kullback-Leibler divergences in nats, reference first; `same_top` is the
    share of places where both rank the same token first. Perplexity is that of each text's own next tokens.
    """

    num_tokens: int
    mean_divergence: float
    max_divergence: float
    same_top: float
    perplexity: float
    reference_perplexity: float
    bound: float

    @property
    def close(self) -> bool:
        # A NaN is not close, hence not (divergence > bound).
        return self.mean_divergence <= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    """All prompts compared; `exact` says whether every one is inside `tolerance`. `accuracy` is there with FP8 only."""

    layout: Layout
    dtype: str
    tolerance: float
    prompts: tuple[Comparison, ...]
    accuracy: Accuracy | None = None

    @property
    def max_error(self) -> float:
        return max(one.max_error for one in self.prompts)

    @property
    def exact(self) -> bool:
        return all(one.max_error <= self.tolerance and one.first_layer is None for one in self.prompts)

    @property
    def first_layer(self) -> int | None:
        """First layer that differs in any prompt."""
        found = [one.first_layer for one in self.prompts if one.first_layer is not None]
        return min(found) if found else None


def verify(
    config: RunConfig,
    prompts: Sequence[str | Sequence[int]] | None = None,
    num_tokens: int = 32,
    tolerance: float | None = None,
    text: str | None = None,
    text_tokens: int = 2048,
) -> Report:
    """Run `prompts` (None: a few of our own) through `config`'s layout and through one rank, and compare.

    With FP8 weights or cache, the first `text_tokens` of `text` (None: the prompts) go through `config`'s layout and
    through one rank without FP8 too, whose memory must hold the weights in `model.dtype`.

    Under the launcher every rank calls this; it returns on rank 0 only (as `Engine` does).
    """
    with Engine(config_to_dict(config)) as engine:
        prompts = prompts or (_TEXTS if engine.tokenizer is not None else _TOKEN_IDS)
        traces = [_trace(engine, prompt, num_tokens) for prompt in prompts]
        layout, spec = engine.layout, engine.spec
        device = pick_device(config.engine.device, 0)
        has_fp8 = config.cache.dtype == "float8" or resolve_packing(config, spec, device) is not None
        texts = _texts(engine, prompts, text, text_tokens) if has_fp8 else []
        predicted = [engine.logits(ids) for ids in texts]
    dtype = resolve_dtype(config.model.dtype, spec, device)
    if tolerance is None:
        floor = FP8_CACHE_TOLERANCE if config.cache.dtype == "float8" else 0.0
        tolerance = max(TOLERANCES[dtype], floor)
    one_rank = config_to_dict(config) | {"layout": {"kvp": 1, "tpa": 1, "tpf": 1, "ep": 1}}
    with Engine(one_rank, world=single_world(device)) as engine:
        references = [_trace(engine, prompt, num_tokens) for prompt in prompts]
    compared = tuple(compare(ours, theirs, tolerance) for ours, theirs in zip(traces, references, strict=True))
    accuracy = None
    if has_fp8:
        plain = one_rank | {
            "model": one_rank["model"] | {"quantize": "none"},
            "cache": one_rank["cache"] | {"dtype": "auto"},
        }
        with Engine(plain, world=single_world(device)) as engine:
            accuracy = measure_accuracy(texts, predicted, [engine.logits(ids) for ids in texts])
    return Report(layout, str(dtype).removeprefix("torch."), tolerance, compared, accuracy)


def compare(ours: Trace, reference: Trace, tolerance: float) -> Comparison:
    """Errors of `ours`; a layer differs where it is off by more than `tolerance` x max(1, the largest value there)."""
    first = None
    for index, (left, right) in enumerate(zip(ours.layers, reference.layers, strict=True)):
        bound = tolerance * max(1.0, float(right.abs().max()))
        # A NaN on either side is a difference too, hence not (error <= bound).
        if not bool((left - right).abs().max() <= bound):
            first = index - 1
            break
    error = (ours.logits - reference.logits).abs()
    equal = sum(a == b for a, b in zip(ours.tokens, reference.tokens, strict=True))
    finite = bool(torch.isfinite(error).all())
    return Comparison(
        num_tokens=ours.logits.shape[0],
        max_error=float(error.max()) if finite else float("inf"),
        mean_error=float(error.mean()) if finite else float("inf"),
        equal_tokens=equal,
        checked_tokens=len(ours.tokens),
        first_layer=first,
    )


def measure_accuracy(
    texts: Sequence[Sequence[int]], predicted: Sequence[Tensor], reference: Sequence[Tensor], bound: float | None = None
) -> Accuracy:
    """`Accuracy` of the logits `predicted` [len, V] of each text against those of `reference`."""
    divergences, same, ours, theirs = [], 0, [], []
    for ids, got, want in zip(texts, predicted, reference, strict=True):
        got_TV, want_TV = got.double().log_softmax(-1), want.double().log_softmax(-1)
        divergences.append((want_TV.exp() * (want_TV - got_TV)).sum(-1))
        same += int((got.argmax(-1) == want.argmax(-1)).sum())
        following = torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1)
        ours.append(-got_TV[:-1].gather(1, following))
        theirs.append(-want_TV[:-1].gather(1, following))
    divergence_T = torch.cat(divergences)
    return Accuracy(
        num_tokens=len(divergence_T),
        mean_divergence=float(divergence_T.mean()),
        max_divergence=float(divergence_T.max()),
        same_top=same / len(divergence_T),
        perplexity=exp(float(torch.cat(ours).mean())),
        reference_perplexity=exp(float(torch.cat(theirs).mean())),
        bound=FP8_DIVERGENCE if bound is None else bound,
    )


def _texts(
    engine: Engine, prompts: Sequence[str | Sequence[int]], text: str | None, text_tokens: int
) -> list[list[int]]:
    """Token ids to predict: `text` in windows, or the prompts; of two tokens at least, so that one follows another."""
    if text is None:
        whole = [engine.encode(prompt) for prompt in prompts]
    else:
        ids = engine.encode(text)[:text_tokens]
        step = min(_WINDOW, engine.max_context)
        whole = [ids[start : start + step] for start in range(0, len(ids), step)]
    return [ids for ids in whole if len(ids) > 1]


def _trace(engine: Engine, prompt: str | Sequence[int], num_tokens: int) -> Trace:
    token_ids = engine.encode(prompt)
    parts: dict[int, list[Tensor]] = {}

    def tap(_batch: Batch, layer: int, x_TC: Tensor) -> None:
        parts.setdefault(layer, []).append(x_TC.float().cpu())

    logits = engine.trace(token_ids, tap)
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens = engine.generate([token_ids], greedy)[0].token_ids
    return Trace(tuple(torch.cat(parts[layer]) for layer in sorted(parts)), logits, tuple(tokens))
