"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstream.errors import StoreError


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives a new file (mode 0600) beside ``path`` to write, which takes its place, durably, once that went well.

    Args:
        path: what is written.
        force: replaces a file that is there.

    Raises:
        StoreError: a file is there, or the disk refused; nothing is left behind, and what was there is as it was.
    """
    _check_free(path, force)
    made: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        made = Path(name)
        os.close(handle)
        yield made
        sync(made)
        _check_free(path, force)
        os.replace(made, path)
        sync(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; nothing was written") from error
    finally:
        for leftover in path.parent.glob(f"{made.name}*") if made is not None else ():
            leftover.unlink(missing_ok=True)


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist; create it first")
    if not force and path.exists():
        raise StoreError(f"{path} is there already; choose another name, or replace it with --force")


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
