"""`helix.verify.compare`: the first layer that differs is the one that is named, and NaN never passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helix.layout import Layout
from helix.verify import Report, Trace, compare


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
