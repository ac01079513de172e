"""Prompts to ids and ids to text: tokenizers built here, and the demo model's own where it was fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helix.engine.sampling import SamplingParams
from helix.engine.text import Detokenizer, TextStream, encode_prompt, load_tokenizer
from helix.errors import CheckpointError, RequestError

REAL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
TEXTS = [
    "Hello, world! It's a test -- don't  worry.",
    " leading and trailing ",
    "emoji 😀😃🎉 and a family 👩‍👩‍👧‍👦, flags 🇫🇷🇯🇵, skin 👍🏽",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "combining: e\u0301 n\u0303 क्षि ไทย ạ̈",
    "mixed éàü ß → ∀x∈ℝ \u200d\u200b\ufeff",
    "a real replacement: \ufffd and \ufffd\ufffd.",
    "\n\n\ttabs\r\n",
    "\U0001f9d1\U0001f3fd\u200d\U0001f680" * 5,
]
BYTE_ZERO = 3
"""Id of the first byte token of `byte_fallback`."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}{% if m.tool_calls %}[call]{% endif %}</s>{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE without word borders, so that merges run across the bytes of neighbouring characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    core.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: sentencepiece BPE, unknown characters as byte tokens, one leading space lost in decoding."""
    words = ["▁", "▁▁", "�", *"abcdehlorw ,.!'", "▁h", "▁w", "he", "lo", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    merges = [("▁", "▁"), ("▁", "h"), ("▁", "w"), ("h", "e"), ("l", "o"), ("▁", "a")]
    core = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "▁", "▁he", "llo", "▁wor", "ld", *"abcdehlorw!"]
    core = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@cache
def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "hello", "wor", "##ld", "a", "##b", "!", "'", "##s"]
    core = Tokenizer(models.WordPiece({t: i for i, t in enumerate(pieces)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


def chat_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_ZERO + byte for byte in data]


def stream(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


# --- Detokenizer ---


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_character_by_character(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(deadline=None)
@given(text=st.text())
@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, word_piece])
def test_any_text(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("make", [byte_level, metaspace, word_piece])
def test_any_ids(make: Any, data: st.DataObject, skip: bool) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=40))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=40))
def test_any_bytes_byte_level(data: bytes) -> None:
    pieces = stream(byte_level(), [letter_ids()[byte] for byte in data])
    assert "".join(pieces) == data.decode("utf-8", "replace")


