"""The lines of an export: what each kind holds, how it is written, and how it is checked when it is read."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO, ClassVar, cast

from memstream.errors import InputError
from memstream.stores.base import storable_text

FORMAT = "memstream export"
VERSION = 1
MOST_LINE_BYTES = 64 << 20  # a longer line is refused, so that reading takes no more memory than that
_MOST_COUNT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Which embedder made the vectors of a file."""

    name: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderLine:
    """The first line; ``embedder`` is None where the file holds no vectors."""

    kind: ClassVar = "header"
    format: str
    version: int
    embedder: MadeBy | None
    conversations: int
    turns: int
    facts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactLine:
    """A fact: of a user, or of the conversation it follows where there is no user."""

    kind: ClassVar = "fact"
    namespace: str
    user: str | None
    conversation: str | None
    text: str
    created: datetime
    pinned: bool
    vector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLine:
    """A conversation; so many turns follow, then its windows, summaries and facts."""

    kind: ClassVar = "conversation"
    namespace: str
    user: str | None
    name: str
    created: datetime
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLine:
    """A finished turn of the conversation before it."""

    kind: ClassVar = "turn"
    sequence: int
    role: str
    text: str
    n_tokens: int
    created: datetime
    state: str
    superseded: bool
    vector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLine:
    """The vector of a window over the turns of sequences ``first`` to ``last``; its text is made from them."""

    kind: ClassVar = "window"
    first: int
    last: int
    vector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """A summary that was made from the turns of these sequences."""

    kind: ClassVar = "summary"
    sources: tuple[int, ...]
    text: str
    vector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLine:
    """The last line: how many there were of each kind, and the checksum of every byte before it."""

    kind: ClassVar = "end"
    conversations: int
    turns: int
    windows: int
    summaries: int
    facts: int
    checksum: str


Line = HeaderLine | FactLine | ConversationLine | TurnLine | WindowLine | SummaryLine | EndLine
_KINDS: dict[str, type[Line]] = {
    kind.kind: kind
    for kind in (HeaderLine, FactLine, ConversationLine, TurnLine, WindowLine, SummaryLine, EndLine)
}  # fmt: skip


class Checksum:
    """Of the bytes of a file, as its last line says it."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._digest.update(data)

    def __str__(self) -> str:
        return f"blake2b:{self._digest.hexdigest()}"


def encode(line: Line) -> bytes:
    """A line as UTF-8 JSON with its kind first; what is optional and missing is left out."""
    values: dict[str, Any] = {"kind": line.kind}
    for field in dataclasses.fields(line):
        value = getattr(line, field.name)
        if value is None and field.default is None:
            continue
        values[field.name] = _plain(value)
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return dataclasses.asdict(value) if isinstance(value, MadeBy) else value


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1.

    Raises:
        InputError: a line is longer than 64 MiB, or the last one has no end.
    """
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise InputError(f"line {number} is longer than {MOST_LINE_BYTES >> 20} MiB; this is not an export")
        if not line.endswith(b"\n"):
            raise InputError(f"the file ends in the middle of line {number}: it was cut off. Get the whole file")
        yield number, line


def decode(number: int, line: bytes) -> Line:
    """Reads a line and checks every field.

    Raises:
        InputError: not UTF-8, not JSON, of an unknown kind or version, or with a field that is wrong; says which line.
    """
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError:
        raise InputError(f"line {number} is not UTF-8 text; an export is (compressed or re-encoded?)") from None
    except RecursionError:
        raise InputError(f"line {number} is not JSON of an export: it is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"line {number} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"line {number} is not a JSON object")
    kind = _KINDS.get(str(values.pop("kind", "")))
    if kind is None:
        raise InputError(f"line {number} is of no kind that an export holds ({', '.join(_KINDS)})")
    if kind is HeaderLine:
        _check_version(values)
    try:
        return cast(Line, _fields(kind, values))
    except _WrongError as error:
        raise InputError(f"line {number} ({kind.kind}): {error}") from None


def _check_version(values: dict[str, Any]) -> None:
    if values.get("format") != FORMAT:
        raise InputError(f"this is not an export of memstream: its header says {str(values.get('format'))[:40]!r}")
    if values.get("version") != VERSION:
        raise InputError(
            f"the export is of version {str(values.get('version'))[:40]}; this memstream reads version {VERSION}"
        )


class _WrongError(ValueError):
    """What is wrong with a field."""


def _fields(kind: type[Any], values: Any) -> Any:
    """An object of a kind from JSON values of exactly its fields."""
    if not isinstance(values, dict):
        raise _WrongError("an object is missing")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise _WrongError(f"unknown field {unknown[0][:40]!r}")
    read = {}
    for name, field in fields.items():
        if name not in values and field.default is None:
            continue
        if name not in values:
            raise _WrongError(f"the field {name!r} is missing")
        try:
            read[name] = _READ[str(field.type)](values[name])
        except (_WrongError, ValueError, OverflowError) as error:
            raise _WrongError(f"the field {name!r} is wrong: {error}") from None
    return kind(**read)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _WrongError("it must be a text")
    return storable_text(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_COUNT:
        raise _WrongError("it must be a whole number, 0 or more")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("it must be true or false")
    return value


def _time(value: object) -> datetime:
    if not isinstance(value, str):
        raise _WrongError("it must be a time such as 2026-03-01T12:00:00+00:00")
    time = datetime.fromisoformat(value)
    if time.tzinfo is None:
        raise _WrongError("it must say its zone, as in 2026-03-01T12:00:00+00:00")
    return time.astimezone(UTC)


def _sequences(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _WrongError("it must be a list of sequences")
    found = tuple(_count(item) for item in value)
    if list(found) != sorted(set(found)):
        raise _WrongError("its sequences must ascend")
    return found


def _vector(value: object) -> bytes:
    if not isinstance(value, str):
        raise _WrongError("it must be base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise _WrongError("it is not base64") from None


_READ: dict[str, Callable[[Any], object]] = {
    "str": _text,
    "str | None": lambda value: None if value is None else _text(value),
    "int": _count,
    "bool": _flag,
    "datetime": _time,
    "bytes | None": _vector,
    "tuple[int, ...]": _sequences,
    "MadeBy | None": lambda value: None if value is None else _fields(MadeBy, value),
}
