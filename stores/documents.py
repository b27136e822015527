"""Documents and their passages in SQL, inside the caller's transaction."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from memstream.stores import fulltext, vectors
from memstream.stores import schema as db
from memstream.stores.rows import batches


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPassage:
    """A piece of a document: characters ``first`` to ``last`` (exclusive) on lines counted from 1, under ``heading``.

    ``key`` is what is embedded and indexed for it.
    """

    first: int
    last: int
    first_line: int
    last_line: int
    heading: str
    text: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document as stored; see ``schema.Document``."""

    id: int
    owner_id: int
    path: str
    name: str
    title: str
    checksum: str
    added: datetime
    updated: datetime
    n_passages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPassage:
    """A passage with what is known of its document."""

    id: int
    document_id: int
    owner_id: int
    first: int
    last: int
    first_line: int
    last_line: int
    heading: str
    text: str
    path: str
    name: str
    title: str
    updated: datetime


@dataclass(slots=True)
class Change:
    """What writing or removing documents did: rows removed by table, their chunks, and passages kept and new."""

    removed: dict[str, int]
    chunk_ids: list[int]
    n_kept: int = 0
    n_new: int = 0


def find(connection: Connection, owner_id: int, path: str, name: str) -> StoredDocument | None:
    """An owner's document by what tells it from the others."""
    statement = _documents().where(db.Document.owner_id == owner_id, db.Document.path == path, db.Document.name == name)
    row = connection.execute(statement).one_or_none()
    return None if row is None else StoredDocument(**row._mapping)


def by_id(connection: Connection, document_id: int) -> StoredDocument | None:
    """A document by its id, whosever it is."""
    row = connection.execute(_documents().where(db.Document.id == document_id)).one_or_none()
    return None if row is None else StoredDocument(**row._mapping)


def of_owner(connection: Connection, owner_id: int, *, limit: int | None = None) -> list[StoredDocument]:
    """The newest ``limit`` documents of an owner, or all; the oldest of them first."""
    statement = _documents().where(db.Document.owner_id == owner_id).order_by(db.Document.id.desc()).limit(limit)
    return [StoredDocument(**row._mapping) for row in connection.execute(statement)][::-1]


def paths(connection: Connection, owner_id: int) -> dict[int, str]:
    """The paths of an owner's documents that are of a file, by document id."""
    statement = select(db.Document.id, db.Document.path).where(db.Document.owner_id == owner_id, db.Document.path != "")
    return dict(connection.execute(statement).all())


def checksums(connection: Connection, owner_id: int, path: str, names: Collection[str]) -> dict[str, str]:
    """The checksums of an owner's documents of one file that have one of the names, by name."""
    statement = select(db.Document.name, db.Document.checksum).where(
        db.Document.owner_id == owner_id, db.Document.path == path, db.Document.name.in_(names)
    )
    return dict(connection.execute(statement).all())


def names(connection: Connection, owner_id: int, path: str) -> dict[str, int]:
    """The ids of an owner's documents of one file, by name."""
    statement = select(db.Document.name, db.Document.id).where(
        db.Document.owner_id == owner_id, db.Document.path == path
    )
    return dict(connection.execute(statement).all())


def _documents() -> Select[int]:
    n_passages = (
        select(func.count()).select_from(db.Passage).where(db.Passage.document_id == db.Document.id).scalar_subquery()
    )
    return select(*db.Document.__table__.columns, n_passages.label("n_passages"))


def passages(
    connection: Connection,
    *,
    ids: Collection[int] | None = None,
    document_id: int | None = None,
) -> list[StoredPassage]:
    """Passages by their ids, or all of a document, in order; unknown ids are left out."""
    statement = select(
        db.Passage.id, db.Passage.document_id, db.Document.owner_id, db.Passage.first, db.Passage.last,
        db.Passage.first_line, db.Passage.last_line, db.Passage.heading, db.Passage.text,
        db.Document.path, db.Document.name, db.Document.title, db.Document.updated,
    ).join(db.Document, db.Document.id == db.Passage.document_id)  # fmt: skip
    statement = statement.order_by(db.Passage.document_id, db.Passage.position)
    if document_id is not None:
        found = connection.execute(statement.where(db.Passage.document_id == document_id)).all()
    else:
        parts = batches(ids or ())
        found = [row for part in parts for row in connection.execute(statement.where(db.Passage.id.in_(part)))]
    return [StoredPassage(**row._mapping) for row in found]


def count_passages(connection: Connection, owner_ids: Sequence[int]) -> int:
    """Number of passages of the owners' documents."""
    statement = select(func.count()).select_from(db.Passage).join(db.Document)
    return connection.scalar(statement.where(db.Document.owner_id.in_(owner_ids))) or 0