@cache
def letter_ids() -> list[int]:
    """The id of `byte_level` that stands for each byte (GPT-2's table of letters)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(table.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [byte_level().convert_tokens_to_ids(table[byte]) for byte in range(256)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["é", "€", "😀", "a"]).map(lambda text: [BYTE_ZERO + byte for byte in text.encode()])
        | st.lists(st.integers(BYTE_ZERO, BYTE_ZERO + 255), max_size=2)
        | st.sampled_from([0, 1, 2, *range(259, 290)]).map(lambda token_id: [token_id]),
        max_size=12,
    )
)
def test_any_ids_with_byte_fallback(parts: list[list[int]]) -> None:
    tokenizer = byte_fallback()
    ids = [token_id for part in parts for token_id in part]
    pieces = stream(tokenizer, ids)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.flush() == "".join(pieces)
    assume("\ufffd" not in text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_complete_characters_stay_when_a_byte_run_breaks() -> None:
    ids = [*byte_ids("é".encode()), *byte_ids(b"\xff"), *byte_fallback().encode("a", add_special_tokens=False)]
    assert byte_fallback().decode(ids) == "\ufffd\ufffd\ufffd a"
    assert stream(byte_fallback(), ids) == ["", "é", "", "\ufffd a", ""]


def test_a_character_waits_for_its_last_byte_and_flush_gives_the_cut_one() -> None:
    ids = byte_ids("a😀".encode())
    assert stream(byte_fallback(), ids) == ["a", "", "", "", "😀", ""]
    assert stream(byte_fallback(), ids[:-1]) == ["a", "", "", "", "\ufffd\ufffd\ufffd"]
    ids = letters("a😀")
    assert stream(byte_level(), ids) == ["a", "", "", "", "😀", ""]
    assert stream(byte_level(), ids[:-1]) == ["a", "", "", "", "\ufffd"]


def test_leading_space_is_lost_once() -> None:
    tokenizer = byte_fallback()
    space, he = tokenizer.convert_tokens_to_ids(["▁", "▁h"])
    assert stream(tokenizer, [he, he]) == ["h", " h", ""]
    assert "".join(stream(tokenizer, [space, he])) == tokenizer.decode([space, he]) == " h"
    assert "".join(stream(tokenizer, [1, space, 1, he])) == " h"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [0, *byte_level().encode("hi", add_special_tokens=False), 1]
    assert "".join(stream(byte_level(), ids)) == "hi"
    assert "".join(stream(byte_level(), ids, skip=False)) == "<s>hi</s>"


def test_flush_begins_a_new_sequence() -> None:
    detokenizer = Detokenizer(byte_fallback())
    for _ in range(2):
        assert detokenizer.push(byte_fallback().encode("he", add_special_tokens=False)) == "he"
        assert detokenizer.push(byte_ids(b"\xe2")) == ""
        assert detokenizer.flush() == "\ufffd"


class Counting:
    """A tokenizer that notes how many ids each decoding takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.sizes = tokenizer, list[int]()

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.sizes.append(len(ids))
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@pytest.mark.parametrize(
    "ids",
    [
        byte_level().encode("日本語のテキスト hello " * 60, add_special_tokens=False),
        byte_ids("日本語のテ".encode() * 40),
        byte_ids(b"\xe2\x82" * 300),
        [1] * 600,
        [*byte_fallback().encode("a"), *[2] * 600],
        byte_fallback().convert_tokens_to_ids(["�"]) * 600,
    ],
    ids=["text", "byte run", "broken bytes", "specials", "specials after text", "replacement characters"],
)
def test_cost_of_a_token_does_not_grow(ids: list[int]) -> None:
    tokenizer = byte_level() if max(ids) > 300 else byte_fallback()
    counting = Counting(tokenizer)
    pieces = stream(counting, ids)
    assert max(counting.sizes) <= 24
    assert len(counting.sizes) <= 3 * len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


# --- TextStream ---


def run(ids: Sequence[int], tokenizer: Any = None, **values: Any) -> tuple[list[str], TextStream]:
    made = TextStream(tokenizer or byte_level(), SamplingParams(**values))
    pieces = [*(made.push(token_id) for token_id in ids), made.finish()]
    assert "".join(pieces) == made.text
    return pieces, made


def letters(text: str) -> list[int]:
    """Ids of `byte_level`, one for each byte."""
    return [letter_ids()[byte] for byte in text.encode()]


def test_stop_string_over_token_borders() -> None:
    pieces, made = run(letters("one STOP two"), stop="STOP")
    assert pieces == ["o", "n", "e", " ", "", "", "", "", "", "", "", "", ""]
    assert (made.text, made.stopped) == ("one ", "STOP")
    _, made = run(letters("one STOP two"), stop="STOP", include_stop=True)
    assert (made.text, made.stopped) == ("one STOP", "STOP")


def test_held_text_is_given_back() -> None:
    pieces, made = run(letters("STOSTOx"), stop="STOP")
    assert pieces == ["", "", "", "STO", "", "", "STOx", ""]
    pieces, made = run(letters("aST"), stop="STOP")
    assert pieces == ["a", "", "", "ST"]
    assert made.stopped is None


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(letters("say hello world"), stop=["world", "hello"])[1].text == "say "
    assert run(letters("xabcd"), stop=["abcd", "bc"])[1].text == "xa"
    assert run(letters("xabc"), stop=["bc", "abc"])[1].stopped == "abc"
    assert run(letters("aab"), stop="ab")[1].text == "a"


