"""One open conversation: every turn goes to the store through it, at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from sqlalchemy import Connection, delete, insert, select

from memstream.errors import StoreError
from memstream.memory import keys
from memstream.stores import rows
from memstream.stores import schema as db
from memstream.stores.base import Scope
from memstream.stores.rows import Turn
from memstream.stores.schema import TurnState
from memstream.stores.sql import SqlStore


class ConversationHandle:
    """Owns a conversation until it is closed. Made by ``Memory.open_conversation``.

    Attributes:
        id: the conversation's number.
        scope: whose it is; never changes.
    """

    def __init__(
        self,
        store: SqlStore,
        conversation_id: int,
        scope: Scope,
        *,
        release: Callable[[], None],
        indexed: Callable[[], None],
        summarise: Callable[[int, tuple[int, ...]], None],
        catch_up: Callable[[int, int], None],
    ) -> None:
        self.id = conversation_id
        self.scope = scope
        self._store = store
        self._release: Callable[[], None] | None = release
        self._indexed = indexed
        self._summarise = summarise
        self._catch_up: Callable[[int, int], None] | None = catch_up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the conversation back; closing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _check_open(self) -> None:
        if self._release is None:
            raise StoreError(f"conversation {self.scope.conversation!r} was closed; open it again")

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """A transaction for as long as which the conversation is this process's."""
        self._check_open()
        with self._store.write() as connection:
            self._store.check_owner(connection, self.id)
            yield connection

    def begin_turn(self, role: str, text: str, n_tokens: int, said: datetime | None = None) -> int:
        """Commits a turn before anything else happens; an assistant's turn stays open until it is finished.

        NUL and lone surrogates, which no database holds as text, become U+FFFD.

        Args:
            role: ``user``, ``assistant`` or another.
            text: what was said; for an assistant usually nothing yet.
            n_tokens: its length in tokens of the chat model.
            said: when, of what is taken over from elsewhere; None means now.

        Returns:
            The turn's id.
        """
        with self._write() as connection:
            state: TurnState = "open" if role == "assistant" else "complete"
            return rows.insert_turn(connection, self.id, role, text, n_tokens, state, said)

    def finish_turn(
        self, turn_id: int, text: str, n_tokens: int, state: Literal["complete", "cut"], *, role: str = "assistant"
    ) -> None:
        """Commits the end of an open turn with its full-text row and windows; vectors follow in the background.

        Args:
            turn_id: from ``begin_turn``.
            text: what was said in the end.
            n_tokens: its length in tokens of the chat model.
            state: ``cut`` where the turn was interrupted.
            role: ``call`` where it turned out to be one.

        Raises:
            InputError: it is not an open turn of this conversation.
        """
        with self._write() as connection:
            rows.finish_turn(connection, self.id, turn_id, text, n_tokens, state, role)
            keys.add_windows(connection, self.id)
        self._indexed()

    def turns(self, *, live_only: bool = True, first: int | None = None) -> list[Turn]:
        """The turns in order, from sequence ``first`` on; ``live_only`` leaves out superseded ones."""
        with self._store.read() as connection:
            return rows.turns(connection, self.id, live_only=live_only, first=first)

    def turns_before(self, sequence: int, n: int) -> list[Turn]:
        """The last ``n`` finished live turns before a sequence, in order."""
        with self._store.read() as connection:
            return rows.turns_before(connection, self.id, sequence, n)

    def turn(self, turn_id: int) -> Turn:
        """One turn, as stored."""
        with self._store.read() as connection:
            return rows.turns_by_id(connection, [turn_id])[turn_id]

    def n_forgotten(self) -> int:
        """How often something of this conversation's owner was forgotten, by whatever process."""
        with self._store.read() as connection:
            return rows.n_forgotten(connection, self.id)

    def next_sequence(self) -> int:
        """The sequence that the next turn will have."""
        with self._store.read() as connection:
            return rows.next_sequence(connection, self.id)

    def supersede(self, turn_ids: Collection[int]) -> None:
        """Keeps turns that were undone, edited or regenerated, but never recalls them again; a snapshot that may have
        seen them is not found any more.

        Raises:
            InputError: one is not a turn of this conversation, or still being said.
        """
        with self._write() as connection:
            sequences = rows.supersede(connection, self.id, turn_ids)
            _, lost = keys.remove_keys(connection, self.id, sequences)
            connection.execute(delete(db.Snapshot).where(db.Snapshot.conversation_id == self.id))
            if (path := self.snapshot_path) is not None:
                _delete(path)
        gone = set(turn_ids)
        for sources in lost:
            self._summarise(self.id, tuple(source for source in sources if source not in gone))
        self._indexed()

    def evicted(self, turn_ids: Collection[int]) -> None:
        """Has turns that left the window summarised in the background, as one more key to them."""
        self._check_open()
        self._summarise(self.id, tuple(turn_ids))

    def window_begins(self, sequence: int) -> None:
        """Has the exchanges before a sequence summarised that an earlier process did not come to; once a handle."""
        self._check_open()
        catch_up, self._catch_up = self._catch_up, None
        if catch_up is not None:
            catch_up(self.id, sequence)

    # --- snapshots of the cache

    @property
    def snapshot_path(self) -> Path | None:
        """Where this conversation's snapshot belongs; None for a store in memory, which keeps nothing on disk."""
        return self._store.snapshot_path(f"{self.id}.snapshot")

    def record_snapshot(self, fingerprint: str, last_sequence: int, n_forgotten: int) -> None:
        """Notes that ``snapshot_path`` was written, and for which model and last turn.

        Args:
            fingerprint: of the model.
            last_sequence: of the last turn in it.
            n_forgotten: the owner's count when the cache was loaded. Where something was forgotten since, the file has
                seen it and is deleted.

        Raises:
            StoreError: there is no such file.
        """
        self._check_open()
        path = self.snapshot_path
        if path is None:
            raise StoreError("a store in memory keeps no snapshots")
        try:
            os.chmod(path, 0o600)
        except OSError as error:
            raise StoreError(f"cannot record the snapshot {path}: {error.strerror}") from error
        with self._write() as connection:
            connection.execute(delete(db.Snapshot).where(db.Snapshot.conversation_id == self.id))
            if rows.n_forgotten(connection, self.id) != n_forgotten:
                path.unlink(missing_ok=True)
                return
            connection.execute(
                insert(db.Snapshot).values(
                    conversation_id=self.id,
                    fingerprint=fingerprint,
                    last_sequence=last_sequence,
                    file=path.name,
                    created=db.now(),
                )
            )

    def make_room(self, n_bytes: int, room_bytes: int) -> bool:
        """Deletes the oldest snapshots of the store until one more fits; each costs one prefill when it is missed.

        Args:
            n_bytes: size of the one that is to be written.
            room_bytes: what all of them may take.

        Returns:
            False where that one alone takes more.

        Raises:
            StoreError: the disk refused.
        """
        self._check_open()
        if n_bytes > room_bytes:
            return False
        others = select(db.Snapshot.conversation_id, db.Snapshot.file).where(db.Snapshot.conversation_id != self.id)
        with self._store.write() as connection:
            for conversation_id, file in connection.execute(others.order_by(db.Snapshot.created.desc())).all():
                path = self._store.snapshot_path(file)
                assert path is not None, "a store without files has no snapshots"
                n_bytes += path.stat().st_size if path.exists() else 0
                if n_bytes > room_bytes:
                    _delete(path)
                    connection.execute(delete(db.Snapshot).where(db.Snapshot.conversation_id == conversation_id))
        return True

    def find_snapshot(self, fingerprint: str, last_sequence: int) -> Path | None:
        """The snapshot's file if it is of exactly this model and last turn."""
        with self._store.read() as connection:
            file = connection.scalar(
                select(db.Snapshot.file).where(
                    db.Snapshot.conversation_id == self.id,
                    db.Snapshot.fingerprint == fingerprint,
                    db.Snapshot.last_sequence == last_sequence,
                )
            )
        path = None if file is None else self._store.snapshot_path(file)
        return path if path is not None and path.exists() else None


def _delete(snapshot: Path) -> None:
    try:
        snapshot.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot delete the snapshot {snapshot}: {error.strerror}") from error


def sweep_snapshots(store: SqlStore, connection: Connection, conversation_id: int) -> None:
    """Removes what a killed process left of a conversation's snapshots: files that are not recorded.

    For whoever owns the conversation; a forget that came in between may have missed them.
    """
    if store.path is None:
        return
    known = connection.scalar(select(db.Snapshot.file).where(db.Snapshot.conversation_id == conversation_id))
    for file in Path(f"{store.path}-snapshots").glob(f"{conversation_id}.snapshot*"):
        if file.name != known:
            file.unlink(missing_ok=True)
