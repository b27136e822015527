"""What must agree in a store, check by check: each difference is a sentence, and how it is mended from the turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import Connection, and_, delete, func, insert, null, select, text
from sqlalchemy.exc import DBAPIError

from memstream.memory import facts, keys
from memstream.stores import documents, fulltext, vectors
from memstream.stores import schema as db

_PAGE = 500
_OF_INDEX = re.compile(r"row \d+ missing from index|wrong # of entries in index|non-unique entry in index")
_DERIVED = ("chunks", "derived", "embeddings", "turn_embeddings", "pins", "snapshots")  # tables that hold no words


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not agree.

    Attributes:
        what: a sentence.
        deed: what ``mend`` does, for people.
        mend: repairs it in a transaction that writes; None where only a person can.
    """

    what: str
    deed: str = ""
    mend: Callable[[Connection], object] | None = None


def database(connection: Connection) -> Iterator[Problem]:
    """SQLite's own checks; PostgreSQL sees to itself."""
    if connection.dialect.name != "sqlite":
        return
    found = [row[0] for row in connection.execute(text("PRAGMA integrity_check")) if row[0] != "ok"]
    only_indexes = all(_OF_INDEX.match(row) for row in found)
    for row in found:
        yield Problem(f"SQLite: {row}", "built SQLite's indexes anew", _reindex if only_indexes else None)
    for table, row_id, parent, _ in connection.execute(text("PRAGMA foreign_key_check")).all():
        mend = partial(_drop_row, table=table, row_id=row_id) if table in _DERIVED else None
        yield Problem(f"a row of {table} points to a row of {parent} that is not there", "removed it", mend)


def _reindex(connection: Connection) -> None:
    connection.execute(text("REINDEX"))


def _drop_row(connection: Connection, table: str, row_id: int) -> None:
    connection.execute(text(f"DELETE FROM {table} WHERE rowid = :id"), {"id": row_id})


def full_text(connection: Connection) -> Iterator[Problem]:
    """FTS5's own check, which it spells as an INSERT: for a transaction that writes."""
    if connection.dialect.name != "sqlite":
        return
    try:
        fulltext.check(connection)
    except DBAPIError as error:
        yield Problem(f"a full-text index differs from its words: {error.orig}", "built it anew", fulltext.rebuild)


def contents(connection: Connection) -> Iterator[Problem]:
    """Words, keys, vectors and events against turns and facts."""
    yield from _words(connection)
    yield from _sizes(connection)
    for conversation in connection.execute(select(db.Conversation.id, db.Conversation.owner_id)):
        yield from _keys(connection, conversation.id, conversation.owner_id)
    yield from _fact_keys(connection)
    yield from _passages(connection)
    yield from _vectors(connection)
    yield from _events(connection)


def _words(connection: Connection) -> Iterator[Problem]:
    """Every finished live turn, fact and passage has its full-text row, with its words and scope, and nothing else."""
    turns = select(db.Turn.id, db.Turn.text, db.Conversation.owner_id, db.Turn.conversation_id).join(db.Conversation)
    live = turns.where(db.Turn.superseded.is_(False), db.Turn.state != "open").order_by(db.Turn.id)
    told = select(db.Fact.id, db.Fact.text, db.Fact.owner_id, db.Fact.conversation_id).order_by(db.Fact.id)
    found_by = db.Passage.heading + "\n" + db.Passage.text
    passages = select(db.Passage.id, found_by, db.Document.owner_id, null()).join(db.Document).order_by(db.Passage.id)
    for name, add, drop, statement in (
        ("turn", fulltext.add_turn, fulltext.drop_turns, live),
        ("fact", fulltext.add_fact, fulltext.drop_facts, told),
        ("passage", _add_passage, fulltext.drop_passages, passages),
    ):
        held = connection.execute(text(f"SELECT rowid, text, scope FROM {name}_words ORDER BY rowid"))
        for row, there in _side_by_side(connection.execute(statement), held):
            if row is None:
                what, deed = f"a full-text row of {name}:{there[0]} is left, but it is gone", "removed it"
                yield Problem(what, deed, partial(_drop_words, drop=drop, row_id=there[0]))
                continue
            add_again = partial(_write_words, add=add, drop=drop, row=tuple(row))
            if there is None:
                yield Problem(f"{name}:{row[0]} has no full-text row", "wrote it", add_again)
            elif (there[1], there[2]) != (" ".join(fulltext.words(row[1])), fulltext.scope_words(row[2], row[3])):
                yield Problem(f"{name}:{row[0]} has the full-text row of another text or scope", "wrote it", add_again)


def _sizes(connection: Connection) -> Iterator[Problem]:
    """The store knows how many full-text rows each scope has."""
    rows = connection.execute(select(db.Size.words, db.Size.scope, db.Size.n))
    if Counter({(words, scope): n for words, scope, n in rows}) != fulltext.count(connection):
        yield Problem("a scope has another number of full-text rows than is noted", "counted them", fulltext.recount)


