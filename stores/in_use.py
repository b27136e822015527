"""Who has a store open: a lock of the operating system, shared by all who do, that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstream.errors import StoreError


def share(folder: Path) -> int | None:
    """Says that the store of this lock folder is open, until the descriptor that is returned is closed.

    Returns:
        None on a disk that cannot be written, where nobody restores anything either.

    Raises:
        StoreError: the store is being restored.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder / "store.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreError(f"{_store_of(folder)} is being restored; try again when that is done") from error
    return handle


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps everybody from opening the store of this lock folder.

    Raises:
        StoreError: somebody has it open.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder / "store.lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StoreError(f"cannot lock {_store_of(folder)}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"{_store_of(folder)} is open in another process; stop it first") from error
        yield
    finally:
        os.close(handle)


def _store_of(folder: Path) -> str:
    return str(folder).removesuffix("-locks")
