"""Answers a file of prompts: one JSON value a line in, one JSON object a line out, each line answered exactly once.

A line of the input is a string, or an object with `prompt` (text or token ids) or `messages` (with `tools`), an `id` of
its own, and any field of `SamplingParams`. Answers are appended as they are finished, so their order is not that of the
input: `line` (from 1) and `id` say whose they are. What is wrong with one line is that line's answer, under `error`.

A run that was ended at any moment, by SIGKILL or by the loss of power, is gone on with by the same command: an answer
is one write that reached the disk or did not, a last line that is cut off is removed, and lines that have an answer
are skipped. Each answer carries a digest of its line and of the settings, so that it is never taken for another's.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from helix.engine.engine import Engine, Prompt
from helix.engine.generation import Generation
from helix.engine.sampling import SamplingParams
from helix.errors import ConfigError, RequestError

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input: its number, from 1, and its bytes without the line break."""

    number: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all lines: parameters that a line may override, and whether text is continued as it is
    (`raw`) or answered as a chat message, where the checkpoint knows chats."""

    params: SamplingParams
    raw: bool

    def digest(self, line: Line) -> str:
        """16 hex digits that tell one line under one setting from all others."""
        state = blake2b(json.dumps([self.params.to_wire(), self.raw]).encode(), digest_size=8)
        state.update(b"\n" + line.content)
        return state.hexdigest()


@dataclass(slots=True)
class Counts:
    """Lines of the input by what became of them, and the tokens that were generated in this run."""

    num_lines: int = 0
    num_before: int = 0
    num_answered: int = 0
    num_errors: int = 0
    num_tokens: int = 0


class Answers:
    """The output file. Opening it locks it, repairs its end and reads what is answered already.

    Raises
    ------
    ConfigError
        It cannot be written, another process writes to it, or a line in it is no answer of this program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[int, str] = {}
        try:
            self._file = path.open("ab+")
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _cut_partial_line(self._file)
            self._read()
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"--output {path} is being written by another process; wait for it to end") from error
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        for number, content in enumerate(self._file, 1):
            try:
                answer = json.loads(content)
                self.digests[answer["line"]] = answer["digest"]
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"--output {self.path}, line {number} is no answer of helix generate; give another file"
                ) from error

    def write(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append `answers`; they are on the disk when this returns."""
        if answers:
            lines = (json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n" for one in answers)
            self._file.write("".join(lines).encode("utf-8", "backslashreplace"))
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_partial_line(file: BinaryIO) -> None:
    """Remove what stands behind the last line break: an answer that was not written to its end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(end - _TAIL_BYTES, 0)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        end = start + at + 1 if at >= 0 else start
        if at >= 0:
            break
    file.truncate(end)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of the input that are not empty. Raises `ConfigError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, 1):
                stripped = content.strip()
                if stripped:
                    yield Line(number, stripped)
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error


def check_answers(path: Path, answers: Answers, settings: Settings) -> Counts:
    """Compare the answers that are there with the input `path`, and count what is to do.

    Raises
    ------
    ConfigError
        An answer belongs to another line than the input has, or was made under other settings.
    """
    counts = Counts()
    known = set(answers.digests)
    for line in read_lines(path):
        counts.num_lines += 1
        found = answers.digests.get(line.number)
        known.discard(line.number)
        if found is not None and found != settings.digest(line):
            raise ConfigError(
                f"--output {answers.path} has an answer to line {line.number}, but to another prompt or under other "
                f"settings than --input {path} and this command; give another --output"
            )
        counts.num_before += found is not None
    if known:
        raise ConfigError(
            f"--output {answers.path} has an answer to line {min(known)}, which --input {path} does not have; "
            "give another --output"
        )
    return counts


@dataclass(slots=True)
class FileRun:
    """Answers the lines of one input that have no answer yet. `report` is called after each answer was written."""

    engine: Engine
    settings: Settings
    answers: Answers
    counts: Counts
    report: Callable[[Counts], None]
    _open: list[tuple[Line, Generation]] = field(default_factory=list)

    def run(self, lines: Iterator[Line]) -> None:
        """Keep the engine's batch full until all of `lines` have an answer."""
        todo = (line for line in lines if line.number not in self.answers.digests)
        window = 2 * self.engine.config.engine.max_batch
        try:
            while self._submit(todo, window):
                self.engine.step()
                self._take_finished()
        finally:
            self.engine.cancel(generation for _, generation in self._open)

    def _submit(self, todo: Iterator[Line], window: int) -> bool:
        """Prepare lines until `window` are open; whether any is."""
        while len(self._open) < window and (line := next(todo, None)) is not None:
            try:
                generation = prepare_line(self.engine, line, self.settings)
            except RequestError as error:
                self._write([self._answer(line) | {"error": str(error)}])
            else:
                self.engine.submit([generation])
                self._open.append((line, generation))
        return bool(self._open)

    def _take_finished(self) -> None:
        finished = [(line, one) for line, one in self._open if one.finished]
        if not finished:
            return
        self._open = [(line, one) for line, one in self._open if not one.finished]
        self.engine.cancel(one for _, one in finished)  # the engine need not remember them
        self._write([self._answer(line) | _outcome(one) for line, one in finished])

    def _answer(self, line: Line) -> dict[str, Any]:
        return {"line": line.number, "id": _id_of(line), "digest": self.settings.digest(line)}

    def _write(self, answers: list[dict[str, Any]]) -> None:
        self.answers.write(answers)
        for answer in answers:
            self.counts.num_errors += "error" in answer
            self.counts.num_answered += "error" not in answer
            self.counts.num_tokens += len(answer.get("token_ids", ()))
        self.report(self.counts)


def prepare_line(engine: Engine, line: Line, settings: Settings) -> Generation:
    """The generation that a line asks for; raises `RequestError` naming what is wrong with it.

    Without a seed of its own the line's number is added to ``engine.seed``, so that a run that was ended and gone on
    with gives what an undisturbed one gives.
    """
    fields = _parse(line)
    prompt, tools = _prompt_of(fields, chat=not settings.raw and engine.has_chat_template)
    fields.pop("id", None)
    schema = fields.get("json_schema")
    if isinstance(schema, dict):
        fields["json_schema"] = json.dumps(schema)
    values = settings.params.to_wire() | fields
    if values.get("seed") is None:
        values["seed"] = engine.config.engine.seed + line.number
    return engine.prepare(engine.encode(prompt, tools), SamplingParams(**values))


def _parse(line: Line) -> dict[str, Any]:
    try:
        value = json.loads(line.content.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the line is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise RequestError("the line is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}") from error
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise RequestError(f"the line is of type {type(value).__name__}: must be a string or an object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _prompt_of(fields: dict[str, Any], *, chat: bool) -> tuple[Prompt, Any]:
    """Takes the prompt, and the tools for its template, out of `fields`."""
    name = fields.get("id")
    if name is not None and type(name) not in (str, int):
        raise RequestError(f"id is of type {type(name).__name__}: must be a string or a whole number")
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("the line must have prompt or messages, and not both")
    tools = fields.pop("tools", None)
    if "messages" in fields:
        messages = fields.pop("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise RequestError("messages must be a list of objects with role and content")
        return messages, tools
    if tools is not None:
        raise RequestError("tools need messages")
    prompt = fields.pop("prompt")
    if isinstance(prompt, list) and not all(type(one) is int for one in prompt):
        raise RequestError("prompt must be text or a list of token ids")
    return ([{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt), None


def _id_of(line: Line) -> str | int | None:
    """The line's own id, None where it has none or cannot be read."""
    try:
        name = _parse(line).get("id")
    except RequestError:
        return None
    return name if type(name) in (str, int) else None


def _outcome(generation: Generation) -> dict[str, Any]:
    output = generation.output()
    if output.error is not None:
        return {"error": f"the generation failed: {output.error}"}
    found: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
    }
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(output, name)
        if entries is not None:
            found[name] = [None if one is None else asdict(one) for one in entries]
    return found