def _side_by_side(left: Iterable[Any], right: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Rows of two lists in the order of their first column; None where one list has no such row."""
    ours, theirs = iter(left), iter(right)
    one, other = next(ours, None), next(theirs, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            yield one, None
            one = next(ours, None)
        elif one is None or other[0] < one[0]:
            yield None, other
            other = next(theirs, None)
        else:
            yield one, other
            one, other = next(ours, None), next(theirs, None)


def _add_passage(connection: Connection, passage_id: int, owner_id: int, _: int | None, value: str) -> None:
    fulltext.add_passage(connection, passage_id, owner_id, value)


def _drop_words(connection: Connection, drop: Any, row_id: int) -> None:
    drop(connection, [row_id])


def _write_words(connection: Connection, add: Any, drop: Any, row: tuple[int, str, int, int | None]) -> None:
    row_id, value, owner_id, conversation_id = row
    drop(connection, [row_id])
    add(connection, row_id, owner_id, conversation_id, value)


def _keys(connection: Connection, conversation_id: int, owner_id: int) -> Iterator[Problem]:
    """Keys are their conversation's owner's, say what live turns say, and every finished reply is in a window."""
    mine = (db.Turn.conversation_id == conversation_id, db.Turn.superseded.is_(False), db.Turn.state != "open")
    live = dict(connection.execute(select(db.Turn.sequence, db.Turn.id).where(*mine)).all())
    covered: set[int] = set()
    statement = (
        select(db.Chunk, db.Derived.id.label("derived_id"), db.Derived.sources)
        .outerjoin(db.Derived, db.Derived.chunk_id == db.Chunk.id)
        .where(db.Chunk.conversation_id == conversation_id)
        .order_by(db.Chunk.last_sequence, db.Chunk.first_sequence, db.Chunk.id)
    )
    for page in connection.execute(statement.execution_options(yield_per=_PAGE)).partitions(_PAGE):
        windows = [key for key in page if key.kind == "window"]
        spans = [(key.first_sequence, key.last_sequence) for key in windows]
        said = keys.window_texts(connection, conversation_id, spans) if spans else []
        expected = {key.id: value for key, value in zip(windows, said, strict=True)}
        for key in page:
            wrong = _wrong_key(key, owner_id, live, expected)
            if wrong is not None:
                yield Problem(wrong, "removed it", partial(vectors.delete_chunks, chunk_ids=[key.id]))
            elif key.kind == "window":
                covered.update(range(key.first_sequence, key.last_sequence + 1))
    replies = select(db.Turn.sequence, db.Turn.text).where(*mine, db.Turn.role == "assistant")
    for sequence, value in connection.execute(replies.order_by(db.Turn.sequence)):
        if sequence not in covered and value.strip():
            what = f"reply {sequence} of conversation {conversation_id} is in no window"
            yield Problem(what, "made windows", partial(keys.cover, conversation_id=conversation_id))


def _wrong_key(key: Any, owner_id: int, live: dict[int, int], expected: dict[int, str]) -> str | None:
    """What is wrong with a key of a conversation; None where nothing is."""
    if key.owner_id != owner_id:
        return f"chunk {key.id} belongs to another owner than its conversation"
    if key.kind == "fact" and key.fact_id is not None:
        return None
    if not {key.first_sequence, key.last_sequence} <= live.keys():
        return f"chunk {key.id} begins or ends with a turn that is not live"
    if key.kind == "window":
        return None if key.text == expected[key.id] else f"chunk {key.id} says something else than its turns"
    if key.derived_id is None:
        return f"chunk {key.id} is a {key.kind} of unknown turns"
    if not set(key.sources) <= set(live.values()):
        return f"{key.kind} {key.derived_id} was made from a turn that is gone"
    return None


def _fact_keys(connection: Connection) -> Iterator[Problem]:
    """Every fact has one key, with its text and owner."""
    statement = select(
        db.Fact, db.Chunk.id.label("chunk_id"), db.Chunk.text.label("said"), db.Chunk.owner_id.label("of")
    ).outerjoin(db.Chunk, db.Chunk.fact_id == db.Fact.id)
    for fact in connection.execute(statement.order_by(db.Fact.id)):
        if fact.chunk_id is None:
            values = {"owner_id": fact.owner_id, "conversation_id": fact.conversation_id, "text": fact.text}
            yield Problem(f"fact:{fact.id} has no key", "made it", partial(facts.add_key, fact_id=fact.id, **values))
        elif (fact.said, fact.of) != (fact.text, fact.owner_id):
            what = f"chunk {fact.chunk_id} says something else than fact:{fact.id}"
            yield Problem(what, "removed it", partial(vectors.delete_chunks, chunk_ids=[fact.chunk_id]))


def _passages(connection: Connection) -> Iterator[Problem]:
    """Every passage is as long as it says, follows the one before, and has one key of its owner, with its text."""
    statement = (
        select(
            db.Passage.id, db.Passage.document_id, db.Passage.first, db.Passage.last, db.Passage.heading,
            db.Passage.text, db.Document.owner_id, db.Chunk.id.label("chunk_id"), db.Chunk.owner_id.label("of"),
            db.Chunk.text.label("said"),
        )
        .join(db.Document)
        .outerjoin(db.Chunk, db.Chunk.passage_id == db.Passage.id)
        .order_by(db.Passage.document_id, db.Passage.position, db.Chunk.id)
    )  # fmt: skip
    before: Any = None
    for row in connection.execute(statement):
        if row.last - row.first != len(row.text):
            yield Problem(f"passage:{row.id} is not as long as it says; add its document again")
        elif before is not None and _overlap(before, row):
            yield Problem(f"passage:{row.id} begins before the one before it ends; add its document again")
        if row.chunk_id is None:
            key = f"{row.heading}\n{row.text}" if row.heading else row.text
            make = partial(documents.add_key, owner_id=row.owner_id, passage_id=row.id, text=key)
            yield Problem(f"passage:{row.id} has no key", "made it", make)
        elif before is not None and before.id == row.id:
            gone = partial(vectors.delete_chunks, chunk_ids=[row.chunk_id])
            yield Problem(f"passage:{row.id} has more keys than one", "removed the newer", gone)
        elif row.of != row.owner_id or not row.said.endswith(row.text):
            gone = partial(vectors.delete_chunks, chunk_ids=[row.chunk_id])
            yield Problem(f"the key of passage:{row.id} is of another text or owner", "removed it", gone)
        before = row
    orphans = select(db.Chunk.id).where(db.Chunk.kind == "passage", db.Chunk.passage_id.is_(None))
    for chunk_id in connection.scalars(orphans):
        gone = partial(vectors.delete_chunks, chunk_ids=[chunk_id])
        yield Problem(f"chunk {chunk_id} is the key of no passage", "removed it", gone)


def _overlap(before: Any, row: Any) -> bool:
    return bool(before.document_id == row.document_id and before.id != row.id and row.first < before.last)


def _vectors(connection: Connection) -> Iterator[Problem]:
    """Every vector has the length of its space and length 1, is in its chunk's scope, and is of live things only."""
    for space_id, dimension in connection.execute(select(db.Space.id, db.Space.dimension)).all():
        for table, key in ((db.Embedding, db.Embedding.chunk_id), (db.TurnEmbedding, db.TurnEmbedding.turn_id)):
            yield from _lengths(connection, table, key, space_id, dimension)
    scope = select(vectors.SCOPE).select_from(db.Chunk).join(db.Owner).where(db.Chunk.id == db.Embedding.chunk_id)
    elsewhere = db.Embedding.scope != scope.scalar_subquery()
    if n := connection.scalar(select(func.count()).select_from(db.Embedding).where(elsewhere)) or 0:
        drop = partial(_drop_where, table=db.Embedding, condition=elsewhere)
        yield Problem(f"{n} vectors are in another scope than their chunk", "removed them, to be made again", drop)
    stale = db.TurnEmbedding.turn_id.in_(select(db.Turn.id).where(db.Turn.superseded.is_(True)))
    if n := connection.scalar(select(func.count()).select_from(db.TurnEmbedding).where(stale)) or 0:
        drop = partial(_drop_where, table=db.TurnEmbedding, condition=stale)
        yield Problem(f"{n} superseded turns still have a vector", "removed it", drop)


def _lengths(connection: Connection, table: Any, key: Any, space_id: int, dimension: int) -> Iterator[Problem]:
    name = table.__tablename__
    wrong = and_(table.space_id == space_id, vectors.n_numbers(connection, table) != dimension)
    if n := connection.scalar(select(func.count()).select_from(table).where(wrong)) or 0:
        what = f"{n} vectors in {name} have the wrong length"
        yield Problem(what, "removed them, to be made again", partial(_drop_where, table=table, condition=wrong))
    statement = select(key, table.vector).where(table.space_id == space_id, ~wrong)
    for page in connection.execute(statement.execution_options(yield_per=_PAGE)).partitions(_PAGE):
        lengths = np.linalg.norm(vectors.unpack([row[1] for row in page], dimension), axis=1)
        for row, length in zip(page, lengths, strict=True):
            if not abs(float(length) - 1.0) <= 0.01:  # also where it is not a number
                mend = partial(_drop_where, table=table, condition=and_(table.space_id == space_id, key == row[0]))
                yield Problem(f"vector {row[0]} in {name} is not of length 1", "removed it, to be made again", mend)


def _drop_where(connection: Connection, table: Any, condition: Any) -> None:
    connection.execute(delete(table).where(condition))


def _events(connection: Connection) -> Iterator[Problem]:
    """The events, replayed from the first, end at exactly the vectors in SQL."""
    replayed = {chunk for chunk, action in vectors.events_after(connection, 0).items() if action == "add"}
    held = set(connection.scalars(select(db.Embedding.chunk_id).join(db.Space).where(db.Space.serving)))
    if replayed != held:
        yield Problem(
            f"the events tell of {len(replayed)} vectors, the store holds {len(held)}",
            "wrote the events that were missing",
            partial(_write_events, changes={"add": sorted(held - replayed), "delete": sorted(replayed - held)}),
        )


def _write_events(connection: Connection, changes: dict[str, list[int]]) -> None:
    for action, chunk_ids in changes.items():
        if chunk_ids:
            connection.execute(insert(db.Event), [{"action": action, "chunk_id": i} for i in chunk_ids])