def test_stop_inside_a_cut_character_is_found_at_the_end() -> None:
    _, made = run(byte_ids("aé".encode())[:-1], byte_fallback(), stop="a\ufffd")
    assert (made.text, made.stopped) == ("", "a\ufffd")


def test_min_tokens_lets_early_stop_strings_through() -> None:
    assert run(letters("ab ab ab"), stop="ab", min_tokens=3)[1].text == "ab "
    assert run(letters("abcd"), stop="abc", min_tokens=3)[1].text == ""
    assert run(letters("abcd"), stop="abc", min_tokens=4)[1].stopped is None


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """End and stop string of the match that is complete first, by trying every end."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@settings(deadline=None, max_examples=300)
@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", "aab", "é", "😀", " "]), max_size=25),
    stops=st.lists(st.text("ab é", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_streamed_equals_unstreamed(words: list[str], stops: list[str], include: bool) -> None:
    text = "".join(words)
    hit = first_stop(text, stops)
    expected = text if hit is None else text[: hit[0] if include else hit[0] - len(hit[1])]
    for ids in (letters(text), byte_level().encode(text, add_special_tokens=False)):
        made = TextStream(byte_level(), SamplingParams(stop=stops, include_stop=include))
        sent = ""
        for num_pushed, token_id in enumerate(ids, start=1):
            sent += made.push(token_id)
            assert expected.startswith(sent)
            if made.stopped is None:
                # Nothing waits that no stop string can claim.
                seen = byte_level().decode(ids[:num_pushed]).rstrip("\ufffd")
                assert len(seen) - len(sent) < max(map(len, stops), default=1)
        sent += made.finish()
        assert (sent, made.text) == (expected, expected)
        assert made.stopped == (None if hit is None else hit[1])
        assert made.finish() == ""


def test_long_hostile_stop_string_costs_no_more() -> None:
    pieces, made = run(letters("a") * 3000, stop="a" * 200_000 + "b")
    assert made.text == "a" * 3000
    assert pieces[-1] == made.text


def test_without_tokenizer_there_is_no_text() -> None:
    made = TextStream(None, SamplingParams())
    assert (made.push(3), made.finish(), made.text, made.stopped) == ("", "", "", None)
    with pytest.raises(RequestError, match=r"stop=\('x',\) needs text.*pass stop_token_ids"):
        TextStream(None, SamplingParams(stop="x"))


# --- encode_prompt ---


def test_text_prompt_is_encoded_as_the_tokenizer_does() -> None:
    text = "hello 😀"
    assert encode_prompt(byte_level(), text, 1000) == byte_level().encode(text)


def test_token_ids_are_taken_as_they_are() -> None:
    assert encode_prompt(None, [0, 5, 9], 10) == [0, 5, 9]
    assert encode_prompt(None, (3,), 10) == [3]
    found = encode_prompt(None, np.array([1, 2]), 10)  # type: ignore[arg-type]
    assert (found, {type(i) for i in found}) == ([1, 2], {int})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 10, 2], r"prompt\[1\] is token id 10: must be from 0 to 9, as the model's vocabulary size is 10"),
        ([-1], r"prompt\[0\] is token id -1"),
        ([3, 10**5000], r"prompt\[1\] is token id \(int too large to print\)"),
        ([True], r"prompt\[0\] is of type bool"),
        ([1, 2.0], r"prompt\[1\] is of type float"),
        (["a", "b"], r"prompt\[0\] is of type str"),
        ([1, {"role": "user", "content": "x"}], r"prompt\[1\] is of type dict"),
        (b"bytes", "of type bytes: must be a string, a list of token ids"),
        ({"role": "user", "content": "x"}, "of type dict"),
        (7, "of type int"),
        ("text", "no tokenizer: pass token ids"),
        ([{"role": "user", "content": "x"}], "no tokenizer: pass token ids"),
    ],
)
def test_illegal_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        encode_prompt(None, prompt, 10)


def test_tokenizer_with_more_tokens_than_the_model() -> None:
    with pytest.raises(RequestError, match=r"prompt\[\d\] is token id \d+: must be from 0 to 9"):
        encode_prompt(byte_level(), "hello", 10)


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair at character 2"):
        encode_prompt(byte_level(), "ab\ud83d", 1000)


def chat(messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    tokenizer = chat_tokenizer()
    text = tokenizer.decode(encode_prompt(tokenizer, messages, 1000, **values))
    assert isinstance(text, str)
    return text


def test_chat_goes_through_the_template() -> None:
    messages: list[Mapping[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    found = chat(messages, tools=[{"type": "function"}])
    assert found.startswith("<s>system: be brief</s><s>user: ab</s><s>assistant: ")
    assert found.endswith("[call]</s>1 tools<s>assistant: ")
    # The template writes the special tokens; the tokenizer adds none of its own.
    assert encode_prompt(chat_tokenizer(), [{"role": "user", "content": "x"}], 1000).count(0) == 2


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[1\] has no role: must be one of system, developer, user, assistant, tool"),
        ({"role": "robot", "content": "x"}, r"messages\[1\] has role 'robot': must be one of"),
        ({"role": ["user"], "content": "x"}, r"messages\[1\] has role \['user'\]"),
        ({"role": "user"}, r"messages\[1\] has no content"),
        ({"role": "user", "content": None}, r"messages\[1\]\.content is of type NoneType"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content is of type int"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content\[0\] is no text part"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[1\]\.content\[0\] is no text part"),
        ({"role": "user", "content": "\ud800"}, r"messages\[1\]\.content holds half of a surrogate pair"),
        ({"role": "tool", "content": "x"}, "chat template refuses the messages: tools are not for me"),
        ("text", r"messages\[1\] is of type str: must be a mapping"),
    ],
)
def test_illegal_message(message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat([{"role": "user", "content": "fine"}, message])


def test_chat_without_template() -> None:
    with pytest.raises(RequestError, match="no chat template: pass text or token ids"):
        encode_prompt(byte_level(), [{"role": "user", "content": "x"}], 1000)


# --- load_tokenizer ---


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_load(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert encode_prompt(tokenizer, "hello", 1000) == byte_level().encode("hello")
    assert tokenizer.chat_template == TEMPLATE
    assert not tokenizer.clean_up_tokenization_spaces


def test_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path) is None


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b'{"version": "1.', b"[]", b"\xff\xfe"])
def test_broken_file_is_named(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is broken"):
        load_tokenizer(checkpoint)


def test_valid_json_that_is_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"no tokenizer can be made from .*tokenizer\.json"):
        load_tokenizer(checkpoint)


def test_half_a_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has no vocabulary beside it"):
        load_tokenizer(checkpoint)


def test_code_of_a_checkpoint_is_not_run(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "Custom",
        "auto_map": {"AutoTokenizer": ["custom.Custom", "custom.Custom"]},
    }
    path.write_text(json.dumps(config))
    (checkpoint / "custom.py").write_text("raise SystemExit('code of the checkpoint ran')")
    with pytest.raises(CheckpointError, match="custom code"):
        load_tokenizer(checkpoint)


# --- the real thing ---


@cache
def real() -> Any:
    if not (REAL / "tokenizer.json").is_file():
        pytest.skip("the demo model is not here: launch/demo.sh fetches it")
    return load_tokenizer(REAL)


@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer_streams_what_it_decodes(text: str) -> None:
    ids = encode_prompt(real(), text, len(real()))
    assert "".join(stream(real(), ids)) == real().decode(ids, skip_special_tokens=True) == text


@settings(deadline=None)
@given(data=st.data())
def test_real_tokenizer_any_ids(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(real()) - 1), max_size=30))
    assert "".join(stream(real(), ids)) == real().decode(ids, skip_special_tokens=True)


def test_real_chat() -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = encode_prompt(real(), messages, len(real()))
    plain = AutoTokenizer.from_pretrained(REAL)
    assert ids == plain.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert real().decode(ids).endswith("<|im_start|>assistant\n")
