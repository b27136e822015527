"""PostgreSQL with pgvector as memstream uses it: connections, one writer at a time, locks, what its errors mean."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import URL, Connection, create_engine, event, make_url
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.types import UserDefinedType

from memstream.errors import ConfigError, MissingExtraError, StoreError
from memstream.stores.migrations import APPLICATION_ID
from memstream.stores.postgres_locks import Locks

_SCHEMA = "memstream"
_BUSY_TIMEOUT_S = 15
_CONNECT_TIMEOUT_S = 10
_POLL_S = 0.05
# Either side misses a machine that is gone within half a minute; what it owned is free then.
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3
_KEEPALIVES = {
    "keepalives_idle": _IDLE_S,
    "keepalives_interval": _INTERVAL_S,
    "keepalives_count": _PROBES,
    "tcp_user_timeout": (_IDLE_S + _INTERVAL_S * _PROBES) * 1000,
}
_SERVERS_KEEPALIVES = (
    f"-ctcp_keepalives_idle={_IDLE_S} -ctcp_keepalives_interval={_INTERVAL_S} -ctcp_keepalives_count={_PROBES}"
)
_UNREADABLE = "the store's URL cannot be read; it must be postgresql://USER:PASSWORD@HOST/DATABASE"
_WRITER = 0  # the advisory lock of whoever writes; a conversation's is its id

_BEGIN_WRITE = (
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    f"SET LOCAL lock_timeout = '{_BUSY_TIMEOUT_S}s'; "
    "SET LOCAL synchronous_commit = {}; "
    f"SELECT pg_advisory_xact_lock({APPLICATION_ID}, {_WRITER})"
)


def is_url(name: str) -> bool:
    """True for ``postgresql://...`` and the like."""
    return name.startswith(("postgresql:", "postgres:", "postgresql+psycopg:"))


class HalfVec(UserDefinedType[bytes]):
    """pgvector's ``halfvec``, given and taken as little-endian float16 bytes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """The name of the type."""
        return "HALFVEC"

    def bind_processor(self, dialect: Dialect) -> Callable[[bytes | None], Any]:
        """From bytes to pgvector's type."""
        from pgvector import HalfVector

        def process(value: bytes | None) -> Any:
            if value is None:
                return None
            return HalfVector(np.frombuffer(value, dtype="<f2"))

        return process

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], bytes | None]:
        """From pgvector's type to bytes."""

        def process(value: Any) -> bytes | None:
            return None if value is None else bytes(value.to_numpy().astype("<f2", copy=False).tobytes())

        return process


