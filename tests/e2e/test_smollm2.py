"""SmolLM2-135M-Instruct with its real weights: exact on every kind of layout, and text as a person would ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helix import Engine, SamplingParams
from helix.verify import FP8_DIVERGENCE, measure_accuracy
from tests.parallel import jobs
from tests.ranks import RankPool

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = ("The capital of France is", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,", "A")
NUM_TOKENS = 24
LAYOUTS = [
    (3, {"kvp": 3}),
    (3, {"tpa": 3}),
    (2, {"kvp": 2}),
    # 90 s on two cores; the tiny models run it every time.
    pytest.param(9, {"kvp": 3, "tpa": 3}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> list[tuple[list[int], np.ndarray, list[int]]]:
    """(prompt ids, logits, greedy tokens) by transformers for each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    answers = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].numpy()
            full = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append((ids, logits, full[0, len(ids) :].tolist()))
    return answers


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_layout_equals_transformers(
    ranks: RankPool, smollm2: Path, reference: list[Any], num_ranks: int, layout: dict[str, Any]
) -> None:
    settings = {
        "model": {"path": str(smollm2), "dtype": "float32"},
        "layout": layout,
        "cache": {"page_tokens": 4, "num_page_rows": 40},
        "engine": {"device": "cpu", "prefill_chunk": 16},
    }
    prompts = [ids for ids, _logits, _tokens in reference]
    logits, tokens = ranks.run(num_ranks, jobs.drive, settings, jobs.logits_and_tokens, prompts, NUM_TOKENS)[0]
    for (_ids, expected, greedy), got, got_tokens in zip(reference, logits, tokens, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
        assert got_tokens == greedy


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Any:
    with Engine(
        model={"path": str(smollm2), "dtype": "float32"},
        cache={"page_tokens": 16, "num_page_rows": 64},
        engine={"device": "cpu"},
    ) as one:
        yield one


def test_chat_answer(engine: Engine) -> None:
    output = engine.generate(QUESTION, SamplingParams(max_tokens=32, temperature=0.0))[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text


def test_streamed_text_equals_the_whole(engine: Engine) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    whole = engine.generate(["Write an emoji: 🙂"], params)[0].text
    assert "".join(piece.text for piece in engine.stream("Write an emoji: 🙂", params)) == whole


def test_stop_string_ends_the_text_and_frees_the_pages(engine: Engine) -> None:
    free = engine.num_free_rows
    params = SamplingParams(max_tokens=40, temperature=0.0, stop="Paris")
    output = engine.generate(QUESTION, params)[0]
    assert output.finish_reason == "stop"
    assert output.text.endswith("is ")
    assert "Paris" not in output.text
    assert engine.num_free_rows == free


def test_fp8_is_close(smollm2: Path) -> None:
    """Real weights quantised at load, and a cache in FP8: inside the bound that `helix verify` states."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    texts = [tokenizer(text)["input_ids"] for text in (TEXTS[1], "The sun rises in the east and sets in the west.")]
    found = {}
    for name, quantize, cache in (("none", "none", "auto"), ("weights", "fp8", "auto"), ("cache", "none", "fp8")):
        settings: dict[str, Any] = {
            "model": {"path": str(smollm2), "dtype": "float32", "quantize": quantize},
            "cache": {"dtype": cache, "num_page_rows": 8},
            "engine": {"device": "cpu", "max_batch": 1},
        }
        with Engine(settings) as engine:
            found[name] = [engine.logits(ids) for ids in texts]
    for name in ("weights", "cache"):
        cost = measure_accuracy(texts, found[name], found["none"])
        assert 0 < cost.mean_divergence < FP8_DIVERGENCE, (name, cost)
        assert cost.perplexity < 1.1 * cost.reference_perplexity, (name, cost)
