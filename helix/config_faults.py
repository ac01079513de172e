"""What is wrong with a setting's value, in words that tell what to do. Knows JSON schemas, and no setting by name."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

_MAX_SHOWN: Final = 80  # characters of a wrong value that a message repeats
_KIND_WORDS: Final[Mapping[str, str]] = {"string": "text", "boolean": "true or false", "null": "null"}
_UNITS: Final[Mapping[str, int]] = {"K": 1 << 10, "M": 1 << 20}


def token_count(value: object) -> object:
    """``128K`` -> 131072, ``1M`` -> 1048576; anything else unchanged."""
    match = re.fullmatch(r"([0-9]{1,12})([KM])", value, re.IGNORECASE) if isinstance(value, str) else None
    return int(match[1]) * _UNITS[match[2].upper()] if match else value


def origin_of(name: str, *, overridden: bool = False) -> str:
    """How messages name the file, or the key, that settings come from."""
    return (name if name and name.isprintable() else show(name)) + (" with overrides" if overridden else "")


def explain(value: object, schema: Mapping[str, Any]) -> str:
    """What is wrong with `value` for a field of this JSON schema, and what the field takes."""
    options = schema.get("anyOf", [schema])
    choices = [c for o in options for c in o.get("enum", [o["const"]] if "const" in o else [])]
    number = next((o for o in options if o["type"] in ("integer", "number")), None)
    kinds = {o["type"] for o in options if "enum" not in o and "const" not in o}
    takes = [*choices, *([_number_range(number)] if number else [])]
    takes += [word for kind, word in _KIND_WORDS.items() if kind in kinds]
    expected = " or ".join(part for part in (", ".join(takes[:-1]), takes[-1]) if part)
    note = f", {schema['description']}" if "description" in schema else ""
    shown = "the value" if schema.get("writeOnly") else show(value)
    return f"{shown} {fault_of(value, choices, number, kinds)} (expected {expected}{note})"


def _number_range(number: Mapping[str, Any]) -> str:
    kind = "a whole number" if number["type"] == "integer" else "a number"
    if "exclusiveMinimum" in number:
        return f"{kind} above {number['exclusiveMinimum']} and at most {number['maximum']}"
    return f"{kind} from {number['minimum']} to {number['maximum']}"


def fault_of(value: object, choices: Sequence[str], number: Mapping[str, Any] | None, kinds: set[str]) -> str:
    if value is None:
        return "is no value; leave the key out for its default"
    if isinstance(value, bool):
        return f"is {kind_of(value)}, as YAML reads on, off, yes and no too"
    if isinstance(value, str):
        return _text_fault(value, choices, number, kinds)
    if isinstance(value, (int, float)) and number:
        if isinstance(value, float) and not math.isfinite(value):
            return "is not a finite number"
        if isinstance(value, float) and number["type"] == "integer":
            return "is not a whole number" + (f": write {int(value)}" if value.is_integer() else "")
        return "is out of range"
    quotes = "string" in kinds and not isinstance(value, (Mapping, list, tuple))
    return f"is {kind_of(value)}" + (": put it in quotes" if quotes else "")


def _text_fault(value: str, choices: Sequence[str], number: Mapping[str, Any] | None, kinds: set[str]) -> str:
    meant = _number_in(value) if number else None
    if number and meant is not None and (number["type"] == "number" or isinstance(meant, int)):
        if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", value):
            return f"is text, not a number: write {meant} without quotes"
        return f"is text, not a number (YAML reads {value} as text): write {meant}"
    if "boolean" in kinds and value.lower() in ("true", "false"):
        return f"is text: write {value.lower()} without quotes"
    if "string" in kinds:
        return "is not valid Unicode" if value else "is empty"
    near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    if near:
        return f"is not known, did you mean {near[0]}?"
    return "is not known" if choices else "is text"


def _number_in(text: str) -> int | float | None:
    """The number a person meant by `text` (``8``, ``1e6``, ``128K``), whole where it can be."""
    count = token_count(text)
    if isinstance(count, int):
        return count
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    if not re.fullmatch(r"[-+]?[0-9]{1,18}(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?", text):
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def kind_of(value: object) -> str:
    names = ((bool, "a yes/no value"), (str, "text"), (int, "a number"), (float, "a number"), (Mapping, "a mapping"))
    known = next((name for kind, name in names if isinstance(value, kind)), None)
    return known or ("a list" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}")


def show(value: object) -> str:
    """`value` as YAML would write it, short and on one line."""
    if isinstance(value, str):
        text = json.dumps(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "...", ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # an int of more digits than Python agrees to print
        return "the value"
