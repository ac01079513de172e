"""`SamplingParams`: what one request asks of the sampler and of its text, checked when it is made.

A frozen value. The server, the command line and `Engine.generate` build it; the sampler, the scheduler and the text
stream read it; `to_wire` and `from_wire` carry it between ranks.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from helix.errors import RequestError

_MAX_COUNT = 2**31 - 1
_MAX_SEED = 2**63 - 1
_MAX_ALTERNATIVES = 20
_ID_RANGE = f"integers from 0 to {_MAX_COUNT}"


def _as_tuple(value: object) -> object:
    """Sequences but strings become tuples (lists of JSON and msgpack); anything else is left for the type check."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen and where they end. Keyword arguments only; strict types.

    The logits of a token are changed in this order: `logit_bias`, `repetition_penalty` (tokens of prompt and output),
    `presence_penalty` and `frequency_penalty` (output), EOS and stop ids masked before `min_tokens`; then
    `temperature`, `top_k`, `top_p`, `min_p`. `temperature=0` takes the best token and needs no filter.
    `logprobs` and `prompt_logprobs` count the alternatives listed beside each token's own log-probability, which is
    the model's own, before any of these changes. `stop` also takes one string, `logit_bias` a mapping.
    With `json_schema` only tokens that keep the text a beginning of such JSON can be chosen.

    A wrong value, a wrong type or an unknown keyword raises `RequestError`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int = Field(default=128, ge=1, le=_MAX_COUNT, description=f"an integer from 1 to {_MAX_COUNT}")
    temperature: float = Field(default=1.0, ge=0.0, description="a finite number of at least 0 (0 is greedy)")
    top_k: int = Field(
        default=0, ge=-1, le=_MAX_COUNT, description=f"an integer from 1 to {_MAX_COUNT}, or 0 or -1 for off"
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="a number above 0 and up to 1 (1 is off)")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, description="a number from 0 to 1 (0 is off)")
    repetition_penalty: float = Field(default=1.0, gt=0.0, description="a finite number above 0 (1 is off)")
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, description="a number from -2 to 2 (0 is off)")
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, description="a number from -2 to 2 (0 is off)")
    seed: int | None = Field(default=None, ge=-_MAX_SEED - 1, le=_MAX_SEED, description="a 64-bit integer or None")
    stop: tuple[str, ...] = Field(default=(), description="a non-empty string of valid Unicode, or a sequence of them")
    stop_token_ids: tuple[int, ...] = Field(default=(), description=f"a sequence of token ids ({_ID_RANGE})")
    include_stop: bool = Field(default=False, description="True or False")
    min_tokens: int = Field(default=0, ge=0, le=_MAX_COUNT, description="an integer from 0 to max_tokens")
    ignore_eos: bool = Field(default=False, description="True or False")
    logprobs: int | None = Field(
        default=None, ge=0, le=_MAX_ALTERNATIVES, description=f"an integer from 0 to {_MAX_ALTERNATIVES}, or None"
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=_MAX_ALTERNATIVES, description=f"an integer from 0 to {_MAX_ALTERNATIVES}, or None"
    )
    logit_bias: tuple[tuple[int, float], ...] = Field(
        default=(), description=f"a mapping of token ids ({_ID_RANGE}) to numbers from -100 to 100"
    )
    skip_special_tokens: bool = Field(default=True, description="True or False")
    json_schema: str | None = Field(default=None, min_length=1, description="the text of a JSON schema, or None")

    def __init__(self, **values: Any) -> None:
        """Checks every value; all faults are told in one `RequestError`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise RequestError(_explain(error)) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_stop(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else _as_tuple(value)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text or any("\ud800" <= char <= "\udfff" for char in text):
                raise PydanticCustomError("stop", "illegal stop string")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _accept_stop_ids(cls, value: object) -> object:
        return _as_tuple(value)

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_ids(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        _check_ids(value)
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _accept_bias(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return tuple(value.items())
        pairs = _as_tuple(value)
        return tuple(_as_tuple(pair) for pair in pairs) if isinstance(pairs, tuple) else pairs

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(not -100.0 <= bias <= 100.0 for _, bias in value) or len(dict(value)) != len(value):
            raise PydanticCustomError("logit_bias", "illegal bias")
        _check_ids(token_id for token_id, _ in value)
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _check_json_schema(self) -> Self:
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise PydanticCustomError(
                "json_schema",
                "json_schema ends the text where its JSON is complete: leave out ignore_eos and min_tokens",
            )
        return self

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise PydanticCustomError(
                "min_tokens",
                "min_tokens={low} is more than max_tokens={high}: min_tokens must be an integer from 0 to max_tokens",
                {"low": self.min_tokens, "high": self.max_tokens},
            )
        return self

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `RequestError` where `stop_token_ids` or `logit_bias` name a token the model does not have."""
        for field, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias)),
        ):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{field} names token id {token_id}: must be below the vocabulary size {vocab_size}"
                    )

    def to_wire(self) -> dict[str, Any]:
        """Plain values (numbers, strings, lists) of the fields that differ from their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The value that `to_wire` was called on; `wire` is checked as keyword arguments are."""
        return cls(**wire)


def _check_ids(token_ids: Iterable[int]) -> None:
    """All ids must be in the range that any vocabulary could have."""
    if any(not 0 <= token_id <= _MAX_COUNT for token_id in token_ids):
        raise PydanticCustomError("token_id", "illegal token id")


def _explain(error: ValidationError) -> str:
    """One sentence per wrong field: its name, its value, what would be legal."""
    sentences: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        if not fault["loc"]:
            sentences.setdefault("", fault["msg"])
            continue
        field = str(fault["loc"][0])
        sentences.setdefault(field, _sentence(field, fault["input"]))
    return "; ".join(sentences.values())


def _sentence(field: str, value: object) -> str:
    fields = SamplingParams.model_fields
    if field in fields:
        return f"{field}={shown(value)} is not legal: must be {fields[field].description}"
    near = difflib.get_close_matches(field, fields, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
    return f"unknown sampling parameter {field!r}: {hint}"


def shown(value: object) -> str:
    """`value` as a message shows it: its repr, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python refuses to print an integer of thousands of digits.
        return f"({type(value).__name__} too large to print)"
