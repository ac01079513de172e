"""What clients may send: OpenAI's fields that this server honours, and the extensions that inference servers share.

Kinds are checked here, ranges by `SamplingParams`. A field that is not listed is an error that names it, and so is a
value that would have to be ignored: an answer is what was asked for, or it is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from helix.engine.engine import Prompt
from helix.engine.sampling import SamplingParams, shown
from helix.server.errors import ApiError, bad_request

_MAX_CHOICES = 128
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions
_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)

Choices = Annotated[int, Field(ge=1, le=_MAX_CHOICES)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class JsonSchema(_Body):
    """A schema, and what people call it. It is always followed strictly."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    """Form of the text: free, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_text(self) -> str | None:
        """The JSON schema that the text must follow, None where it is free; raises `ApiError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise bad_request("response_format: json_schema must be given for type json_schema, and only there")
        if self.type == "json_object":
            return '{"type": "object"}'
        return None if self.json_schema is None else json.dumps(self.json_schema.schema_)


class _Generate(_Body):
    """What both kinds of generation share."""

    model: str | None = None
    n: Choices | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Rules over several fields; raises `ApiError`."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is for streamed answers: set stream to true", "stream_options")

    def sampling(self, index: int, num_prompt: int, max_context: int) -> SamplingParams:
        """Parameters of choice `index` for a prompt of `num_prompt` tokens; raises `RequestError`.

        With a seed, choice i takes ``seed + i``: the first choice is what n = 1 gives.
        """
        values = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            values["seed"] = self.seed + index if self.seed < 2**62 else self.seed - index
        if self.logit_bias:
            values["logit_bias"] = _bias(self.logit_bias)
        if self.include_stop_str_in_output is not None:
            values["include_stop"] = self.include_stop_str_in_output
        # Without a limit of its own, a generation may fill what is left of the context.
        own = {"max_tokens": max(max_context - num_prompt, 1)} | self.own_sampling()
        return SamplingParams(**values, **own)

    def own_sampling(self) -> dict[str, Any]:
        """The parameters that the two kinds spell differently."""
        raise TypeError(f"{type(self).__name__} generates nothing")


class CompletionRequest(_Generate):
    """Body of POST /v1/completions."""

    prompt: str | Annotated[list[Any], Field(description="strings, token ids, or lists of token ids")]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise bad_request(
                f"best_of={self.best_of} is not supported: must be equal to n={self.num_choices}, or left out"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs cannot be streamed: set stream to false", "echo")

    def prompts(self) -> list[Prompt]:
        """The prompts, told apart by the kind of the first element; the engine checks what is in them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("prompt=[] is empty: it must hold a prompt", "prompt")
        if not isinstance(self.prompt[0], (str, list)):
            return [self.prompt]
        for index, one in enumerate(self.prompt):
            if type(one) is not type(self.prompt[0]) or (isinstance(one, list) and one and isinstance(one[0], dict)):
                raise bad_request(
                    f"prompt[{index}]={shown(one)} is not legal: must be a string or a list of token ids, "
                    "as the first prompt is",
                    "prompt",
                )
        return list(self.prompt)

    def own_sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "max_tokens": _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        }
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo:
                values["prompt_logprobs"] = self.logprobs
        return values


class ChatRequest(_Generate):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request(
                f"max_completion_tokens={self.max_completion_tokens} and max_tokens={self.max_tokens} differ: give one"
            )

    def prompts(self) -> list[Prompt]:
        return [self.messages]

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def own_sampling(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        values: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None:
            values["json_schema"] = self.response_format.schema_text()
        return values


class TokenizeRequest(_Body):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def the_prompt(self) -> Prompt:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give prompt or messages, and not both", "prompt")
        return self.prompt if self.prompt is not None else (self.messages or [])


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise bad_request(f"logit_bias={{{shown(key)}: ...}} is not legal: keys must be token ids", "logit_bias")
    return {int(key): float(value) for key, value in bias.items()}


def explain(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a body, from pydantic's list of faults: the first field that is at fault, and how."""
    fault = faults[0]
    place = [part for part in fault["loc"] if part != "body"]
    field = next((part for part in place if isinstance(part, str)), None)
    if fault["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if field is None:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    name = ".".join(str(part) for part in place if part not in _UNION_TAGS)
    if fault["type"] == "extra_forbidden":
        return ApiError(
            400, f"{name}: unknown field; this server does not support it", param=name, code="unknown_field"
        )
    if fault["type"] == "missing":
        return ApiError(400, f"{name}: the field is missing", param=name, code="missing_field")
    message = str(fault["msg"]).removeprefix("Input ").strip()
    return ApiError(400, f"{name}={shown(fault['input'])} is not legal: {message}", param=name, code="invalid_value")


_UNION_TAGS = ("str", "list[str]", "list[any]", "literal['']", "int", "float")
