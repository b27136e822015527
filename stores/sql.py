"""The store: one SQLite file (or a database in memory), its transactions, locks and the files beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, select

from memstream.errors import ConversationBusyError, StoreError
from memstream.stores import fulltext, held, leftovers, migrations, sqlite
from memstream.stores.schema import Migration


class SqlStore:
    """An open store. Thread safe; several processes may open the same file.

    Attributes:
        path: of the SQLite file; None keeps everything in memory.
    """

    def __init__(self, engine: Engine, path: Path | None) -> None:
        self.path = path
        self._engine = engine
        self._descriptor, self._give_back = (-1, _nothing) if path is None else held.hold(path)
        self._writing = threading.RLock()  # threads queue here rather than poll SQLite's lock
        self._writer: Connection | None = None  # of the thread that holds it
        self._owned: set[int] = set()  # conversations owned through this object, where there is no file to lock
        self._owned_changed = threading.Condition()

    @classmethod
    def open(cls, url_or_path: str | os.PathLike[str], *, create: bool = True) -> SqlStore:
        """Opens a store, creating it (mode 0600) where there is none, and brings its schema up to date.

        Args:
            url_or_path: a file, ``sqlite:///FILE``, or ``memory``.
            create: False refuses to create one.

        Raises:
            ConfigError: a kind of database this version cannot open.
            StoreError: the file cannot be read, written or created.
            StoreCorruptError: the file is something else, or damaged; it is not changed.
            StoreVersionError: it was written by a newer memstream.
        """
        path = sqlite.locate(url_or_path)
        if path is not None and not sqlite.inspect_file(path):
            if not create:
                raise StoreError(f"there is no store at {path}")
            try:
                path.touch(0o600)  # SQLite gives -wal and -shm the same mode
            except OSError as error:
                raise StoreError(f"cannot create {path}: {error.strerror}") from error
        engine = sqlite.connect(path)
        store = cls(engine, path)
        try:
            if not store._is_current():
                with store.write() as connection:
                    migrations.migrate(connection)
                store._checkpoint()
        except BaseException:
            store.close()
            raise
        return store

    def _is_current(self) -> bool:
        """True where there is nothing to migrate; so a store on a read-only disk can still be read."""
        known = [name for name, _ in migrations.MIGRATIONS]
        with self.read() as connection:
            if not self._engine.dialect.has_table(connection, "migrations"):
                return False
            return sorted(connection.scalars(select(Migration.name))) == sorted(known)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view of the store."""
        alone: AbstractContextManager[object] = self._writing if self.path is None else nullcontext()
        with alone, sqlite.explain(self.path), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """One transaction: committed as a whole at the end, or not at all. Never call a model inside.

        Within a transaction of the same thread it joins that one: a reply that is collected as garbage stores itself
        wherever the thread happens to be.

        Args:
            durable: False does not wait for the disk, for what can be made again: a power cut may undo it.
        """
        with self._writing:
            if self._writer is not None:
                yield self._writer
                return
            with sqlite.explain(self.path), self._engine.connect() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                driver.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                writer = connection.execution_options(write=True)
                with writer.begin():
                    self._writer = writer
                    try:
                        yield writer
                    finally:
                        self._writer = None

    def owe_purge(self, connection: Connection) -> bool:
        """Notes, in the transaction that deletes, that the files are to be wiped: a killed process leaves the note.

        Returns:
            Whether ``purge`` was owed before.
        """
        n = _n_owed(connection)
        connection.exec_driver_sql(f"PRAGMA user_version = {n + 1}")
        return n > 0

    @property
    def owes_purge(self) -> bool:
        """True where something was deleted and ``purge`` has not wiped it from the files yet."""
        with self.read() as connection:
            return _n_owed(connection) > 0

    def purge(self, texts: Collection[str] | None = None) -> bool:
        """Wipes what deleted rows left in the files. Returns False where another process kept the WAL busy.

        Args:
            texts: what was deleted; None: whatever it was. Pages are written anew where a word of it is left.
        """
        with self._writing:
            with self.write() as connection:
                owed = _n_owed(connection)
                fulltext.optimize(connection)
            wiped = self._checkpoint()
            if wiped and self.path is not None and leftovers.found(self._descriptor, texts):
                self._run("VACUUM")
                wiped = self._checkpoint()
            if wiped and owed:
                with self.write() as connection:
                    if _n_owed(connection) == owed:  # nobody deleted something meanwhile
                        connection.exec_driver_sql("PRAGMA user_version = 0")
                self._checkpoint()
            return wiped

    def _checkpoint(self) -> bool:
        """Gives free pages back and empties the WAL."""
        self._run("PRAGMA incremental_vacuum")
        return not self._run("PRAGMA wal_checkpoint(TRUNCATE)")[0][0]

    def _run(self, statement: str) -> list[Any]:
        """Runs what cannot be part of a transaction."""
        with self._writing, sqlite.explain(self.path):
            raw = self._engine.raw_connection()
            try:
                cursor = raw.cursor()
                cursor.execute(statement)
                found = list(cursor.fetchall())
                cursor.close()
            finally:
                raw.close()
        return found

    def lock_conversation(self, conversation_id: int, *, name: str, wait_s: float) -> Callable[[], None]:
        """Takes a conversation for this process, and returns what gives it back.

        The lock is the operating system's, on a file beside the store: a killed process leaves nothing behind.

        Args:
            conversation_id: which.
            name: for the message.
            wait_s: how many seconds to wait for another owner.

        Raises:
            ConversationBusyError: someone else owns it.
        """
        busy = f"conversation {name!r} is open elsewhere (waited {wait_s:g} s); close it there, or wait longer"
        if self.path is None:
            return self._own_in_memory(conversation_id, busy, wait_s)
        folder = self._folder("locks")
        lock = FileLock(folder / f"{conversation_id}.lock", timeout=wait_s, mode=0o600, thread_local=False)
        try:
            lock.acquire(poll_interval=0.02)
        except Timeout as error:
            raise ConversationBusyError(busy) from error
        except OSError as error:
            raise StoreError(f"cannot lock {lock.lock_file}: {error.strerror}") from error
        return lock.release

    def _own_in_memory(self, conversation_id: int, busy: str, wait_s: float) -> Callable[[], None]:
        with self._owned_changed:
            if not self._owned_changed.wait_for(lambda: conversation_id not in self._owned, timeout=wait_s):
                raise ConversationBusyError(busy)
            self._owned.add(conversation_id)

        def release() -> None:
            with self._owned_changed:
                self._owned.discard(conversation_id)
                self._owned_changed.notify_all()

        return release

    @contextmanager
    def lock_index(self) -> Iterator[None]:
        """One process at a time saves the index file."""
        if self.path is None:
            yield
            return
        try:
            with FileLock(self._folder("locks") / "index.lock", mode=0o600):
                yield
        except OSError as error:
            raise StoreError(f"cannot lock the index of {self.path}: {error.strerror}") from error

    def _folder(self, kind: str) -> Path:
        """A folder beside the store, made (mode 0700) when first needed."""
        folder = Path(f"{self.path}-{kind}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot create {folder}: {error.strerror}") from error
        return folder

    @property
    def index_path(self) -> Path | None:
        """Where the vector index is saved; None in memory."""
        return None if self.path is None else Path(f"{self.path}-index")

    def snapshot_path(self, file: str) -> Path | None:
        """Where a snapshot of that name is kept; None in memory, which keeps nothing on disk."""
        return None if self.path is None else self._folder("snapshots") / file

    def close(self) -> None:
        """Closes every connection; SQLite then folds the WAL into the file."""
        self._engine.dispose()
        self._give_back()
        self._give_back = _nothing


def _nothing() -> None:
    """There is no file to give back."""


def _n_owed(connection: Connection) -> int:
    """How many deletions were not wiped from the files yet; kept in the header of the file."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
