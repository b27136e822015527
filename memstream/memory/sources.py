"""Reading documents: Markdown, plain text, JSON and JSON lines, with errors that name the file and say what to do."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstream.errors import InputError
from memstream.memory.outline import outline
from memstream.stores.base import storable_text

_MARKDOWN = (".md", ".markdown")
_RECORDS = (".jsonl", ".ndjson")
_JSON = ".json"
SUFFIXES = (*_MARKDOWN, ".txt", _JSON, *_RECORDS)  # what is read of a folder
_VERSION = 1  # raised when documents are cut or read in another way, so that adding them again cuts them anew
_BINARY = "convert it to Markdown or plain text first"

Paths = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to add.

    Attributes:
        name: what people and models read of where it is from, such as ``handbook.md``; with ``path`` it tells the
            documents of an owner apart.
        text: all of it.
        markdown: False takes it as plain text.
        title: where the text itself tells none.
        path: of the file it was read from, absolute; ``""`` for a text that is handed in.
        line: for a record of a file, the line it is on, counted from 1.
    """

    name: str
    text: str
    markdown: bool = True
    title: str = ""
    path: str = ""
    line: int | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise InputError("a document needs a name, such as handbook.md")
        for field in ("name", "text", "title"):
            object.__setattr__(self, field, storable_text(getattr(self, field)))

    @property
    def checksum(self) -> str:
        """Of everything that decides its passages."""
        about = f"{_VERSION} {self.markdown} {self.line} {len(self.title)} {self.title}"
        return hashlib.blake2b(f"{about}\n{self.text}".encode(), digest_size=16).hexdigest()


def find_files(given: Paths) -> list[Path]:
    """The file, or all files of known kinds under the folder in the order of their names; hidden ones are left out.

    Raises:
        InputError: there is nothing, it cannot be read, or a name is not valid Unicode.
    """
    path = Path(os.path.abspath(os.fspath(given)))
    if path.is_dir():
        found = list(_walk(path))
    elif path.is_file():
        found = [path]
    elif path.exists():
        raise InputError(f"{path} is neither a file nor a folder")
    else:
        raise InputError(f"there is no {path}; give a file or a folder")
    for file in found:
        if storable_text(str(file)) != str(file):
            raise InputError(f"the name of {storable_text(str(file))} is not valid Unicode; rename it")
    return found


def _walk(path: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(path, onerror=_unreadable):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield Path(folder, name)


def _unreadable(error: OSError) -> None:
    raise InputError(f"cannot read {error.filename}: {error.strerror}") from error


def read_file(path: Path) -> Iterator[Document]:
    """The documents of a file: of JSON lines, and of a list of objects in JSON, each record; of any other the whole.

    JSON lines are read twice: nothing is given out before the last line was found to be good.

    Raises:
        InputError: it cannot be read, is not UTF-8 or not JSON, or a line is not a record.
    """
    suffix = path.suffix.lower()
    if suffix in _RECORDS:
        for _ in _records(path):
            pass
        yield from _records(path)
    elif suffix == _JSON:
        yield from _json(path)
    else:
        text = _decode(path, _read(path))
        yield Document(name=path.name, text=text, markdown=suffix in _MARKDOWN, path=str(path))


def _json(path: Path) -> list[Document]:
    try:
        value = json.loads(_decode(path, _read(path)).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        names: dict[str, int] = {}
        return [_record(path, item, number, names) for number, item in enumerate(value, 1)]
    text = outline(value)
    if not text:
        raise InputError(f"{path}: there is no text in it")
    return [Document(name=path.name, text=text, path=str(path))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _decode(path: Path, data: bytes, line: int | None = None) -> str:
    where = f"{path}" if line is None else f"{path}, line {line}"
    if b"\0" in data:
        raise InputError(f"{where}: not a text (it holds NUL bytes); {_BINARY}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02X}); save it as UTF-8, "
            f"or if it is no text, {_BINARY}"
        ) from error


def _records(path: Path) -> Iterator[Document]:
    names: dict[str, int] = {}
    for number, value in _lines(path):
        try:
            record = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number}: not JSON ({error}); each line must be one record, "
                'such as {"id": "a1", "text": "..."}'
            ) from error
        yield _record(path, record, number, names, line=number)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                value = _decode(path, data, number).removeprefix("\ufeff" if number == 1 else "")
                if value.strip():
                    yield number, value
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _record(path: Path, record: Any, number: int, names: dict[str, int], *, line: int | None = None) -> Document:
    """A record as a document: its field ``text``, or else all its fields that are texts, as ``name: value``.

    Args:
        path: its file.
        record: the object.
        number: of its line; of a list in JSON, which one it is.
        names: numbers of those before it, by name; its own is added.
        line: that it is on, where it has one.
    """
    where = f"{path}, {'item' if line is None else 'line'} {number}"
    if not isinstance(record, dict):
        raise InputError(f'{where}: a record must be an object, such as {{"text": "..."}}')
    given, title, text = record.get("id"), record.get("title"), record.get("text")
    named = isinstance(given, (str, int)) and not isinstance(given, bool) and str(given).strip()
    if not isinstance(text, str) or not text.strip():
        fields = {name: value for name, value in record.items() if name != "id" and isinstance(value, str)}
        text = "\n".join(f"{name}: {value}" for name, value in fields.items() if value.strip())
    if not text:
        raise InputError(f'{where}: the record has no text; give it a field "text"')
    name = f"{path.name}#{given}" if named else f"{path.name}#{'' if line is None else 'L'}{number}"
    if name in names:
        raise InputError(f"{where}: the id of {where.split()[-2]} {names[name]} again; ids must differ")
    names[name] = number
    return Document(
        name=name, text=text, markdown=False, title=title if isinstance(title, str) else "", path=str(path), line=line
    )


def read(documents: Paths | Document | Iterable[Paths | Document]) -> list[Paths | Document]:
    """What was given, as a list.

    Raises:
        InputError: it is neither paths nor documents.
    """
    given = [documents] if isinstance(documents, (str, os.PathLike, Document)) else list(documents)
    for item in given:
        if not isinstance(item, (str, os.PathLike, Document)):
            raise InputError(f"a document must be a path or a Document, not {type(item).__name__}")
    return given
