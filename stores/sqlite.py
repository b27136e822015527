"""SQLite as memstream uses it: where the file is, how connections are set up, what is locked, what its errors mean."""

from __future__ import annotations

import os
import re
import sqlite3
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import StaticPool

from memstream.errors import ConfigError, StoreCorruptError, StoreError
from memstream.stores import fulltext, held, in_use, leftovers
from memstream.stores.migrations import APPLICATION_ID

_MAGIC = b"SQLite format 3\x00"
BUSY_TIMEOUT_S = 15.0


def locate(url_or_path: str | os.PathLike[str]) -> Path | None:
    """The file a store's name stands for; None for a store in memory.

    Raises:
        ConfigError: a database this version cannot open.
    """
    name = os.fspath(url_or_path)
    if name in ("memory", "sqlite://", "sqlite:///:memory:", ":memory:"):
        return None
    if not name or "\x00" in name:
        raise ConfigError(f"store is {name!r}; give a file, sqlite:///FILE, or 'memory'")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+_.-]*)://", name)
    if scheme is None:
        return Path(name).expanduser().absolute()
    if scheme[1] in ("sqlite", "sqlite+pysqlite") and name.startswith(scheme[0] + "/"):
        return Path(name[len(scheme[0]) + 1 :]).expanduser().absolute()
    raise ConfigError(
        f"store {scheme[0]}... is not supported; use sqlite:///FILE, a file name, postgresql://..., or 'memory'"
    )


