"""`SamplingParams`: what is accepted, what is refused and in which words, and the way over the wire."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helix.engine.sampling import SamplingParams
from helix.errors import RequestError

LEGAL: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(50, 2**31 - 1),
    "temperature": st.floats(0, 1e6),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 1e300, exclude_min=True),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.integers(-2, 2),
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4),
    "include_stop": st.booleans(),
    "min_tokens": st.integers(0, 50),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    "skip_special_tokens": st.booleans(),
}

ILLEGAL: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens=0 is not legal: must be an integer from 1 to 2147483647"),
    ("max_tokens", "8", "max_tokens='8'"),
    ("max_tokens", True, "max_tokens=True"),
    ("max_tokens", 2.0, "max_tokens=2.0"),
    ("max_tokens", None, "max_tokens=None"),
    ("max_tokens", 2**31, "max_tokens=2147483648"),
    ("max_tokens", 10**5000, "max_tokens=(int too large to print)"),
    ("temperature", -1, "temperature=-1 is not legal: must be a finite number of at least 0"),
    ("temperature", float("nan"), "temperature=nan"),
    ("temperature", float("inf"), "temperature=inf"),
    ("temperature", "0.7", "temperature='0.7'"),
    ("temperature", True, "temperature=True"),
    ("temperature", 10**400, "temperature=1000"),
    ("top_k", -2, "top_k=-2"),
    ("top_p", 0.0, "top_p=0.0 is not legal: must be a number above 0 and up to 1"),
    ("top_p", 1.01, "top_p=1.01"),
    ("min_p", -0.1, "min_p=-0.1"),
    ("min_p", 1.1, "min_p=1.1"),
    ("repetition_penalty", 0, "repetition_penalty=0"),
    ("repetition_penalty", float("inf"), "repetition_penalty=inf"),
    ("presence_penalty", 2.5, "presence_penalty=2.5 is not legal: must be a number from -2 to 2"),
    ("frequency_penalty", -2.5, "frequency_penalty=-2.5"),
    ("seed", 2**63, "seed=9223372036854775808"),
    ("seed", 1.5, "seed=1.5"),
    ("stop", "", "stop='' is not legal: must be a non-empty string"),
    ("stop", ["a", ""], "stop=['a', '']"),
    ("stop", ["a", 3], "stop=3"),
    ("stop", 3, "stop=3"),
    ("stop", "\ud800", "stop="),
    ("stop_token_ids", [-1], "stop_token_ids=[-1]"),
    ("stop_token_ids", [True], "stop_token_ids=True"),
    ("stop_token_ids", 7, "stop_token_ids=7"),
    ("include_stop", 1, "include_stop=1 is not legal: must be True or False"),
    ("min_tokens", -1, "min_tokens=-1"),
    ("min_tokens", 129, "min_tokens=129 is more than max_tokens=128"),
    ("logprobs", 21, "logprobs=21 is not legal: must be an integer from 0 to 20, or None"),
    ("logprobs", True, "logprobs=True"),
    ("prompt_logprobs", -1, "prompt_logprobs=-1"),
    ("json_schema", "", "json_schema='' is not legal: must be the text of a JSON schema"),
    ("json_schema", {}, "json_schema={}"),
    ("logit_bias", {5: 101}, "logit_bias={5: 101} is not legal: must be a mapping of token ids"),
    ("logit_bias", {5: float("nan")}, "logit_bias=nan"),
    ("logit_bias", {-5: 1.0}, "logit_bias={-5: 1.0}"),
    ("logit_bias", {"5": 1.0}, "logit_bias='5'"),
    ("logit_bias", [(5, 1.0), (5, 2.0)], "logit_bias="),
    ("logit_bias", "5:1", "logit_bias='5:1'"),
]


@given(values=st.fixed_dictionaries({}, optional=LEGAL))
def test_wire_round_trip(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    wire = msgpack.unpackb(msgpack.packb(params.to_wire()))
    assert SamplingParams.from_wire(wire) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(**values))


@pytest.mark.parametrize(("field", "value", "words"), ILLEGAL, ids=[words[:30] for _, _, words in ILLEGAL])
def test_illegal_value_names_field_value_and_range(field: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_json_schema_decides_where_the_text_ends() -> None:
    params = SamplingParams(json_schema="{}")
    assert SamplingParams.from_wire(params.to_wire()) == params
    for other in ({"ignore_eos": True}, {"min_tokens": 1}):
        with pytest.raises(RequestError, match="json_schema ends the text"):
            SamplingParams(json_schema="{}", **other)


def test_defaults_cost_nothing_on_the_wire() -> None:
    assert SamplingParams().to_wire() == {}


def test_every_field_is_covered_here() -> None:
    assert (
        set(LEGAL) | {"json_schema"}
        == set(SamplingParams.model_fields)
        == {field for field, _, _ in ILLEGAL} | {"ignore_eos"} | {"skip_special_tokens"}
    )
    assert all(info.description for info in SamplingParams.model_fields.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temprature", "unknown sampling parameter 'temprature': did you mean 'temperature'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("zzzz", "unknown sampling parameter 'zzzz': known are max_tokens, temperature"),
    ],
)
def test_unknown_keyword_gets_the_nearest_name(name: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: 1})
    assert words in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RequestError, match=r"^max_tokens=0 is .*; top_p=2 is .*; unknown sampling parameter 'tp'"):
        SamplingParams(top_p=2, max_tokens=0, tp=1)


def test_values_are_stored_in_one_form() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 1], logit_bias={9: 1, 2: -3.5}, temperature=1)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == ((2, -3.5), (9, 1.0))
    assert isinstance(params.temperature, float)


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(ValidationError):
        SamplingParams().seed = 3
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[call-arg]


def test_vocabulary_is_checked_on_request() -> None:
    params = SamplingParams(stop_token_ids=[99], logit_bias={7: 1.0})
    params.check_vocab(100)
    with pytest.raises(RequestError, match="stop_token_ids names token id 99: must be below the vocabulary size 99"):
        params.check_vocab(99)
    with pytest.raises(RequestError, match="logit_bias names token id 7: must be below the vocabulary size 5"):
        SamplingParams(logit_bias={7: 1.0}).check_vocab(5)
