"""Reading YAML text: plain values and no code, and a clear error for what YAML takes in silence and nobody means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from helix.config_faults import origin_of
from helix.errors import ConfigError

_MAX_FILE_BYTES: Final = 1 << 20  # a larger "config" is a weight file or a device, and must not be read whole
_NUMBER_TAGS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_yaml(name: str) -> object:
    """The document in the YAML file `name`: plain values, None for an empty file. Raises `ConfigError`."""
    origin = origin_of(name)
    try:
        with Path(name).open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{origin}: there is no such file{_near_files(name)}") from error
    except IsADirectoryError as error:
        hint = "a checkpoint directory goes into model.path, or model=... in Python"
        raise ConfigError(f"{origin}: is a directory, not a YAML file; {hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{origin}: is larger than {_MAX_FILE_BYTES} bytes, so it is not a config file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{origin}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text") from error
    return parse_yaml(text, origin)


def parse_yaml(text: str, origin: str) -> object:
    """The one document in `text` through PyYAML's safe loader, which builds plain values and runs no code."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        traps = _yaml_traps(root)
        if traps:
            raise ConfigError("\n".join(f"{origin}, {trap}" for trap in traps))
        return None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{origin}, {_syntax_problem(text, error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not a text file: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML lets its own conversions fail like this, for instance on the date 2024-13-45 or on `!!bool maybe`.
        raise ConfigError(f"{origin}: a value cannot be read ({error}); put it in quotes if it is text") from error


def _yaml_traps(root: yaml.Node | None) -> list[str]:
    """What YAML takes in silence and nobody means: a key given twice, numbers such as ``010`` (8) and ``1:30`` (90)."""
    traps: list[tuple[int, str]] = []
    todo, seen = [root] if root else [], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            todo += [one for pair in node.value for one in pair]
            traps += _duplicate_keys(node)
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif node.tag in _NUMBER_TAGS and re.match(r"[-+]?(0[0-9_]+$|[0-9_]+:)", node.value):
            text = "YAML reads this number in base 8 or 60; write it in base 10, or in quotes if it is text"
            traps.append(_at(node.start_mark, text))
    return [text for _, text in sorted(traps)]


def _duplicate_keys(node: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    first_line: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = (key.tag, key.value)
        if name in first_line:
            yield _at(key.start_mark, f"duplicate key {key.value}, already set on line {first_line[name]}")
        else:
            first_line[name] = key.start_mark.line + 1


def _at(mark: yaml.Mark, text: str) -> tuple[int, str]:
    return mark.index, f"line {mark.line + 1}, column {mark.column + 1}: {text}"


def _syntax_problem(text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return problem
    before = text[: mark.index].rpartition("\n")[2]
    indent = before[: len(before) - len(before.lstrip())]
    if "\t" in indent or text[mark.index : mark.index + 1] == "\t":
        problem = "a tab character; YAML wants spaces here"
    return _at(mark, problem)[1]


def _near_files(name: str) -> str:
    path = Path(name)
    directory = "the current directory" if path.parent == Path() else str(path.parent)
    try:
        present = sorted(one.name for one in path.parent.iterdir() if one.name.isprintable())
    except OSError:
        return f", nor a directory {directory}"
    near = difflib.get_close_matches(path.name, present, n=3, cutoff=0.5)
    near = near or [one for one in present if one.endswith((".yaml", ".yml"))][:5]
    return f"; in {directory}: {', '.join(near)}" if near else ""
