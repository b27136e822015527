"""SQLite as memstream uses it: where the file is, how connections are set up, what its errors mean."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import StaticPool

from memstream.errors import ConfigError, StoreCorruptError, StoreError
from memstream.stores import held
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
    if scheme[1].startswith("postgres"):
        raise ConfigError("PostgreSQL stores are not supported yet; use sqlite:///FILE or a file name")
    raise ConfigError(f"store {scheme[0]}... is not supported; use sqlite:///FILE, a file name, or 'memory'")


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
        write = connection.get_execution_options().get("write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

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


@contextmanager
def explain(path: Path | None) -> Iterator[None]:
    """Turns the database's errors into a StoreError that says what to do."""
    try:
        yield
    except PoolTimeoutError as error:
        raise StoreError(f"{path}: too many threads use the store at once") from error
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        where = path if path is not None else "store in memory"
        for pattern, kind, meaning in _MEANINGS:
            if pattern in str(cause).lower():
                raise kind(f"{where}: {meaning}") from error
        raise StoreError(f"{where}: {cause}") from error
