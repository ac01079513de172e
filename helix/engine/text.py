"""Text on both sides of the engine: prompts become token ids, token ids become text as they come.

Tokenizers are transformers' own, made by `load_tokenizer`; a checkpoint without one serves token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helix.engine.sampling import SamplingParams, shown
from helix.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
_TAIL = 4
"""Tokens that a UTF-8 character may be spread over."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "config.json",
)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint directory, None where it has no tokenizer files.

    Only local files are read and no code of the checkpoint is run. Decoding never removes spaces before punctuation,
    as that could take back text that was already streamed. Files that cannot be read raise `CheckpointError`.
    """
    from transformers import AutoTokenizer

    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: a checkpoint directory is needed")
    present = [name for name in (*_VOCABULARY_FILES, "tokenizer_config.json") if (directory / name).is_file()]
    if not present:
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, clean_up_tokenization_spaces=False
        )
    # What a broken file raises differs from file to file (the tokenizers library raises bare exceptions).
    except Exception as error:
        raise CheckpointError(_blame(directory, present, error)) from error
    return tokenizer


def _blame(directory: Path, present: Sequence[str], error: Exception) -> str:
    """Which file keeps the tokenizer from being loaded."""
    for path in (directory / name for name in _JSON_FILES):
        try:
            if path.is_file() and not isinstance(json.loads(path.read_bytes()), dict):
                return f"{path} is broken: it must hold a JSON object"
        except (OSError, ValueError) as fault:
            return f"{path} is broken: {_first_line(fault)}"
    if set(present).isdisjoint(_VOCABULARY_FILES):
        return f"{directory / present[0]} has no vocabulary beside it: one of {', '.join(_VOCABULARY_FILES)} is needed"
    files = ", ".join(str(directory / name) for name in present)
    return f"no tokenizer can be made from {files}: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    vocab_size: int,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a prompt, each checked against the model's vocabulary.

    Text gets the special tokens that the tokenizer adds by itself; chat messages (mappings with `role` and `content`,
    the content a string or a list of parts of type text) go through the checkpoint's chat template, with `tools`, up
    to where the assistant's answer begins. Whatever cannot be served raises `RequestError`.
    """
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"the prompt is of type {type(prompt).__name__}: must be a string, a list of token ids or one of messages"
        )
    items: list[Any] = [] if isinstance(prompt, str) else list(prompt)
    if isinstance(prompt, str):
        items = _encode_text(tokenizer, prompt)
    elif items and isinstance(items[0], Mapping):
        items = _encode_chat(tokenizer, items, tools)
    if not items:
        raise RequestError("the prompt is empty: it must hold at least one token")
    return _check_ids(items, vocab_size)


def _check_ids(ids: list[Any], vocab_size: int) -> list[int]:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for index, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            kind = type(token_id).__name__
            raise RequestError(f"prompt[{index}] is of type {kind}: a prompt of token ids must hold integers only")
        if not 0 <= int(token_id) < vocab_size:
            raise RequestError(
                f"prompt[{index}] is token id {shown(int(token_id))}: must be from 0 to {vocab_size - 1}, "
                f"as the model's vocabulary size is {vocab_size}"
            )
    return [int(token_id) for token_id in ids]


def _encode_text(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    if not text:
        return []
    if tokenizer is None:
        raise RequestError("the prompt is text, but the checkpoint has no tokenizer: pass token ids")
    _check_unicode(text, "the prompt")
    return list(tokenizer.encode(text))


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds half of a surrogate pair at character {error.start}: must be valid Unicode"
        ) from None


