"""Reading an SQLite file beside SQLite, without closing it.

POSIX drops all locks a process holds on a file when it closes any descriptor of that file. SQLite's own lock on a store
gone, the next process that closes the store takes itself for the last one and deletes the WAL that we still write to.
So while a store is open here, its file is read through one descriptor, which is closed after SQLite has closed its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

_lock = threading.Lock()
_open: dict[tuple[int, int], list[int]] = {}  # device and inode: the descriptor, and how many hold it


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def hold(path: Path) -> tuple[int, Callable[[], None]]:
    """A descriptor to read a file with, and what gives it back once SQLite has closed the file.

    Raises:
        OSError: the file cannot be read.
    """
    with _lock:
        key = _key(path.stat())
        if key not in _open:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            key = _key(os.fstat(descriptor))
            _open[key] = [descriptor, 0]
        _open[key][1] += 1

    def give_back() -> None:
        with _lock:
            _open[key][1] -= 1
            if not _open[key][1]:
                os.close(_open.pop(key)[0])

    return _open[key][0], give_back


def read(descriptor: int, n: int, offset: int) -> bytes:
    """At most ``n`` bytes from ``offset`` on; fewer only at the end."""
    parts = []
    with _lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        while n > 0 and (part := os.read(descriptor, n)):
            parts.append(part)
            n -= len(part)
    return b"".join(parts)
