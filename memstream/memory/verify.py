"""Checking that the store is whole and that words, keys, vectors and index all agree with the turns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, null, select, text
from sqlalchemy.exc import DBAPIError

from memstream.memory.live_index import SearchIndex
from memstream.stores import fulltext, vectors
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore

_MOST = 20  # problems of one kind that are listed
_COUNTED = (
    "conversations", "turns", "facts", "documents", "passages", "chunks", "embeddings", "turn_embeddings", "snapshots",
)  # fmt: skip


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


def verify(store: SqlStore, index: SearchIndex) -> VerifyReport:
    """Checks everything that can be checked without a model. Reads all of the store; writes nothing."""
    problems: list[str] = []
    with store.write() as connection:  # FTS5 spells its check as an INSERT
        problems += _database(connection)
        if not problems:
            problems += _words(connection)
            problems += _keys(connection)
            problems += _passages(connection)
            problems += _vectors(connection)
            problems += _events(connection)
        counts = {
            table: connection.scalar(select(func.count()).select_from(db.Base.metadata.tables[table])) or 0
            for table in _COUNTED
        }
        space = vectors.find_space(connection)
        n_texts = counts["chunks"] + counts["turns"]
        pending = n_texts if space is None else len(vectors.pending(connection, space, n_texts))
        files = set(connection.scalars(select(db.Snapshot.file)))
    folder = store.snapshot_path("")
    if folder is not None:
        orphans = sorted(path.name for path in folder.iterdir() if path.name not in files)
        problems += [f"snapshot file {name} belongs to no conversation" for name in orphans[:_MOST]]
    if not problems:
        problems += index.problems()
    return VerifyReport(problems=tuple(problems), pending=pending, counts=counts)


def _database(connection: Connection) -> list[str]:
    """SQLite's own checks; PostgreSQL sees to itself."""
    if connection.dialect.name != "sqlite":
        return []
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
    """Every finished live turn, fact and passage has its full-text row, with its words and scope, and nothing else."""
    turns = select(db.Turn.id, db.Turn.text, db.Conversation.owner_id, db.Turn.conversation_id).join(db.Conversation)
    live = turns.where(db.Turn.superseded.is_(False), db.Turn.state != "open")
    facts = select(db.Fact.id, db.Fact.text, db.Fact.owner_id, db.Fact.conversation_id)
    found_by = db.Passage.heading + "\n" + db.Passage.text
    passages = select(db.Passage.id, found_by, db.Document.owner_id, null()).join(db.Document)
    found = []
    for name, table, statement in (
        ("turn", "turn_words", live),
        ("fact", "fact_words", facts),
        ("passage", "passage_words", passages),
    ):
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
        if key.kind in ("fact", "passage"):
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


def _passages(connection: Connection) -> list[str]:
    """Every passage is as long as it says, follows the one before, and has one key of its owner, with its text."""
    keys: dict[int | None, list[tuple[int, str]]] = defaultdict(list)
    statement = select(db.Chunk.passage_id, db.Chunk.owner_id, db.Chunk.text).where(db.Chunk.kind == "passage")
    for passage_id, owner_id, value in connection.execute(statement):
        keys[passage_id].append((owner_id, value))
    found, before = [], (0, 0)
    passages = (
        select(
            db.Passage.id, db.Passage.document_id, db.Passage.first, db.Passage.last, db.Passage.text,
            db.Document.owner_id,
        )
        .join(db.Document)
        .order_by(db.Passage.document_id, db.Passage.position)
    )  # fmt: skip
    for passage in connection.execute(passages):
        if passage.last - passage.first != len(passage.text):
            found.append(f"passage:{passage.id} is not as long as it says")
        if before[0] == passage.document_id and passage.first < before[1]:
            found.append(f"passage:{passage.id} begins before the one before it ends")
        before = (passage.document_id, passage.last)
        mine = keys.pop(passage.id, [])
        if len(mine) != 1:
            found.append(f"passage:{passage.id} has {len(mine)} keys")
        elif mine[0][0] != passage.owner_id or not mine[0][1].endswith(passage.text):
            found.append(f"the key of passage:{passage.id} is of another text or owner")
    found += [f"a key of passage:{number} is left, but it is gone" for number in keys]
    return found[:_MOST]


def _vectors(connection: Connection) -> list[str]:
    """Every vector is of the length of its space, in the scope of its chunk; live things only."""
    found = []
    for table in (db.Embedding, db.TurnEmbedding):
        is_halfvec = connection.dialect.name == "postgresql" and table is db.Embedding
        dimension = func.vector_dims(table.vector) if is_halfvec else func.length(table.vector) / 2.0
        wrong = select(func.count()).select_from(table).join(db.Space).where(dimension != db.Space.dimension)
        if n := connection.scalar(wrong) or 0:
            found.append(f"{n} vectors in {table.__tablename__} have the wrong length")
    elsewhere = select(func.count()).select_from(db.Embedding).join(db.Chunk).join(db.Owner)
    if n := connection.scalar(elsewhere.where(db.Embedding.scope != vectors.SCOPE)) or 0:
        found.append(f"{n} vectors are in another scope than their chunk")
    stale = select(func.count()).select_from(db.TurnEmbedding).join(db.Turn).where(db.Turn.superseded.is_(True))
    if n := connection.scalar(stale) or 0:
        found.append(f"{n} superseded turns still have a vector")
    return found


def _events(connection: Connection) -> list[str]:
    """The events, replayed from the first, end at exactly the vectors in SQL."""
    replayed = {chunk for chunk, action in vectors.events_after(connection, 0).items() if action == "add"}
    held = set(connection.scalars(select(db.Embedding.chunk_id).join(db.Space).where(db.Space.serving)))
    if replayed != held:
        return [f"the events tell of {len(replayed)} vectors, the store holds {len(held)}"]
    return []
