"""Reads lines from files, pipes and gzip streams as bytes, in constant memory, and turns them into clean text."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import re
import select
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from memstream.errors import ReplayError

BLOCK_BYTES = 1 << 16
IDLE_S = 0.2  # a pipe that is silent for so long has its pending lines worked off

# Escape sequences of terminals: CSI, OSC and its kin with their text, and two-character ones.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]?|\x9b[0-?]*[ -/]*[@-~]"
)
_BLANK = re.compile("[\t\x0b\x0c\x85\u2028\u2029]")
# What is left of C0 and C1, and marks that reorder what a terminal shows.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_BAD_BYTE = re.compile("[\udc80-\udcff]")


class ByteStream(Protocol):
    """Anything with ``read(n) -> bytes`` that returns at most n bytes, and none at its end."""

    def read(self, n: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line as read.

    Attributes:
        stream: where it came from: the path as given, or ``-``.
        number: from 1, within its stream.
        data: its bytes without the line end and without NUL; only the beginning of a truncated one.
        truncated: True where the line was longer than the cap.
        offset: of its first byte in the stream, after unpacking, and
        end: of the byte after its line end.
        length: its bytes, those beyond the cap included, NUL and line end left out.
        digest: of a truncated line, a hash of all its bytes.
        partial: True where its end was not there yet.
        rest: True for what came later of such a line.
    """

    stream: str
    number: int
    data: bytes
    truncated: bool = False
    offset: int = 0
    end: int = 0
    length: int = 0
    digest: str = ""
    partial: bool = False
    rest: bool = False


def clean(data: bytes, *, encoding: str = "utf-8", truncated: bool = False) -> tuple[str, int]:
    """Decodes bytes and drops what must not reach a score or a terminal: colours, control characters.

    Args:
        data: the bytes of a line.
        encoding: of the bytes.
        truncated: True where the last character may be cut in half; it is then left out.

    Returns:
        The text, with bytes that cannot be decoded written as ``\\xNN``, and how many of those there were.
    """
    decoder = codecs.getincrementaldecoder(encoding)
    try:
        text, n_bad = decoder().decode(data, final=not truncated), 0
    except UnicodeDecodeError:
        n_bad = len(_BAD_BYTE.findall(decoder("surrogateescape").decode(data, final=not truncated)))
        text = decoder("backslashreplace").decode(data, final=not truncated)
    if not text.isprintable():
        text = _CONTROL.sub("", _BLANK.sub(" ", _ESCAPE.sub("", text)))
    return text, n_bad


def read_lines(
    source: ByteStream, name: str, *, max_line_bytes: int, encoding: str = "utf-8"
) -> Iterator[RawLine | None]:
    """Yields the lines of a stream, and None where a pipe has nothing to read for now.

    Memory is bounded by the cap and one block, however long a line is. Encodings whose characters are wider than a
    byte become UTF-8; offsets are then those of the UTF-8.

    Raises:
        ReplayError: reading fails, or a gzip stream is damaged.
    """
    lines = LineSplitter(name, max_line_bytes)
    with _explain(name):
        for block in _blocks(source, encoding):
            if block is None:
                yield None
                continue
            yield from lines.split(block)
        if last := lines.flush():
            yield last


class LineSplitter:
    """Cuts blocks into lines; of the line being read it keeps the beginning up to the cap, length and hash.

    Args:
        stream: name of the stream.
        cap: bytes of a line that are kept.
        offset: of the first byte that will come.
        number: of the last line before it.
    """

    def __init__(self, stream: str, cap: int, *, offset: int = 0, number: int = 0) -> None:
        self._stream, self._cap = stream, cap
        self.number = number
        self.offset = offset  # of the next byte
        self._start = offset  # of the line being read
        self._head = bytearray()
        self._length = 0  # bytes of the line, without NUL
        self._digest: hashlib.blake2b | None = None
        self._rest = False

    @property
    def pending(self) -> bool:
        """True where a line has begun that has not ended yet."""
        return self._length > 0

    def split(self, block: bytes) -> Iterator[RawLine]:
        """Takes the next bytes; yields the lines that end in them."""
        at = 0
        while (end := block.find(b"\n", at)) >= 0:
            self._extend(block[at:end])
            self.offset += end + 1 - at
            at = end + 1
            yield self._end()
        self._extend(block[at:])
        self.offset += len(block) - at

    def flush(self, *, partial: bool = False) -> RawLine | None:
        """Takes the line that has begun as it is, at the end of a stream or because its end does not come."""
        return self._end(partial=partial) if self.pending else None

    def restart(self, offset: int = 0) -> None:
        """Goes on at another place; what was read of a line is forgotten."""
        self._head.clear()
        self._length, self._digest, self._rest = 0, None, False
        self.offset = self._start = offset

    def _extend(self, part: bytes) -> None:
        """Appends bytes; a run of NUL, as a crash or a truncated file leaves it, is skipped."""
        if 0 in part:
            part = part.translate(None, b"\0")  # many times faster than replace() in a hole
        self._length += len(part)
        room = self._cap + 1 - len(self._head)  # one more than the cap, for the carriage return of a line that fits
        if room < len(part):
            if self._digest is None:
                self._digest = hashlib.blake2b(self._head, digest_size=16)
            self._digest.update(part)
        elif self._digest is not None:
            self._digest.update(part)
        if room > 0:
            self._head += part[:room]

    def _end(self, *, partial: bool = False) -> RawLine:
        if not self._rest:
            self.number += 1
        data = bytes(self._head)
        if self._length == len(data):
            data = data.rstrip(b"\r")
        truncated = self._length > len(self._head) or len(data) > self._cap
        line = RawLine(
            self._stream,
            self.number,
            data[: self._cap],
            truncated,
            self._start,
            self.offset,
            self._length,
            self._digest.hexdigest() if self._digest and truncated else "",
            partial,
            self._rest,
        )
        self._head.clear()
        self._length, self._digest, self._rest = 0, None, partial
        self._start = self.offset
        return line


