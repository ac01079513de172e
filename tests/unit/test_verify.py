"""`helix.verify.compare`: the first layer that differs is the one that is named, and NaN never passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helix.layout import Layout
from helix.verify import Report, Trace, compare, measure_accuracy


def trace(num_layers: int = 4) -> Trace:
    generator = torch.Generator().manual_seed(3)
    layers = tuple(torch.randn(5, 8, generator=generator) for _ in range(num_layers + 1))
    return Trace(layers, torch.randn(5, 11, generator=generator), (1, 2, 3))


def test_equal_traces() -> None:
    found = compare(trace(), trace(), 1e-6)
    assert (found.max_error, found.first_layer, found.equal_tokens, found.num_tokens) == (0.0, None, 3, 5)


@pytest.mark.parametrize("layer", [-1, 0, 3])
@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_the_first_layer_that_differs_is_named(layer: int, value: float) -> None:
    reference = trace()
    layers = [one.clone() for one in reference.layers]
    for later in layers[layer + 1 :]:
        later[2, 3] += value
    found = compare(replace(reference, layers=tuple(layers)), reference, 1e-3)
    assert found.first_layer == layer


def test_logits_and_tokens() -> None:
    reference = trace()
    logits = reference.logits.clone()
    logits[0, 0] += 0.25
    found = compare(replace(reference, logits=logits, tokens=(1, 9, 3)), reference, 1e-3)
    assert found.max_error == pytest.approx(0.25)
    assert found.mean_error == pytest.approx(0.25 / 55)
    assert (found.equal_tokens, found.checked_tokens) == (2, 3)
    logits[1, 1] = float("nan")
    assert compare(replace(reference, logits=logits), reference, 1e9).max_error == float("inf")


def test_report() -> None:
    good, bad = compare(trace(), trace(), 1e-3), replace(compare(trace(), trace(), 1e-3), first_layer=2)
    assert Report(Layout(), "float32", 1e-3, (good,)).exact
    report = Report(Layout(), "float32", 1e-3, (good, bad))
    assert not report.exact
    assert report.first_layer == 2
    assert not Report(Layout(), "float32", 1e-3, (replace(good, max_error=2e-3),)).exact


def test_accuracy() -> None:
    generator = torch.Generator().manual_seed(5)
    texts = [[3, 1, 2, 0], [2, 2]]
    want = [torch.randn(len(ids), 5, generator=generator) for ids in texts]
    same = measure_accuracy(texts, [logits + 3.0 for logits in want], want)
    assert (same.num_tokens, same.same_top, same.close) == (6, 1.0, True)
    assert same.mean_divergence == pytest.approx(0.0, abs=1e-7)
    assert same.perplexity == pytest.approx(same.reference_perplexity)
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
        for ids, logits in zip(texts, want, strict=True)
    ]
    assert same.reference_perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    got = [logits.clone() for logits in want]
    got[1][0] = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0])
    worse = measure_accuracy(texts, got, want)
    p, q = want[1][0].softmax(0), got[1][0].softmax(0)
    assert worse.max_divergence == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert worse.mean_divergence == pytest.approx(worse.max_divergence / 6, rel=1e-5)
    assert not worse.close
    got[0][0, 0] = torch.nan
    assert not measure_accuracy(texts, got, want).close