def keys_of(connection: Connection, passage_ids: Collection[int]) -> dict[int, int]:
    """The chunk of each passage, by passage id."""
    found: dict[int, int] = {}
    for part in batches(passage_ids):
        statement = select(db.Chunk.passage_id, db.Chunk.id).where(db.Chunk.passage_id.in_(part))
        found.update((row[0], row[1]) for row in connection.execute(statement) if row[0] is not None)
    return found


def passages_of_keys(connection: Connection, chunk_ids: Collection[int], owner_ids: Sequence[int]) -> dict[int, int]:
    """The chunk of each passage of the owners that is under one of the chunks, by passage id."""
    found: dict[int, int] = {}
    for part in batches(chunk_ids):
        statement = select(db.Chunk.passage_id, db.Chunk.id).where(
            db.Chunk.id.in_(part), db.Chunk.kind == "passage", db.Chunk.owner_id.in_(owner_ids)
        )
        found.update((row[0], row[1]) for row in connection.execute(statement) if row[0] is not None)
    return found


def put(
    connection: Connection,
    owner_id: int,
    *,
    path: str,
    name: str,
    title: str,
    checksum: str,
    new: Sequence[NewPassage],
) -> tuple[int, Change]:
    """Writes a document, in place of an earlier version of it.

    Passages that are the same, heading and text, keep their ids and vectors and only learn where they are now.

    Returns:
        Its id, and what changed.
    """
    values = {"title": title, "checksum": checksum, "updated": db.now()}
    there = find(connection, owner_id, path, name)
    if there is None:
        fresh = insert(db.Document).values(owner_id=owner_id, path=path, name=name, added=values["updated"], **values)
        document_id = connection.execute(fresh.returning(db.Document.id)).scalar_one()
    else:
        document_id = there.id
        connection.execute(update(db.Document).where(db.Document.id == document_id).values(**values))
    same: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for old in passages(connection, document_id=document_id) if there else ():
        same[old.heading, old.text].append(old.id)
    kept: dict[int, int] = {}  # position to id
    for position, passage in enumerate(new):
        if same[passage.heading, passage.text]:
            kept[position] = same[passage.heading, passage.text].popleft()
    change = remove_passages(connection, [passage_id for ids in same.values() for passage_id in ids])
    for position, passage in enumerate(new):
        place = {
            "position": position, "first": passage.first, "last": passage.last,
            "first_line": passage.first_line, "last_line": passage.last_line,
        }  # fmt: skip
        if position in kept:
            connection.execute(update(db.Passage).where(db.Passage.id == kept[position]).values(**place))
        else:
            _insert(connection, owner_id, document_id, passage, place)
    change.n_kept, change.n_new = len(kept), len(new) - len(kept)
    return document_id, change


def _insert(
    connection: Connection, owner_id: int, document_id: int, passage: NewPassage, place: dict[str, int]
) -> None:
    row = insert(db.Passage).values(document_id=document_id, heading=passage.heading, text=passage.text, **place)
    passage_id = connection.execute(row.returning(db.Passage.id)).scalar_one()
    add_key(connection, owner_id, passage_id, passage.key)
    fulltext.add_passage(connection, passage_id, owner_id, f"{passage.heading}\n{passage.text}")


def add_key(connection: Connection, owner_id: int, passage_id: int, text: str) -> None:
    """Makes the key under which a passage is found."""
    key = {"owner_id": owner_id, "passage_id": passage_id, "kind": "passage", "text": text}
    connection.execute(insert(db.Chunk).values(**key))


def remove(connection: Connection, document_ids: Collection[int]) -> Change:
    """Removes documents with their passages, words and vectors."""
    gone: list[int] = []
    for part in batches(document_ids):
        gone.extend(connection.scalars(select(db.Passage.id).where(db.Passage.document_id.in_(part))))
    change = remove_passages(connection, gone)
    n = sum(
        connection.execute(delete(db.Document).where(db.Document.id.in_(part))).rowcount
        for part in batches(document_ids)
    )
    change.removed = {"documents": n, **change.removed}
    return change


def remove_passages(connection: Connection, passage_ids: Collection[int]) -> Change:
    """Removes passages with their words and vectors."""
    chunk_ids = list(keys_of(connection, passage_ids).values())
    removed = vectors.delete_chunks(connection, chunk_ids)
    words = fulltext.drop_passages(connection, passage_ids)
    n = sum(
        connection.execute(delete(db.Passage).where(db.Passage.id.in_(part))).rowcount for part in batches(passage_ids)
    )
    return Change({"passages": n, "words": words, **removed}, chunk_ids)
