"""Checking that the store is whole and that words, keys, vectors and index all agree with the turns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from memstream.memory.live_index import LiveIndex
from memstream.stores import fulltext, vectors
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore

_MOST = 20  # problems of one kind that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check of the whole store found.

    Attributes:
        problems: one sentence each; empty when all is well.
        pending: texts whose vectors are still to be made (not a problem).
        counts: number of rows by table.
    """

    problems: tuple[str, ...]
    pending: int
    counts: dict[str, int] = field(default_factory=dict)


def verify(store: SqlStore, index: LiveIndex) -> VerifyReport:
    """Checks everything that can be checked without a model. Reads all of the store; writes nothing."""
    problems: list[str] = []
    with store.write() as connection:  # FTS5 spells its check as an INSERT
        problems += _database(connection)
        if not problems:
            problems += _words(connection)
            problems += _keys(connection)
            problems += _vectors(connection)
            problems += _events(connection)
        counts = {
            table: connection.scalar(select(func.count()).select_from(db.Base.metadata.tables[table])) or 0
            for table in ("conversations", "turns", "facts", "chunks", "embeddings", "turn_embeddings", "snapshots")
        }
        pending = vectors.n_pending(connection)
        files = set(connection.scalars(select(db.Snapshot.file)))
    folder = store.snapshot_path("")
    if folder is not None:
        orphans = sorted(path.name for path in folder.iterdir() if path.name not in files)
        problems += [f"snapshot file {name} belongs to no conversation" for name in orphans[:_MOST]]
    if not problems:
        problems += index.problems()
    return VerifyReport(problems=tuple(problems), pending=pending, counts=counts)


def _database(connection: Connection) -> list[str]:
    """SQLite's own checks."""
    rows = [row[0] for row in connection.execute(text("PRAGMA integrity_check"))]
    found = [f"SQLite: {row}" for row in rows[:_MOST] if row != "ok"]
    broken = connection.execute(text("PRAGMA foreign_key_check")).all()
    found += [f"a row of {row[0]} points to a row of {row[2]} that is not there" for row in broken[:_MOST]]
    try:
        fulltext.check(connection)
    except DBAPIError as error:
        found.append(f"a full-text index differs from its words: {error.orig}")
    return found


def _words(connection: Connection) -> list[str]:
    """Every finished live turn and every fact has its full-text row, with its words and scope, and nothing else."""
    turns = select(db.Turn.id, db.Turn.text, db.Conversation.owner_id, db.Turn.conversation_id).join(db.Conversation)
    live = turns.where(db.Turn.superseded.is_(False), db.Turn.state != "open")
    facts = select(db.Fact.id, db.Fact.text, db.Fact.owner_id, db.Fact.conversation_id)
    found = []
    for name, table, statement in (("turn", "turn_words", live), ("fact", "fact_words", facts)):
        held = {row[0]: (row[1], row[2]) for row in connection.execute(text(f"SELECT rowid, text, scope FROM {table}"))}
        for row_id, value, owner_id, conversation_id in connection.execute(statement):
            expected = (" ".join(fulltext.words(value)), fulltext.scope_words(owner_id, conversation_id))
            there = held.pop(row_id, None)
            if there is None:
                found.append(f"{name}:{row_id} has no full-text row")
            elif there != expected:
                found.append(f"{name}:{row_id} has the full-text row of another text or scope")
        found += [f"a full-text row of {name}:{row_id} is left, but it is gone" for row_id in held]
    return found[:_MOST]


def _keys(connection: Connection) -> list[str]:
    """Keys belong to their conversation's owner, cover live turns, and every finished reply is in a window."""
    live: dict[int, list[int]] = defaultdict(list)
    replies: dict[int, list[int]] = defaultdict(list)
    statement = select(db.Turn.conversation_id, db.Turn.sequence, db.Turn.role, db.Turn.text).where(
        db.Turn.superseded.is_(False), db.Turn.state != "open"
    )
    for conversation_id, sequence, role, value in connection.execute(statement):
        live[conversation_id].append(sequence)
        if role == "assistant" and value.strip():
            replies[conversation_id].append(sequence)
    owners = dict(connection.execute(select(db.Conversation.id, db.Conversation.owner_id)).all())
    covered: dict[int, set[int]] = defaultdict(set)
    found = []
    keys = select(
        db.Chunk.id, db.Chunk.kind, db.Chunk.owner_id, db.Chunk.conversation_id, db.Chunk.first_sequence,
        db.Chunk.last_sequence,
    )  # fmt: skip
    for key in connection.execute(keys):
        if key.conversation_id is not None and owners[key.conversation_id] != key.owner_id:
            found.append(f"chunk {key.id} belongs to another owner than its conversation")
        if key.kind == "fact":
            continue
        ends = {key.first_sequence, key.last_sequence}
        if not ends <= set(live[key.conversation_id]):
            found.append(f"chunk {key.id} begins or ends with a turn that is not live")
        if key.kind == "window":
            covered[key.conversation_id].update(range(key.first_sequence, key.last_sequence + 1))
    for conversation_id, sequences in replies.items():
        missing = [sequence for sequence in sequences if sequence not in covered[conversation_id]]
        found += [f"reply {sequence} of conversation {conversation_id} is in no window" for sequence in missing]
    known = set(connection.scalars(select(db.Turn.id)))
    for derived_id, sources in connection.execute(select(db.Derived.id, db.Derived.sources)):
        if not set(sources) <= known:
            found.append(f"summary {derived_id} was made from a turn that is gone")
    return found[:_MOST]


def _vectors(connection: Connection) -> list[str]:
    """Every vector is of the store's space and of its length; live things only."""
    space = vectors.find_space(connection)
    found = []
    for table in (db.Embedding, db.TurnEmbedding):
        wrong = func.length(table.vector) != (2 * space.dimension if space else 0)
        n = connection.scalar(select(func.count()).select_from(table).where(wrong)) or 0
        if n:
            found.append(f"{n} vectors in {table.__tablename__} have the wrong length")
    stale = select(func.count()).select_from(db.TurnEmbedding).join(db.Turn).where(db.Turn.superseded.is_(True))
    if n := connection.scalar(stale) or 0:
        found.append(f"{n} superseded turns still have a vector")
    return found


def _events(connection: Connection) -> list[str]:
    """The events, replayed from the first, end at exactly the vectors in SQL."""
    replayed = {chunk for chunk, action in vectors.events_after(connection, 0).items() if action == "add"}
    held = set(connection.scalars(select(db.Embedding.chunk_id)))
    if replayed != held:
        return [f"the events tell of {len(replayed)} vectors, the store holds {len(held)}"]
    return []
