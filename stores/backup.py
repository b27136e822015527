"""Copies of a store that is in use, and putting one back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from memstream.errors import StoreCorruptError, StoreError, StoreVersionError
from memstream.stores import in_use
from memstream.stores.files import replacing
from memstream.stores.migrations import MIGRATIONS
from memstream.stores.sqlite import BUSY_TIMEOUT_S, inspect_file

Progress = Callable[[int, int], None]  # pages done, pages in all

_PAGES = 2048  # copied between two calls of progress
_OF_THE_PLACE = ("snapshots", "index_state")  # tables that tell of files beside the store, which no copy has


def backup(source: Path, target: Path, *, force: bool, progress: Progress | None = None) -> None:
    """Copies a store to a file (mode 0600) that holds all of it, from one consistent view; others may write meanwhile.

    Raises:
        StoreError: a file is there, or the disk refused; nothing is left behind.
        StoreCorruptError: the store is damaged; no copy was made of it.
    """
    if target.resolve() == source.resolve():
        raise StoreError(f"{target} is the store itself; back it up to another file")
    with replacing(target, force=force) as unfinished:
        _copy(source, unfinished, progress or (lambda _done, _all: None), f"no backup was written to {target}")


def restore(source: Path, store: Path, *, progress: Progress | None = None) -> None:
    """Puts a backup in the place of a store, as a whole or not at all. What the store held is gone.

    Snapshots and the index of the old store go too: they tell of turns that the backup may not hold.

    Raises:
        StoreError: a process has the store open, or the disk refused; the store is as it was.
        StoreCorruptError: the file is no store, or damaged; the store is as it was.
        StoreVersionError: the file was written by a newer memstream.
    """
    if not inspect_file(source):
        raise StoreError(f"there is no store at {source}")
    if source.resolve() == store.resolve():
        raise StoreError(f"{source} is the store itself; name a backup")
    with in_use.alone(Path(f"{store}-locks")):
        told = f"{store} is as it was"
        with replacing(store, force=True) as unfinished:
            _copy(source, unfinished, progress or (lambda _done, _all: None), told)
            _fold_wal(store)
            for beside in (f"{store}-wal", f"{store}-shm", f"{store}-journal", f"{store}-index"):
                Path(beside).unlink(missing_ok=True)
            for snapshot in Path(f"{store}-snapshots").glob("*"):
                snapshot.unlink()


def _copy(source: Path, target: Path, progress: Progress, told: str) -> None:
    """Copies all pages and checks the copy; ``told`` is how a failure leaves things."""
    with (
        _explained(source, told),
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as old,
        closing(sqlite3.connect(target, isolation_level=None)) as new,
    ):
        # With a view of its own the copy need not begin again each time another process writes.
        old.isolation_level = None
        old.execute("BEGIN")
        old.execute("SELECT count(*) FROM sqlite_master").fetchone()
        old.backup(new, pages=_PAGES, progress=lambda _, left, n: progress(n - left, n), sleep=0.0)
        new.execute("PRAGMA journal_mode = DELETE")
        wrong = new.execute("PRAGMA quick_check(1)").fetchone()[0]
        if wrong != "ok":
            raise StoreCorruptError(f"{source} is damaged ({wrong}); {told}. See memstream memory verify")
        known = {name for name, _ in MIGRATIONS}
        found = {row[0] for row in new.execute("SELECT name FROM migrations")}
        if found - known:
            raise StoreVersionError(f"{source} was written by a newer memstream; {told}. Upgrade memstream")
        for table in _OF_THE_PLACE:
            new.execute(f"DELETE FROM {table}")


def _fold_wal(store: Path) -> None:
    """Ends the old store's WAL, which shows whether a process that takes no part in our locks has it open.

    Raises:
        StoreError: one has.
    """
    if not store.exists() or not store.stat().st_size:
        return
    with closing(sqlite3.connect(store, timeout=0.0, isolation_level=None)) as old:
        try:
            old.execute("PRAGMA journal_mode = DELETE").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreError(f"{store} is open in another program; stop it first") from error
        except sqlite3.DatabaseError:
            return  # damaged: what a backup is for


@contextmanager
def _explained(source: Path, told: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        what = str(error).lower()
        if "malformed" in what or "not a database" in what:
            raise StoreCorruptError(f"{source} is damaged ({what}); {told}") from error
        if "full" in what or "i/o error" in what:
            raise StoreError(f"the disk is full or refused the write ({what}); {told}") from error
        raise StoreError(f"cannot copy {source}: {what}; {told}") from error
