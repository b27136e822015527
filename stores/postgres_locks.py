"""Which conversations this process owns in PostgreSQL, and who else wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from memstream.stores.migrations import APPLICATION_ID

_CHANNEL = "memstream_wanted"
_HELD = (
    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = %s AND objid = %s "
    "AND pid = %s AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)


class Locks:
    """Advisory locks of one connection, which end with it. Thread safe.

    The same connection hears which conversations other processes ask for.

    Args:
        connect: makes a connection of the driver's own, where each statement is its own transaction.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connection: Any = None
        self._pid = 0  # of the server's process behind it
        self._guard = threading.Lock()
        self._held: set[int] = set()
        self._lost: set[int] = set()  # taken, and gone with their connection
        self._asked: set[int] = set()

    def take(self, conversation_id: int) -> bool:
        """Takes a conversation; False where another process has it."""
        with self._guard:
            taken = self._execute("SELECT pg_try_advisory_lock(%s, %s)", APPLICATION_ID, conversation_id)
            if taken:
                self._held.add(conversation_id)
            return bool(taken)

    def give_back(self, conversation_id: int) -> None:
        """Gives a conversation back, unless it is lost already."""
        import psycopg

        with self._guard:
            self._lost.discard(conversation_id)
            if conversation_id in self._held:
                self._held.discard(conversation_id)
                try:
                    self._connection.execute("SELECT pg_advisory_unlock(%s, %s)", (APPLICATION_ID, conversation_id))
                except psycopg.Error:  # the lock went with the connection
                    self._lose()

    def holds(self, connection: Connection, conversation_id: int) -> bool:
        """Whether a conversation is this process's, as the transaction of ``connection`` sees it.

        Asked by a writer, this holds until it commits: the next owner writes after it.
        """
        with self._guard:
            if conversation_id not in self._held:
                return False
            pid = self._pid
        return bool(connection.exec_driver_sql(_HELD, (APPLICATION_ID, conversation_id, pid)).scalar())

    def ask_for(self, conversation_id: int) -> None:
        """Tells the process that has a conversation that it is wanted."""
        with self._guard:
            self._execute("SELECT pg_notify(%s, %s)", _CHANNEL, str(conversation_id))

    def asked_for(self) -> set[int]:
        """What was taken and is asked for since the last call, or lost."""
        import psycopg

        with self._guard:
            if self._held:
                try:
                    self._connection.execute("SELECT 1")  # brings what was asked for
                except psycopg.Error:
                    self._lose()
            asked, self._asked = self._asked & self._held, set()
            return asked | self._lost

    def close(self) -> None:
        """Closes the connection, which gives everything back."""
        with self._guard:
            self._lose()
            self._lost.clear()

    def _execute(self, statement: str, *values: object) -> Any:
        """The one value of a statement's answer; on a new connection where there is none any more."""
        import psycopg

        if self._connection is not None:
            try:
                return self._connection.execute(statement, values).fetchone()[0]
            except psycopg.OperationalError:
                self._lose()
        self._connection = self._connect()
        self._pid = self._connection.info.backend_pid
        self._connection.add_notify_handler(lambda notice: self._asked.add(int(notice.payload)))
        self._connection.execute(f"LISTEN {_CHANNEL}")
        return self._connection.execute(statement, values).fetchone()[0]

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._lost |= self._held
        self._held.clear()