def is_wide(encoding: str) -> bool:
    """True for encodings in which an end of line is more than one byte."""
    return codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))


def is_plain(path: str) -> bool:
    """True for a regular file that is neither packed nor begins with a mark of UTF-16.

    Raises:
        ReplayError: it cannot be read.
    """
    if not Path(path).is_file():
        return False
    with open_stream(path) as stream:
        return not stream.read(2).startswith((b"\x1f\x8b", codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


_MARKS = (b"\x1f\x8b", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _blocks(source: ByteStream, encoding: str) -> Iterator[bytes | None]:
    """Blocks of at most ``BLOCK_BYTES``, unpacked and without a byte order mark; UTF-16 becomes UTF-8."""
    head = source.read(BLOCK_BYTES)
    while head and any(mark.startswith(head) and mark != head for mark in _MARKS):  # not enough to tell
        more = source.read(BLOCK_BYTES)
        if not more:
            break
        head += more
    blocks = _raw_blocks(source, head)
    if head.startswith(b"\x1f\x8b"):
        packed = gzip.GzipFile(fileobj=io.BufferedReader(_Joined(blocks), BLOCK_BYTES))
        blocks = iter(lambda: packed.read1(BLOCK_BYTES), b"")
        head = next(blocks, None) or b""
    else:
        next(blocks, None)
    for mark, wide in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if head.startswith(mark):
            yield from _from_wide(head[2:], blocks, wide)
            return
    if is_wide(encoding):
        yield from _from_wide(head, blocks, encoding)
        return
    yield head.removeprefix(codecs.BOM_UTF8)
    yield from blocks


def _from_wide(head: bytes, blocks: Iterator[bytes | None], encoding: str) -> Iterator[bytes | None]:
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    yield decoder.decode(head).encode("utf-8", "surrogatepass")
    for block in blocks:
        yield None if block is None else decoder.decode(block).encode("utf-8", "surrogatepass")
    yield decoder.getstate()[0]  # half a character, at the end of a file that was cut


def _raw_blocks(source: ByteStream, head: bytes) -> Iterator[bytes | None]:
    yield head
    while True:
        if isinstance(source, _Pipe) and not source.ready():
            yield None
        block = source.read(BLOCK_BYTES)
        if not block:
            return
        yield block


class _Joined(io.RawIOBase):
    """Blocks as one raw stream, for the gzip reader."""

    def __init__(self, blocks: Iterator[bytes | None]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            try:
                self._left = memoryview(next(self._blocks) or b"")  # None: nothing for now; ask again
            except StopIteration:
                return 0
        n = min(len(buffer), len(self._left))
        buffer[:n] = self._left[:n]
        self._left = self._left[n:]
        return n


class _File:
    """A file descriptor read without a buffer of Python's."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, n: int, /) -> bytes:
        return os.read(self._descriptor, n)


class _Pipe(_File):
    """A pipe, socket or terminal: what is read is what is there, and it can be asked whether there is anything."""

    def ready(self) -> bool:
        return bool(select.select([self._descriptor], [], [], IDLE_S)[0])


@contextmanager
def open_stream(path: str | os.PathLike[str]) -> Iterator[ByteStream]:
    """Opens a file, or standard input for ``-``.

    Raises:
        ReplayError: a folder, no such file, or no permission.
    """
    name = os.fspath(path)
    with ExitStack() as stack:
        if name == "-":
            try:
                descriptor = sys.stdin.fileno()
            except (AttributeError, OSError, ValueError) as error:  # None, no descriptor, closed
                raise ReplayError("there is no standard input to read") from error
        else:
            if Path(name).is_dir():
                raise ReplayError(f"{name} is a folder; give the log files in it")
            try:
                descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            except OSError as error:
                raise ReplayError(f"cannot read {name}: {error.strerror}") from error
            stack.callback(os.close, descriptor)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ReplayError(f"{name} is a folder; give the log files in it")
        waits = not stat.S_ISREG(mode) and os.name == "posix"
        yield (_Pipe if waits else _File)(descriptor)


def check_readable(path: str | os.PathLike[str]) -> None:
    """Opens a source and closes it again, so that a wrong name is told before a model is loaded.

    Raises:
        ReplayError: as ``open_stream``.
    """
    name = os.fspath(path)
    if name != "-" and not Path(name).is_fifo():  # opening a named pipe waits for its writer
        with open_stream(path):
            pass


@contextmanager
def _explain(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReplayError(
            f"{name} is a damaged or cut gzip file ({error}); the lines before the damage were read"
        ) from error
    except OSError as error:
        raise ReplayError(f"cannot read on in {name}: {error.strerror or error}") from error