class Postgres:
    """A database with pgvector; memstream's tables are in the schema ``memstream``. See ``Database`` in sql.py.

    One process writes at a time, in the order of the events, as in SQLite: it holds an advisory lock for the length of
    its transaction. Conversations are held by advisory locks of one connection, which end with it.

    Args:
        name: ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``, as libpq understands it.
        create: False refuses to create the tables.

    Raises:
        ConfigError: not such a URL.
        MissingExtraError: the driver is not installed.
        StoreError: no connection, no pgvector, or nothing there to open.
    """

    path: Path | None = None
    shared = False

    def __init__(self, name: str, *, create: bool) -> None:
        missing = [module for module in ("psycopg", "pgvector") if importlib.util.find_spec(module) is None]
        if missing:
            raise MissingExtraError(f"{missing[0]} is not installed; run: pip install 'memstream[postgres]'")
        try:
            self._url = make_url(name).set(drivername="postgresql+psycopg")
        except ArgumentError as error:
            raise ConfigError(_UNREADABLE) from error
        self._locks = Locks(self._connect)
        self._prepare(create)
        self.engine = _engine(self._url)

    def __str__(self) -> str:
        return self._url.set(drivername="postgresql").render_as_string(hide_password=True)

    def _connect(self) -> Any:
        """A connection of the driver's own, outside the pool, where each statement is its own transaction."""
        import psycopg

        url = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            return psycopg.connect(url, autocommit=True, options=_SERVERS_KEEPALIVES, **_settings())
        except psycopg.ProgrammingError as error:
            raise ConfigError(f"{_UNREADABLE} ({_first_line(error)})") from error

    def _prepare(self, create: bool) -> None:
        """Makes sure that the schema and pgvector are there."""
        import psycopg

        with self.explain(), self._connect() as connection:
            there = connection.execute("SELECT to_regnamespace(%s) IS NOT NULL", [_SCHEMA]).fetchone()[0]
            if not there and not create:
                raise StoreError(f"there is no store in {self}")
            extension = connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone()
            if extension is None:
                try:
                    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                except psycopg.Error as error:
                    raise StoreError(
                        f"{self}: pgvector is not there and cannot be added ({_first_line(error)}); install it on the "
                        "server, and have an administrator run: CREATE EXTENSION vector"
                    ) from error
            if not there:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA}")

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Turns PostgreSQL's errors into a StoreError that says what to do."""
        import psycopg

        try:
            yield
        except PoolTimeoutError as error:
            raise StoreError(f"{self}: too many threads use the store at once") from error
        except (DBAPIError, psycopg.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            state = getattr(cause, "sqlstate", None) or ""
            for code, pattern, meaning in _MEANINGS:  # libpq gives no code for what was refused while connecting
                if state.startswith(code) if state else pattern and re.search(pattern, str(cause)):
                    raise StoreError(f"{self}: {meaning}") from error
            if not state and isinstance(cause, psycopg.OperationalError):
                raise StoreError(
                    f"{self}: the server cannot be reached ({_first_line(cause)}); is it running?"
                ) from error
            raise StoreError(f"{self}: {_first_line(cause)}") from error

    @contextmanager
    def statements(self) -> Iterator[Connection]:
        """A connection where each statement is its own transaction."""
        with self.explain(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def checkpoint(self) -> bool:
        """Nothing to do: the server sees to its log."""
        return True

    def owe_wipe(self, connection: Connection) -> bool:
        """Nothing to note: the server clears away what was deleted by itself, if ``wipe`` does not."""
        return False

    def owes_wipe(self, connection: Connection) -> bool:
        """Never; see ``owe_wipe``."""
        return False

    def wipe(self, texts: Collection[str] | None = None) -> bool:
        """Frees the room of deleted rows for new ones; the server's own log and backups are the server's."""
        with self.statements() as connection:
            connection.exec_driver_sql("VACUUM")
        return True

    def lock_conversation(self, conversation_id: int, wait_s: float) -> Callable[[], None] | None:
        """Takes an advisory lock, held until it is given back or this process's connection ends."""
        until = time.monotonic() + wait_s
        while True:
            with self.explain():
                if self._locks.take(conversation_id):
                    return lambda: self._locks.give_back(conversation_id)
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._locks.ask_for(conversation_id)
            time.sleep(min(_POLL_S, left))

    def check_owner(self, connection: Connection, conversation_id: int) -> None:
        """Raises StoreError where the lock was lost; once it was asked in a transaction that writes, it holds."""
        if not self._locks.holds(connection, conversation_id):
            raise StoreError(f"{self}: the connection that owned the conversation was lost; close it and open it again")

    def ask_for(self, conversation_id: int) -> None:
        """Tells the process that has a conversation that it is wanted."""
        with self.explain():
            self._locks.ask_for(conversation_id)

    def asked_for(self) -> set[int]:
        """Conversations of this process that others asked for since the last call, and those whose lock was lost."""
        return self._locks.asked_for()

    def lock_index(self) -> AbstractContextManager[object]:
        """There is no index file."""
        return nullcontext()

    def folder(self, kind: str) -> Path | None:
        """There are no files beside a database."""
        return None

    def close(self) -> None:
        """Closes every connection."""
        self._locks.close()
        self.engine.dispose()


def _settings() -> dict[str, Any]:
    """How every connection is made; it tells the server whose it is (``pg_stat_activity.application_name``)."""
    name = f"memstream {os.getpid()} on {socket.gethostname()}"[:63]
    return {"connect_timeout": _CONNECT_TIMEOUT_S, "application_name": name, **_KEEPALIVES}


def _engine(url: URL) -> Any:
    """An engine whose reads each see one state, and whose writes queue."""
    settings = f"{_SERVERS_KEEPALIVES} -csearch_path={_SCHEMA},public -cdefault_transaction_isolation=repeatable\\ read"
    engine = create_engine(
        url,
        connect_args={"options": settings, **_settings()},
        pool_pre_ping=True,
        pool_timeout=60,
        pool_use_lifo=True,
    )

    @event.listens_for(engine, "connect")
    def prepare(dbapi: Any, _record: Any) -> None:
        from pgvector.psycopg import register_vector

        register_vector(dbapi)
        dbapi.rollback()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("write"):
            connection.exec_driver_sql(_BEGIN_WRITE.format("on" if options.get("durable") else "off"))

    return engine


def _first_line(error: object) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


_MEANINGS = (
    ("53100", "", "the server's disk is full; nothing of this step was stored. Free some space and try again"),
    ("53300", "too many clients", "the server takes no more connections; close some, or raise max_connections"),
    ("55P03", "", f"another process kept the store locked for {_BUSY_TIMEOUT_S} s; try again"),
    ("25006", "", "the store cannot be written (a read-only server)"),
    ("28", "authentication failed|no pg_hba.conf entry|role .* does not exist", "the server refused the user or the "
     "password"),
    ("3D000", "database .* does not exist", "there is no such database; create it first"),
    ("42501", "", "the user lacks a right; it must be allowed to create a schema in the database and to use it"),
)  # fmt: skip
