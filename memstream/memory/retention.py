"""Forgetting what is older than it may be: the same path as forgetting one memory, in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, func, select

from memstream.errors import ConversationBusyError, InputError
from memstream.memory import forgetting, keys
from memstream.memory.exporting import Part
from memstream.stores import fulltext, rows
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore

_BATCH = 500  # turns or facts forgotten in one transaction


@dataclass(slots=True)
class Expired:
    """What was removed, and what has to follow.

    Attributes:
        removed: rows by table.
        n_snapshots: files deleted.
        kept: turns left because their exchange is being said.
        summaries: conversations and turns whose summary was removed with an older turn.
    """

    removed: Counter[str] = field(default_factory=Counter)
    n_snapshots: int = 0
    kept: int = 0
    summaries: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


def check_before(before: datetime) -> None:
    """Refuses a time without a zone or one that is still to come.

    Raises:
        InputError: naming it.
    """
    if before.tzinfo is None or before > db.now():
        raise InputError(f"before is {before}; it must be a time in the past with its zone, such as datetime.now(UTC)")


def _old_turns(before: datetime) -> ColumnElement[bool]:
    return and_(db.Turn.created < before, db.Turn.state != "open")


def _old_facts(before: datetime, part: Part, pinned: bool) -> Select[int, int]:
    statement = (
        select(db.Fact.id, db.Fact.owner_id)
        .join(db.Owner, db.Owner.id == db.Fact.owner_id)
        .outerjoin(db.Pin, db.Pin.fact_id == db.Fact.id)
        .where(part.owners(), db.Fact.created < before)
    )
    return statement if pinned else statement.where(db.Pin.fact_id.is_(None))


def count(connection: Connection, before: datetime, part: Part, *, pinned: bool) -> Counter[str]:
    """How many turns and facts there are that are older."""
    turns = select(db.Turn.id).join(db.Conversation).join(db.Owner).where(part.conversations(), _old_turns(before))
    found = {"turns": turns, "facts": _old_facts(before, part, pinned)}
    return Counter(
        {
            name: connection.scalar(select(func.count()).select_from(what.subquery())) or 0
            for name, what in found.items()
        }
    )


def expire(store: SqlStore, before: datetime, part: Part, *, pinned: bool) -> Expired:
    """Removes what is older and everything made from it, in short transactions; the caller purges the files."""
    done = Expired()
    old = and_(part.conversations(), db.Turn.created < before)
    with store.read() as connection:
        statement = select(db.Turn.conversation_id).join(db.Conversation).join(db.Owner).where(old).distinct()
        conversation_ids = sorted(connection.scalars(statement))
    for conversation_id in conversation_ids:
        while _turns(store, conversation_id, before, done):
            pass
    while _facts(store, _old_facts(before, part, pinned).limit(_BATCH), done):
        pass
    return done


def _turns(store: SqlStore, conversation_id: int, before: datetime, done: Expired) -> bool:
    """Removes the next batch of a conversation's old turns. Returns whether there may be more."""
    with store.write() as connection, _said_now(store, connection, conversation_id) as (said_from, free):
        mine = and_(db.Turn.conversation_id == conversation_id, _old_turns(before))
        statement = select(db.Turn.id, db.Turn.sequence).where(mine, db.Turn.sequence < said_from)
        batch = connection.execute(statement.order_by(db.Turn.sequence).limit(_BATCH)).all()
        if batch:
            _remove(store, connection, conversation_id, {row.id: row.sequence for row in batch}, done)
        if len(batch) == _BATCH:
            return True
        done.kept += connection.scalar(select(func.count()).select_from(db.Turn).where(mine)) or 0
        if free and batch:
            _remove_empty(connection, conversation_id, before, done)
        return False


def _remove(
    store: SqlStore, connection: Connection, conversation_id: int, turns: dict[int, int], done: Expired
) -> None:
    """Removes turns (sequences by id) with their words, vectors, keys, and the owner's snapshots."""
    store.owe_purge(connection)
    done.n_snapshots += forgetting.drop_snapshots(store, connection, rows.owner_of(connection, conversation_id))
    ids = list(turns)
    words = fulltext.drop_turns(connection, ids)
    own = connection.execute(delete(db.TurnEmbedding).where(db.TurnEmbedding.turn_id.in_(ids))).rowcount
    gone = connection.execute(delete(db.Turn).where(db.Turn.id.in_(ids))).rowcount
    removed, lost = keys.remove_keys(connection, conversation_id, turns.values())
    done.removed.update({"turns": gone, "words": words, "turn_embeddings": own, **removed})
    for sources in lost:
        left = tuple(source for source in sources if source not in turns)
        if left:
            done.summaries.append((conversation_id, left))


def _remove_empty(connection: Connection, conversation_id: int, before: datetime, done: Expired) -> None:
    """Removes an old conversation in which nothing is left."""
    turns = select(db.Turn.id).where(db.Turn.conversation_id == conversation_id).exists()
    facts = select(db.Fact.id).where(db.Fact.conversation_id == conversation_id).exists()
    empty = and_(db.Conversation.id == conversation_id, db.Conversation.created < before, ~turns, ~facts)
    done.removed["conversations"] += connection.execute(delete(db.Conversation).where(empty)).rowcount


@contextmanager
def _said_now(store: SqlStore, connection: Connection, conversation_id: int) -> Iterator[tuple[int, bool]]:
    """The sequence from which on an exchange is being said, beyond all where none is; and whether nobody has the
    conversation open, who then cannot open it meanwhile. A reply that a killed process left open is cut."""
    with ExitStack() as owned:
        try:
            owned.callback(store.lock_conversation(conversation_id, name=str(conversation_id), wait_s=0.0))
        except ConversationBusyError:
            yield _exchange_from(connection, conversation_id), False
            return
        for turn_id in rows.open_turns(connection, conversation_id):
            rows.finish_turn(connection, conversation_id, turn_id, None, None, "cut")
            keys.add_windows(connection, conversation_id)
        yield rows.NO_SEQUENCE, True


def _exchange_from(connection: Connection, conversation_id: int) -> int:
    """Where the last exchange begins, unless its reply has ended."""
    of_conversation = (db.Turn.conversation_id == conversation_id, db.Turn.superseded.is_(False))
    columns = select(db.Turn.sequence, db.Turn.role, db.Turn.state)
    newest = connection.execute(columns.where(*of_conversation).order_by(db.Turn.sequence.desc()).limit(1)).first()
    if newest is None or (newest.role == "assistant" and newest.state != "open"):
        return rows.NO_SEQUENCE
    asked = select(func.max(db.Turn.sequence)).where(*of_conversation, db.Turn.role == "user")
    found = connection.scalar(asked)
    return newest.sequence if found is None else found


def _facts(store: SqlStore, old: Select[int, int], done: Expired) -> bool:
    """Removes the next batch of old facts. Returns whether there may be more."""
    with store.write() as connection:
        batch = connection.execute(old).all()
        if batch:
            store.owe_purge(connection)
        for owner_id in sorted({row.owner_id for row in batch}):
            done.n_snapshots += forgetting.drop_snapshots(store, connection, owner_id)
        for row in batch:
            done.removed.update(forgetting.remove_fact(connection, row.id))
    return len(batch) == _BATCH
