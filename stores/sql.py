"""The store: a database, its transactions, the locks on conversations, and the files beside it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, Engine

from memstream.errors import ConversationBusyError
from memstream.stores import migrations, postgres, sqlite


class Database(Protocol):
    """What a store needs of the database under it.

    Attributes:
        engine: begins transactions for reading; with the execution option ``write`` one for writing, of which there is
            one at a time among all processes; with ``durable`` False it need not reach the disk before it is done.
        path: of its file; None where there is none.
        shared: all threads use one connection.
    """

    engine: Engine
    path: Path | None
    shared: bool

    def __str__(self) -> str:
        """For people: where it is, without a password."""

    def explain(self) -> AbstractContextManager[None]:
        """Turns the database's errors into a StoreError that says what to do."""

    def checkpoint(self) -> bool:
        """Takes what was written out of the log into the database; False where another process kept it busy."""

    def owe_wipe(self, connection: Connection) -> bool:
        """Notes that something was deleted, which ``wipe`` will clear away; True where that was noted before."""

    def owes_wipe(self, connection: Connection) -> bool:
        """True where that is noted."""

    def wipe(self, texts: Collection[str] | None = None) -> bool:
        """Removes what deleted rows left behind (``texts``, or whatever it was); False where that could not be done."""

    def lock_conversation(self, conversation_id: int, wait_s: float) -> Callable[[], None] | None:
        """Takes a conversation for this process; returns what gives it back, or None where another has it."""

    def check_owner(self, connection: Connection, conversation_id: int) -> None:
        """Raises StoreError where a conversation is no longer this process's; holds for a transaction that writes."""

    def ask_for(self, conversation_id: int) -> None:
        """Tells the process that has a conversation that it is wanted, where there is a way to tell it."""

    def asked_for(self) -> set[int]:
        """Conversations of this process that others asked for since the last call, and those it has lost."""

    def lock_index(self) -> AbstractContextManager[object]:
        """One process at a time saves the index file."""

    def folder(self, kind: str) -> Path | None:
        """A folder beside the store, made (mode 0700) when first needed; None where there is no place for it."""

    def close(self) -> None:
        """Closes every connection."""


class SqlStore:
    """An open store. Thread safe; several processes may open the same one.

    Attributes:
        database: what it is kept in.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._engine = database.engine
        self._writing = threading.RLock()  # threads queue here rather than poll the database's lock
        self._writer: Connection | None = None  # of the thread that holds it
        self._owned: set[int] = set()  # conversations owned through this object
        self._owned_changed = threading.Condition()

    @classmethod
    def open(cls, url_or_path: str | os.PathLike[str], *, create: bool = True) -> SqlStore:
        """Opens a store, creating it (a file: mode 0600) where there is none, and brings its schema up to date.

        Args:
            url_or_path: a file, ``sqlite:///FILE``, ``postgresql://USER:PASSWORD@HOST/DATABASE``, or ``memory``.
            create: False refuses to create one.

        Raises:
            ConfigError: a kind of database this version cannot open.
            MissingExtraError: the driver of the database is not installed.
            StoreError: it cannot be read, written or created.
            StoreCorruptError: the file is something else, or damaged; it is not changed.
            StoreVersionError: it was written by a newer memstream.
        """
        name = os.fspath(url_or_path)
        made: Callable[..., Database] = postgres.Postgres if postgres.is_url(name) else sqlite.Sqlite
        database = made(name, create=create)
        store = cls(database)
        try:
            with store.read() as connection:
                current = migrations.is_current(connection)
            if not current:  # so a store on a read-only disk can still be read
                with store.write() as connection:
                    migrations.migrate(connection)
                database.checkpoint()
        except BaseException:
            database.close()
            raise
        return store

    def __str__(self) -> str:
        return str(self.database)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for another database, or one in memory."""
        return self.database.path

    @property
    def dialect(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view of the store."""
        alone: AbstractContextManager[object] = self._writing if self.database.shared else nullcontext()
        with alone, self.database.explain(), self._engine.connect() as connection, connection.begin():
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
            with self.database.explain(), self._engine.connect() as connection:
                writer = connection.execution_options(write=True, durable=durable)
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
        return self.database.owe_wipe(connection)

    @property
    def owes_purge(self) -> bool:
        """True where something was deleted and ``purge`` has not wiped it from the files yet."""
        with self.read() as connection:
            return self.database.owes_wipe(connection)

    def purge(self, texts: Collection[str] | None = None) -> bool:
        """Wipes what deleted rows left behind. Returns False where another process kept the store too busy.

        Args:
            texts: what was deleted; None: whatever it was. Pages are written anew where a word of it is left.
        """
        with self._writing:
            return self.database.wipe(texts)

    def lock_conversation(self, conversation_id: int, *, name: str, wait_s: float) -> Callable[[], None]:
        """Takes a conversation for this process, and returns what gives it back.

        A killed process leaves no lock behind: it is the operating system's, or that of a connection to the database.

        Args:
            conversation_id: which.
            name: for the message.
            wait_s: how many seconds to wait for another owner.

        Raises:
            ConversationBusyError: someone else owns it.
        """
        busy = f"conversation {name!r} is open elsewhere (waited {wait_s:g} s); close it there, or wait longer"
        with self._owned_changed:
            if not self._owned_changed.wait_for(lambda: conversation_id not in self._owned, timeout=wait_s):
                raise ConversationBusyError(busy)
            self._owned.add(conversation_id)
        give_back = None
        try:
            give_back = self.database.lock_conversation(conversation_id, wait_s)
        finally:
            if give_back is None:
                self._disown(conversation_id)
        if give_back is None:
            raise ConversationBusyError(busy)
        unlock = give_back

        def release() -> None:
            unlock()
            self._disown(conversation_id)

        return release

    def _disown(self, conversation_id: int) -> None:
        with self._owned_changed:
            self._owned.discard(conversation_id)
            self._owned_changed.notify_all()

    def check_owner(self, connection: Connection, conversation_id: int) -> None:
        """Checks that a conversation that was taken is still this process's, for as long as a transaction writes.

        Args:
            connection: of the transaction.
            conversation_id: which.

        Raises:
            StoreError: it was lost with the connection that held it.
        """
        self.database.check_owner(connection, conversation_id)

    def ask_for(self, conversation_id: int) -> None:
        """Asks the process that owns a conversation to give it up when it can; only over PostgreSQL."""
        self.database.ask_for(conversation_id)

    def asked_for(self) -> set[int]:
        """Conversations to give up soon: others asked for them since the last call, or their lock was lost."""
        return self.database.asked_for()

    def lock_index(self) -> AbstractContextManager[object]:
        """One process at a time saves the index file."""
        return self.database.lock_index()

    @property
    def index_path(self) -> Path | None:
        """Where the vector index is saved; None where no files are kept."""
        return None if self.path is None else Path(f"{self.path}-index")

    def snapshot_path(self, file: str) -> Path | None:
        """Where a snapshot of that name is kept; None where no files are kept."""
        folder = self.database.folder("snapshots")
        return None if folder is None else folder / file

    def close(self) -> None:
        """Closes every connection; SQLite then folds the WAL into the file."""
        self.database.close()
