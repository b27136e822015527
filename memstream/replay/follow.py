"""Follows a file that never ends, through rotation and truncation, and goes on where an earlier run stopped.

A file is known by device, inode and a fingerprint of its first bytes that grows with it: an inode that was reused, or
a file that was truncated and filled anew, has another beginning.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memstream.errors import ReplayError
from memstream.replay.reader import BLOCK_BYTES, LineSplitter, RawLine

FINGERPRINT_BYTES = 1024
POLL_S = 0.05

NoteKind = Literal["stream.truncated", "stream.rotated", "stream.lost", "stream.binary"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading a file stands.

    Attributes:
        path: as given.
        device: of the file; 0 for a pipe.
        inode: of the file; 0 for a pipe.
        fingerprint: hash of its first ``fingerprint_bytes`` bytes.
        fingerprint_bytes: at most 1,024.
        offset: after the last finished line.
        number: of the last finished line.
    """

    path: str
    device: int
    inode: int
    fingerprint: str
    fingerprint_bytes: int
    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class StreamNote:
    """Something that happened to a stream: what, and a sentence about it."""

    kind: NoteKind
    stream: str
    text: str


def beginning(path: str) -> Position:
    """The position before the first byte of a file as it is now.

    Raises:
        ReplayError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            size = min(FINGERPRINT_BYTES, found.st_size)
            return Position(path, found.st_dev, found.st_ino, _fingerprint(descriptor, size), size, 0, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ReplayError(f"cannot read {path}: {error.strerror}") from error


class FollowedFile:
    """One file, read from where it stands.

    Args:
        path: of the file.
        max_line_bytes: longer lines are cut.
        follow: True waits for more at its end; False stops there.
        idle_s: after so long without bytes a line without its end is taken as it is.
        start: where an earlier run stopped.
        stop: asked at the end of the file; True ends following there.

    Raises:
        ReplayError: the file cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        max_line_bytes: int,
        follow: bool,
        idle_s: float,
        start: Position | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path, self._follow, self._idle_s, self._stop = path, follow, idle_s, stop
        self._lines = LineSplitter(path, max_line_bytes, number=start.number if start else 0)
        self._finished = start.offset if start else 0  # after the last finished line
        self._descriptor = -1
        self._identity = (start.device, start.inode) if start else (0, 0)
        self._print, self._print_bytes = (start.fingerprint, start.fingerprint_bytes) if start else ("", 0)
        self._start = start

    def position(self) -> Position:
        """Where reading stands, after the last line that was yielded."""
        return Position(
            self._path,
            *self._identity,
            self._print,
            self._print_bytes,
            self._finished,
            self._lines.number,
        )

    @property
    def lag_bytes(self) -> int:
        """Bytes of the file that were not read yet."""
        return max(0, os.fstat(self._descriptor).st_size - self._lines.offset) if self._descriptor >= 0 else 0

    def read(self) -> Iterator[RawLine | StreamNote | None]:
        """Yields lines, notes, and None where there is nothing to read for now."""
        try:
            yield from self._open_at_start()
            yield from self._until_replaced()
        except OSError as error:
            raise ReplayError(f"cannot read on in {self._path}: {error.strerror or error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_at_start(self) -> Iterator[StreamNote]:
        """Opens the file where the earlier run stopped: under its name, or under the one it was rotated to."""
        start = self._start
        while start is not None:
            try:
                self._switch(self._path)
            except FileNotFoundError:
                if not self._follow:
                    raise
            else:
                if self._is(self._descriptor, start):
                    break
            renamed = self._find_renamed(start)
            if renamed is not None:
                self._switch(str(renamed))
                break
            yield self._lost(start)
            start = None
        if start is not None:
            os.lseek(self._descriptor, start.offset, os.SEEK_SET)
            self._lines.restart(start.offset)
            self._print, self._print_bytes = start.fingerprint, start.fingerprint_bytes
        elif self._descriptor < 0:
            self._switch(self._path)
        else:
            self._finished = 0

    def _lost(self, start: Position) -> StreamNote:
        return StreamNote(
            "stream.lost",
            self._path,
            f"{self._path} is not the file that was read before, and that one is not beside it: what came after byte "
            f"{start.offset} of it was not seen; reading this one from its beginning",
        )

    def _is(self, descriptor: int, start: Position) -> bool:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (start.device, start.inode) or found.st_size < start.offset:
            return False
        return _fingerprint(descriptor, start.fingerprint_bytes) == start.fingerprint

    def _find_renamed(self, start: Position) -> Path | None:
        """The file that was read before, under a name that begins with this one's stem."""
        own = Path(self._path)
        stem = own.name.split(".")[0]
        for path in sorted(own.parent.iterdir()):
            if not path.name.startswith(stem) or path.name == own.name or not path.is_file():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if self._is(descriptor, start):
                    return path
            finally:
                os.close(descriptor)
        return None

    def _switch(self, path: str) -> None:
        """Opens a file at its beginning, in place of the open one."""
        descriptor = os.open(path, os.O_RDONLY)
        self.close()
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._identity = found.st_dev, found.st_ino
        self._print, self._print_bytes = "", 0
        self._lines.restart()
        self._finished = 0

    def _until_replaced(self) -> Iterator[RawLine | StreamNote | None]:
        """Reads to the end, and on where that moves, from one file to the next."""
        quiet_since = time.monotonic()
        while True:
            if (note := self._check_beginning()) is not None:
                yield note
            if block := os.read(self._descriptor, BLOCK_BYTES):
                quiet_since = time.monotonic()
                self._grow_fingerprint()
                for line in self._lines.split(block):
                    self._finished = line.end
                    yield line
                continue
            quiet_s = time.monotonic() - quiet_since
            if self._is_replaced():
                if self._follow and quiet_s < self._idle_s:  # who wrote the old file may not know yet
                    yield None
                    time.sleep(POLL_S)
                    continue
                yield from self._last_line()
                yield self._switch_to_next()
                continue
            if not self._follow:
                yield from self._last_line()
                return
            if quiet_s >= self._idle_s:
                yield from self._last_line(partial=True)
            yield None
            if self._stop():
                return
            time.sleep(POLL_S)

    def _last_line(self, *, partial: bool = False) -> Iterator[RawLine]:
        if last := self._lines.flush(partial=partial):
            self._finished = last.end
            yield last

    def _grow_fingerprint(self) -> None:
        if self._print_bytes < FINGERPRINT_BYTES:
            size = min(FINGERPRINT_BYTES, self._lines.offset + BLOCK_BYTES, os.fstat(self._descriptor).st_size)
            self._print, self._print_bytes = _fingerprint(self._descriptor, size), size

    def _check_beginning(self) -> StreamNote | None:
        """Starts anew where the file became shorter than what was read, or begins otherwise than it did."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        read = self._lines.offset
        shorter = found.st_size < read
        if not shorter and _fingerprint(self._descriptor, self._print_bytes) == self._print:
            return None
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._lines.restart()
        self._finished = 0
        self._print, self._print_bytes = "", 0
        how = "became shorter" if shorter else "begins otherwise than before"
        return StreamNote(
            "stream.truncated",
            self._path,
            f"{self._path} {how} after {read} bytes were read; reading it from its beginning. What was written between "
            "the last read and the truncation, if anything, was not seen",
        )

    def _is_replaced(self) -> bool:
        """True where the name stands for another file now."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino)

    def _switch_to_next(self) -> StreamNote:
        """Opens what was written after the open file: one that was itself rotated meanwhile, or the one of the name."""
        mine, own = os.fstat(self._descriptor), Path(self._path)
        current = os.stat(self._path).st_ino
        later: list[tuple[int, str]] = []
        for path in own.parent.iterdir():
            if path.name.startswith((f"{own.name}.", f"{own.name}-")) and path.suffix != ".gz" and path.is_file():
                found = path.stat()
                if found.st_ino not in (mine.st_ino, current) and found.st_mtime_ns > mine.st_mtime_ns:
                    later.append((found.st_mtime_ns, str(path)))
        path_ = min(later)[1] if later else self._path
        self._switch(path_)
        return StreamNote(
            "stream.rotated", self._path, f"the old {own.name} was read to its end; going on with {path_}"
        )


def _fingerprint(descriptor: int, n_bytes: int) -> str:
    return hashlib.blake2b(os.pread(descriptor, n_bytes, 0), digest_size=16).hexdigest() if n_bytes else ""
