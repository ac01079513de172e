"""Answers that must follow a JSON schema: which tokens may come next. llguidance does the work, on rank 0 alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from helix.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Grammars:
    """Compiles schemas for one tokenizer, which is read into llguidance once, at the first of them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, schema: str) -> Grammar:
        """The beginning of a text that follows the JSON schema `schema`; raises `RequestError` where none can."""
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise RequestError(
                "json_schema needs llguidance, which is not installed: pip install 'helix-parallel[serve]'"
            ) from error
        vocabulary = self._read_vocabulary()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        except ValueError as error:
            raise RequestError(f"json_schema cannot be followed: {error}") from error
        if matcher.is_error():
            raise RequestError(f"json_schema cannot be followed: {matcher.get_error()}")
        return Grammar(matcher)

    def _read_vocabulary(self) -> Any:
        """llguidance's form of the tokenizer; takes about a second."""
        if self._tokenizer is None or not self._tokenizer.is_fast or not self._eos_token_ids:
            raise RequestError(
                "json_schema needs a checkpoint with a fast tokenizer (tokenizer.json) and an end-of-sequence token"
            )
        import llguidance.hf

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
                )
            return self._vocabulary


class Grammar:
    """The place that one request's text has reached in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> Tensor:
        """Bool [V] on the CPU: tokens that may come next; where the text is complete, the ends alone."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed_V = torch.zeros(vocab_size, dtype=torch.bool)
        num_known = min(vocab_size, len(bits))
        allowed_V[:num_known] = torch.from_numpy(bits[:num_known].astype(bool))
        return allowed_V

    def accept(self, token_id: int) -> None:
        """The text goes on with `token_id`."""
        self._matcher.consume_token(token_id)