def inspect_file(path: Path) -> bool:
    """True where a store is there, False where one may be created. Reads only.

    Raises:
        StoreError: the path cannot hold a store.
        StoreCorruptError: something else is there.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give the name of a file in it, such as {path / 'memstream.db'}")
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist; create it first")
    if not path.exists():
        return False
    try:
        descriptor, give_back = held.hold(path)
        header = held.read(descriptor, 100, 0)
        give_back()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    beside = [p for p in (Path(f"{path}-wal"), Path(f"{path}-index")) if p.exists() and p.stat().st_size]
    if not header and beside:
        raise StoreCorruptError(f"{path} is empty, but {beside[0].name} is beside it: the store was damaged")
    if not header:
        return False
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise StoreCorruptError(
            f"{path} is not a memstream store (not an SQLite file, or damaged); nothing was changed"
        )
    found = int.from_bytes(header[68:72], "big")
    if found == APPLICATION_ID:
        return True
    if found != 0 or not _is_blank(path):
        raise StoreCorruptError(f"{path} is an SQLite database of something else; nothing was changed")
    return False


def _is_blank(path: Path) -> bool:
    """True for a database without a single table (a creation that was cut off), or one of ours still in its WAL."""
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            if connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
                return True
            return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreCorruptError(f"{path} cannot be read as an SQLite database: {error}; nothing was changed") from error


def connect(path: Path | None) -> Engine:
    """An engine whose transactions are real: BEGIN for reads, BEGIN IMMEDIATE with the option ``write``."""
    if path is None:
        engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        engine = create_engine(
            f"sqlite:///{path}",
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
            pool_timeout=60,
            pool_use_lifo=True,  # each connection has a page cache: one that stays warm, not several taking turns
        )

    @event.listens_for(engine, "connect")
    def prepare(dbapi: Any, _record: Any) -> None:
        dbapi.isolation_level = None  # we begin transactions ourselves
        if dbapi.execute("PRAGMA page_count").fetchone()[0] == 0:
            dbapi.execute("PRAGMA auto_vacuum = INCREMENTAL")  # on a file that has tables it would write each time
        dbapi.execute("PRAGMA journal_mode = WAL")
        dbapi.execute("PRAGMA foreign_keys = ON")
        dbapi.execute("PRAGMA secure_delete = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if not options.get("write"):
            connection.exec_driver_sql("BEGIN")
            return
        connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if options.get('durable') else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


_MEANINGS = (
    ("disk is full", StoreError, "the disk is full; nothing of this step was stored. Free some space and try again"),
    ("disk i/o error", StoreError, "the disk refused the write; nothing of this step was stored"),
    ("readonly database", StoreError, "the store cannot be written (read-only file or disk)"),
    ("unable to open", StoreError, "the store cannot be opened; check that the folder exists and may be written"),
    ("locked", StoreError, f"another process kept the store locked for {BUSY_TIMEOUT_S:.0f} s; try again"),
    ("not a database", StoreCorruptError, "the file is not an SQLite database, or damaged"),
    ("malformed", StoreCorruptError, "the store is damaged; restore a backup, or save what is readable with "
     "sqlite3's .recover"),
    ("too big", StoreError, "the text is too large for the store (1 GB)"),
)  # fmt: skip


class Sqlite:
    """One SQLite file, or a database in memory; see ``Database`` in sql.py."""

    def __init__(self, name: str, *, create: bool) -> None:
        self.path = locate(name)
        self.shared = self.path is None
        if self.path is not None and not inspect_file(self.path):
            if not create:
                raise StoreError(f"there is no store at {self.path}")
            try:
                self.path.touch(0o600)  # SQLite gives -wal and -shm the same mode
            except OSError as error:
                raise StoreError(f"cannot create {self.path}: {error.strerror}") from error
        # From here on nobody can put another file in its place.
        shared = None if self.path is None else in_use.share(Path(f"{self.path}-locks"))
        self._unshare = None if shared is None else weakref.finalize(self, os.close, shared)
        self._descriptor, self._give_back = (-1, _nothing) if self.path is None else held.hold(self.path)
        self.engine = connect(self.path)

    def __str__(self) -> str:
        return "store in memory" if self.path is None else str(self.path)

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Turns SQLite's errors into a StoreError that says what to do."""
        try:
            yield
        except PoolTimeoutError as error:
            raise StoreError(f"{self}: too many threads use the store at once") from error
        except (DBAPIError, sqlite3.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            for pattern, kind, meaning in _MEANINGS:
                if pattern in str(cause).lower():
                    raise kind(f"{self}: {meaning}") from error
            raise StoreError(f"{self}: {cause}") from error

    def checkpoint(self) -> bool:
        """Gives free pages back and empties the WAL; False where another process kept it busy."""
        with self.explain(), self.engine.connect() as connection:
            return _checkpoint(connection)

    def owe_wipe(self, connection: Connection) -> bool:
        """Counts in the file's header what was deleted and not wiped yet; True where something was before."""
        n = _n_owed(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {n + 1}")
        return n > 0

    def owes_wipe(self, connection: Connection) -> bool:
        """True where something was deleted and not wiped yet."""
        return _n_owed(connection) > 0

    def wipe(self, texts: Collection[str] | None = None) -> bool:
        """Merges the full-text indexes, gives free pages back, empties the WAL, and looks whether that was enough.

        Args:
            texts: what was deleted; None: whatever it was. Pages are written anew where a word of it is left.
        """
        with self.explain(), self.engine.connect() as connection:
            writer = connection.execution_options(write=True, durable=True)
            with writer.begin():
                owed = _n_owed(writer)
                fulltext.optimize(writer)
            wiped = _checkpoint(connection)
            if wiped and self.path is not None and leftovers.found(self._descriptor, texts):
                _run(connection, "VACUUM")
                wiped = _checkpoint(connection)
            if wiped and owed:
                with writer.begin():
                    if _n_owed(writer) == owed:  # nobody deleted something meanwhile
                        writer.exec_driver_sql("PRAGMA user_version = 0")
                _checkpoint(connection)
            return wiped

    def lock_conversation(self, conversation_id: int, wait_s: float) -> Callable[[], None] | None:
        """Takes the operating system's lock on a file beside the store."""
        folder = self.folder("locks")
        if folder is None:
            return lambda: None
        lock = FileLock(folder / f"{conversation_id}.lock", timeout=wait_s, mode=0o600, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout:
            return None
        except OSError as error:
            raise StoreError(f"cannot lock {lock.lock_file}: {error.strerror}") from error
        return lock.release

    def check_owner(self, connection: Connection, conversation_id: int) -> None:
        """Nothing to do: nobody can take a lock from a process that is alive."""

    def ask_for(self, conversation_id: int) -> None:
        """Nobody is told: processes that share a file do not hear each other."""

    def asked_for(self) -> set[int]:
        """Never any; see ``ask_for``."""
        return set()

    @contextmanager
    def lock_index(self) -> Iterator[None]:
        """One process at a time saves the index file."""
        folder = self.folder("locks")
        if folder is None:
            yield
            return
        try:
            with FileLock(folder / "index.lock", mode=0o600):
                yield
        except OSError as error:
            raise StoreError(f"cannot lock the index of {self.path}: {error.strerror}") from error

    def folder(self, kind: str) -> Path | None:
        """A folder beside the file, made (mode 0700) when first needed; None in memory."""
        if self.path is None:
            return None
        folder = Path(f"{self.path}-{kind}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot create {folder}: {error.strerror}") from error
        return folder

    def close(self) -> None:
        """Closes every connection; SQLite then folds the WAL into the file."""
        self.engine.dispose()
        self._give_back()
        self._give_back = _nothing
        if self._unshare is not None:
            self._unshare()


def _nothing() -> None:
    """There is no file to give back."""


def _n_owed(connection: Connection) -> int:
    """How many deletions were not wiped from the files yet; kept in the header of the file."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def _checkpoint(connection: Connection) -> bool:
    """Gives free pages back and empties the WAL; False where another process kept it busy."""
    _run(connection, "PRAGMA incremental_vacuum")
    return not _run(connection, "PRAGMA wal_checkpoint(TRUNCATE)")[0][0]


def _run(connection: Connection, statement: str) -> list[Any]:
    """Runs what cannot be part of a transaction."""
    raw = connection.connection.driver_connection
    assert raw is not None
    return list(raw.execute(statement).fetchall())