def _encode_chat(
    tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    checked = [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if tokenizer is None:
        raise RequestError("the prompt is a chat, but the checkpoint has no tokenizer: pass token ids")
    if not tokenizer.chat_template:
        raise RequestError("the prompt is a chat, but the checkpoint has no chat template: pass text or token ids")
    try:
        ids = tokenizer.apply_chat_template(
            checked,
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    # A template is a program of the checkpoint's author: it may refuse a conversation with any exception.
    except Exception as error:
        raise RequestError(f"the checkpoint's chat template refuses the messages: {_first_line(error)}") from error
    return list(ids)


def _check_message(name: str, message: object) -> dict[str, Any]:
    """One chat message as the template reads it: content parts joined to one string."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} is of type {type(message).__name__}: must be a mapping with role and content")
    role = message.get("role")
    if role not in _ROLES:
        given = "has no role" if "role" not in message else f"has role {role!r}"
        raise RequestError(f"{name} {given}: must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return dict(message)
    if "content" not in message:
        raise RequestError(f"{name} has no content: must be a string or a list of parts of type text")
    return {**message, "content": _content_text(f"{name}.content", content)}


def _content_text(name: str, content: object) -> str:
    if isinstance(content, str):
        _check_unicode(content, name)
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{name} is of type {type(content).__name__}: must be a string or a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{name}[{index}] is no text part: must be {{"type": "text", "text": a string}}')
        _check_unicode(part["text"], f"{name}[{index}]")
    return "".join(part["text"] for part in content)


class Detokenizer:
    """Text of one sequence of token ids, handed out as soon as it can no longer change.

    The texts returned add up to ``tokenizer.decode(all ids)``, and no part of a UTF-8 character is ever returned: bytes
    that may be the beginning of one wait for the rest. One difference: tokenizers with byte fallback (Llama 2) decode
    a whole run of byte tokens to replacement characters where a later byte makes the run invalid; characters of the
    run that were complete before stay as they are here, one token at a time or all at once.

    A token costs two decodings of a few ids: `_context` is the last piece of text that was finished, which tells the
    tokenizer that the sequence has begun (a leading space counts), and `_pending` the tokens behind it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._reset()

    def _reset(self) -> None:
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._pending_text = ""
        self._num_sent = 0
        """Characters of `_pending_text` that were returned."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that they finish, which may be empty."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Ends the sequence; returns what waited, cut characters as U+FFFD. The next push begins a new sequence."""
        text = self._pending_text[self._num_sent :]
        self._reset()
        return text

    def _push(self, token_id: int) -> str:
        before = self._pending_text
        self._pending.append(token_id)
        text = self._decode_pending()
        if text == before and not self._decode([token_id, token_id]):
            # It is invisible (a skipped special token). One alone may be the space that the first token loses.
            self._pending.pop()
            return ""
        self._pending_text = text
        num_stable = len(text.rstrip(_REPLACEMENT))
        if 0 < len(text) == num_stable:
            return self._settle()
        if len(self._pending) > _MAX_PENDING:
            return self._cut()
        return self._send(num_stable)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _decode_pending(self) -> str:
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Byte fallback: this byte begins a character, and until that is complete the bytes before it do not decode.
        self._context, self._context_text = [], ""
        return self._decode(self._pending)

    def _send(self, stop: int) -> str:
        """Pending text up to `stop`, less what was returned already."""
        text = self._pending_text[self._num_sent : stop]
        self._num_sent = max(self._num_sent, stop)
        return text

    def _settle(self) -> str:
        """The pending tokens end with a whole character: return their text and make them the context."""
        text = self._pending_text[self._num_sent :]
        self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending, self._pending_text, self._num_sent = [], "", 0
        return text

    def _cut(self) -> str:
        """Many tokens and no end of a character: only the last U+FFFD can change, so the tokens of it are kept."""
        text = self._send(len(self._pending_text) - 1)
        num_waiting = len(self._pending_text) - self._num_sent
        self._context, self._context_text = [], ""
        self._pending = self._pending[-_TAIL:]
        self._pending_text = self._decode(self._pending)
        self._num_sent = max(0, len(self._pending_text) - num_waiting)
        return text


class _StopMatcher:
    """Reads text character by character and finds the stop string that is complete first.

    Knuth-Morris-Pratt, one state per stop string, so that hostile stop strings cost no more than friendly ones.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Of two that end together the longer one counts, as it begins earlier.
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text so far that a stop string begins with."""
        return max(self._states, default=0)

    def step(self, char: str) -> str | None:
        """Takes one character; the stop string that it completes, or None."""
        found: str | None = None
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            if state == len(stop):
                found = found or stop
                state = borders[-1]
            self._states[index] = state
        return found


def _borders(text: str) -> list[int]:
    """Entry i: length of the longest proper prefix of ``text[: i + 1]`` that is also its suffix."""
    borders = [0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length - 1]
        borders.append(length + (text[length] == char))
    return borders


class TextStream:
    """Text of one request: detokenised, held back while it may become a stop string, cut where one is complete.

    The stop string that is complete first, counted in characters, wins; so the text does not depend on token borders.
    Stop strings completed before `min_tokens` tokens count as text. With `include_stop` the stop string itself is kept.
    Without a tokenizer there is no text, and stop strings are refused. A caller pushes the tokens whose text belongs
    to the answer, so not the EOS or stop id that ended it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise RequestError(
                f"stop={params.stop!r} needs text, but the checkpoint has no tokenizer: pass stop_token_ids"
            )
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params.skip_special_tokens)
        self._params = params
        self._matcher = _StopMatcher(params.stop)
        self._num_tokens = 0
        self._held = ""
        self._parts: list[str] = []
        self._stopped: str | None = None

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._parts)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain. After a stop string it returns nothing more."""
        if self._stopped is not None:
            return ""
        self._num_tokens += 1
        return self._take("" if self._detokenizer is None else self._detokenizer.push([token_id]))

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        if self._stopped is not None:
            return ""
        text = self._take("" if self._detokenizer is None else self._detokenizer.flush())
        if self._stopped is None:
            rest, self._held = self._held, ""
            self._parts.append(rest)
            text += rest
        return text

    def _take(self, text: str) -> str:
        """Appends `text` to what is held; returns the part of both that no stop string can claim."""
        whole = self._held + text
        end = len(whole)
        if self._params.stop:
            for place, char in enumerate(text, start=len(self._held) + 1):
                stop = self._matcher.step(char)
                if stop is not None and self._num_tokens >= self._params.min_tokens:
                    self._stopped = stop
                    end = place if self._params.include_stop else place - len(stop)
                    break
            else:
                end -= self._matcher.num_held
        certain, self._held = whole[:end], whole[end:]
        self._parts.append(certain)
        return certain
