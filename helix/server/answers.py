"""Answers in OpenAI's form: the whole one, and the chunks of a stream; each made of the same pieces.

`Completion` and `Chat` know the two shapes. `Choice` gathers the pieces of one generation, so that what a stream sends
adds up to the whole answer.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from helix.engine.generation import Generation
from helix.engine.outputs import Piece, TokenLogprob
from helix.engine.text import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

_MIN_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Choice:
    """One generation on its way into an answer."""

    index: int
    generation: Generation
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    """(characters before the token, the token) for each token."""

    def add(self, piece: Piece) -> list[tuple[int, TokenLogprob]]:
        """Take a piece; returns the log-probabilities that came with it."""
        new = [] if piece.logprob is None else [(len(self.text), piece.logprob)]
        self.text += piece.text
        self.num_tokens += piece.token_id is not None
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.logprobs += new
        return new


def usage(choices: Sequence[Choice], num_choices: int) -> Json:
    """Token counts; a prompt counts once, however many choices it has, and so do its tokens that were reused."""
    requests = [one.generation.request for one in choices[::num_choices]]
    prompt = sum(len(request.prompt_ids) for request in requests)
    output = sum(one.num_tokens for one in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(request.num_reused for request in requests)},
    }


class Answer(ABC):
    """One HTTP answer; `num_choices` generations for each prompt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, model: str, generations: Sequence[Generation], num_choices: int
    ) -> None:
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._num_choices = num_choices
        self.choices = [Choice(index, one) for index, one in enumerate(generations)]

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self) -> Json:
        """The answer, once every choice is finished."""
        choices = [self._whole_choice(one) for one in self.choices]
        return self._wrap(self.whole_object, choices) | {"usage": usage(self.choices, self._num_choices)}

    def opening(self) -> Iterator[Json]:
        """Chunks that come before any token."""
        for one in self.choices:
            choice = self._opening_choice(one)
            if choice is not None:
                yield self._wrap(self.chunk_object, [choice])

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """Take a piece; the chunk that it makes, None where it brings nothing to send.

        A model without a tokenizer has no text: there each token makes a chunk, so that clients can time it.
        """
        choice = self.choices[index]
        logprobs = choice.add(piece)
        if self._tokenizer is not None and not (piece.text or logprobs or piece.finish_reason):
            return None
        return self._wrap(self.chunk_object, [self._chunk_choice(choice, piece, logprobs)])

    def usage_chunk(self) -> Json:
        """The last chunk, where usage was asked for."""
        return self._wrap(self.chunk_object, []) | {"usage": usage(self.choices, self._num_choices)}

    def _wrap(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": choices}

    def _token(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return str(self._tokenizer.decode([token_id]))

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _opening_choice(self, choice: Choice) -> Json | None: ...

    @abstractmethod
    def _chunk_choice(self, choice: Choice, piece: Piece, logprobs: list[tuple[int, TokenLogprob]]) -> Json: ...


class Completion(Answer):
    """Shape of /v1/completions. With `echo`, the text and the log-probabilities begin with the prompt's."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any, prompts: Sequence[Any], echo: bool) -> None:
        super().__init__(*arguments)
        self._echo = echo
        self._echoed = [self._text(one) for one in prompts] if echo else []

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else str(self._tokenizer.decode(prompt))

    def _prompt_text(self, choice: Choice) -> str:
        return self._echoed[choice.index // self._num_choices]

    def _whole_choice(self, choice: Choice) -> Json:
        text, logprobs = choice.text, None
        if choice.generation.params.logprobs is not None:
            logprobs = self._logprobs(choice.logprobs)
        if self._echo:
            before = self._prompt_text(choice)
            text = before + text
            if logprobs is not None:
                logprobs = _joined(self._prompt_logprobs(choice), logprobs, len(before))
        return _completion_choice(choice.index, text, logprobs, choice.finish_reason)

    def _opening_choice(self, choice: Choice) -> Json | None:
        return _completion_choice(choice.index, self._prompt_text(choice), None, None) if self._echo else None

    def _chunk_choice(self, choice: Choice, piece: Piece, logprobs: list[tuple[int, TokenLogprob]]) -> Json:
        found = self._logprobs(logprobs) if logprobs else None
        return _completion_choice(choice.index, piece.text, found, piece.finish_reason)

    def _logprobs(self, entries: Sequence[tuple[int, TokenLogprob]]) -> Json:
        return {
            "text_offset": [offset for offset, _ in entries],
            "token_logprobs": [_finite(one.logprob) for _, one in entries],
            "tokens": [self._token(one.token_id) for _, one in entries],
            "top_logprobs": [self._top(one) for _, one in entries],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, value in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._token(token_id), _finite(value))
        return found

    def _prompt_logprobs(self, choice: Choice) -> Json:
        """Of the prompt's tokens; the first has none, as nothing stands before it."""
        output = choice.generation.output()
        ids = output.prompt_token_ids
        texts = ["" for _ in ids] if self._tokenizer is None else _token_texts(self._tokenizer, ids)
        offsets = [0]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        rest = [one for one in (output.prompt_logprobs or [])[1:] if one is not None]
        found = self._logprobs(list(zip(offsets[1:], rest, strict=True)))
        return {
            "text_offset": offsets,
            "token_logprobs": [None, *found["token_logprobs"]],
            "tokens": [self._token(ids[0]), *found["tokens"]],
            "top_logprobs": [None, *found["top_logprobs"]],
        }


class Chat(Answer):
    """Shape of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: Choice) -> Json:
        asked = choice.generation.params.logprobs is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if asked else None,
            "finish_reason": choice.finish_reason,
        }

    def _opening_choice(self, choice: Choice) -> Json:
        return _chat_chunk(choice.index, {"role": "assistant", "content": ""}, None, None)

    def _chunk_choice(self, choice: Choice, piece: Piece, logprobs: list[tuple[int, TokenLogprob]]) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return _chat_chunk(choice.index, delta, self._logprobs(logprobs) if logprobs else None, piece.finish_reason)

    def _logprobs(self, entries: Sequence[tuple[int, TokenLogprob]]) -> Json:
        content = [
            self._entry(one.token_id, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
            for _, one in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._token(token_id)
        # A token that holds a part of a character has no text of its own, and its bytes are the tokenizer's secret.
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _completion_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_chunk(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text that became certain with each token."""
    stream = Detokenizer(tokenizer, skip_special_tokens=True)
    return [stream.push([token_id]) for token_id in token_ids]


def _joined(prompt: Json, output: Json, shift: int) -> Json:
    """Log-probabilities of prompt and output in one; offsets of the output move behind the prompt's text."""
    output = output | {"text_offset": [offset + shift for offset in output["text_offset"]]}
    return {name: prompt[name] + output[name] for name in prompt}
