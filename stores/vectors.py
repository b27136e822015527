"""Vectors in SQL: spaces, float16 blobs, and the events every index follows. Inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, delete, func, insert, select, update

from memstream.errors import DimensionMismatchError, StoreCorruptError, StoreError
from memstream.stores import schema as db
from memstream.stores.base import Ids, Vectors
from memstream.stores.rows import batches


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """An embedding space of a store; one is serving, another may be in the making."""

    id: int
    name: str
    fingerprint: str
    dimension: int
    gate: float | None
    serving: bool


@dataclass(frozen=True, slots=True)
class Pending:
    """A text that has no vector yet: of a chunk or of a single turn."""

    kind: str
    id: int
    text: str


_SPACE = select(db.Space.id, db.Space.name, db.Space.fingerprint, db.Space.dimension, db.Space.gate, db.Space.serving)


_SERVING = _SPACE.where(db.Space.serving)
_LAST_EVENT = select(func.max(db.Event.sequence))
_SERVES = select(db.Space.id).where(db.Space.serving).scalar_subquery()
SERVING = and_(db.Embedding.chunk_id == db.Chunk.id, db.Embedding.space_id == _SERVES)  # a chunk's vector
SERVING_TURN = and_(db.TurnEmbedding.turn_id == db.Turn.id, db.TurnEmbedding.space_id == _SERVES)  # a turn's


def find_space(connection: Connection) -> SpaceInfo | None:
    """The space that is searched; None before the first embedder."""
    row = connection.execute(_SERVING).one_or_none()
    return None if row is None else SpaceInfo(*row)


def ensure_space(connection: Connection, name: str, fingerprint: str, dimension: int) -> SpaceInfo:
    """The store's space, created on first use.

    Raises:
        DimensionMismatchError: the store was made with another embedder, even one of the same dimension.
    """
    space = find_space(connection)
    if space is None:
        space = _add_space(connection, name, fingerprint, dimension, serving=True)
    check_space(space, name, fingerprint, dimension)
    return space


def _add_space(connection: Connection, name: str, fingerprint: str, dimension: int, *, serving: bool) -> SpaceInfo:
    values = {"name": name, "fingerprint": fingerprint, "dimension": dimension, "normalised": True, "serving": serving}
    space_id = connection.execute(insert(db.Space).values(**values).returning(db.Space.id)).scalar_one()
    return SpaceInfo(space_id, name, fingerprint, dimension, None, serving)


def next_space(connection: Connection) -> SpaceInfo | None:
    """The space beside the serving one: in the making, or left over from before."""
    row = connection.execute(_SPACE.where(db.Space.serving.is_(False))).one_or_none()
    return None if row is None else SpaceInfo(*row)


def begin_space(connection: Connection, name: str, fingerprint: str, dimension: int) -> SpaceInfo:
    """Makes room for the vectors of another embedder beside the serving ones; goes on where one was begun.

    Raises:
        StoreError: vectors of a third embedder are still there; see ``drop_vectors``.
    """
    space = next_space(connection)
    if space is None:
        return _add_space(connection, name, fingerprint, dimension, serving=False)
    if space.fingerprint != fingerprint:
        raise StoreError(f"vectors of {space.name} are still in the store")
    return space


def serve(connection: Connection, space: SpaceInfo) -> None:
    """Has a space searched from now on, and tells the indexes what it holds that the serving one did not."""
    old = select(db.Embedding.chunk_id).join(db.Space).where(db.Space.serving)
    new = select(db.Embedding.chunk_id).where(db.Embedding.space_id == space.id)
    added = connection.scalars(new.where(db.Embedding.chunk_id.not_in(old)).order_by(db.Embedding.chunk_id)).all()
    _tell(connection, "add", added)
    connection.execute(update(db.Space).values(serving=db.Space.id == space.id))
    connection.execute(delete(db.IndexState))


def drop_vectors(connection: Connection, space: SpaceInfo, limit: int) -> int:
    """Removes vectors of a space that does not serve, at most ``limit`` of chunks and as many of turns.

    Returns how many were removed; 0 where nothing is left.
    """
    removed = 0
    for table, key in ((db.Embedding, db.Embedding.chunk_id), (db.TurnEmbedding, db.TurnEmbedding.turn_id)):
        some = list(connection.scalars(select(key).where(table.space_id == space.id).limit(limit)))
        for part in batches(some):
            connection.execute(delete(table).where(table.space_id == space.id, key.in_(part)))
        removed += len(some)
    return removed


def drop_space(connection: Connection, space: SpaceInfo) -> None:
    """Removes a space without vectors, unless it serves."""
    connection.execute(delete(db.IndexState).where(db.IndexState.space_id == space.id))
    connection.execute(delete(db.Space).where(db.Space.id == space.id, db.Space.serving.is_(False)))


def _tell(connection: Connection, action: str, chunk_ids: Sequence[int]) -> None:
    if chunk_ids:
        connection.execute(insert(db.Event), [{"action": action, "chunk_id": chunk_id} for chunk_id in chunk_ids])


def check_space(space: SpaceInfo, name: str, fingerprint: str, dimension: int) -> None:
    """Refuses another embedder than the store's.

    Raises:
        DimensionMismatchError: naming both.
    """
    if (space.fingerprint, space.dimension) != (fingerprint, dimension):
        raise DimensionMismatchError(
            f"the store's vectors were made by {space.name} ({space.dimension} dimensions, fingerprint "
            f"{space.fingerprint[:12]}), not by {name} ({dimension} dimensions, fingerprint {fingerprint[:12]}); "
            "their vectors cannot be mixed. Use the same embedder, or make them anew: memstream memory reindex"
        )


def set_gate(connection: Connection, space_id: int, gate: float) -> None:
    """Keeps the calibrated gate of a space."""
    connection.execute(update(db.Space).where(db.Space.id == space_id).values(gate=gate))


def n_numbers(connection: Connection, table: type[db.Embedding] | type[db.TurnEmbedding]) -> ColumnElement[Any]:
    """How many numbers a stored vector has, as SQL."""
    if connection.dialect.name == "postgresql" and table is db.Embedding:
        return func.vector_dims(table.vector)
    return func.length(table.vector) / 2.0


def pack(vector: Vectors) -> bytes:
    """A float32 vector as a little-endian float16 blob."""
    return vector.astype("<f2").tobytes()


def unpack(blobs: Sequence[bytes], dimension: int) -> Vectors:
    """Float16 blobs as float32 [n, dimension].

    Raises:
        StoreCorruptError: a blob of another length.
    """
    if any(len(blob) != 2 * dimension for blob in blobs):
        raise StoreCorruptError("a stored vector has the wrong length; the store is damaged")
    return np.frombuffer(b"".join(blobs), dtype="<f2").reshape(len(blobs), dimension).astype(np.float32)


@dataclass(slots=True)
class Done:
    """How far all chunks and finished turns have their vectors, so that nobody looks there again."""

    chunk_id: int = 0
    turn_id: int = 0


def pending(connection: Connection, space: SpaceInfo, limit: int, done: Done | None = None) -> list[Pending]:
    """The oldest chunks and live turns without a vector in a space, at most ``limit``; passages wait for what was said.

    Args:
        connection: to the store.
        space: whose vectors.
        limit: how many.
        done: where to begin; moved on to where there is nothing pending.
    """
    done = done or Done()
    embedded = and_(db.Embedding.chunk_id == db.Chunk.id, db.Embedding.space_id == space.id)
    chunks = (
        select(db.Chunk.id, db.Chunk.text)
        .outerjoin(db.Embedding, embedded)
        .where(db.Chunk.id > done.chunk_id, db.Embedding.chunk_id.is_(None))
        .order_by(db.Chunk.id)
    )
    said = chunks.where(db.Chunk.passage_id.is_(None)).limit(limit)
    found = [Pending("chunk", row.id, row.text) for row in connection.execute(said)]
    own = and_(db.TurnEmbedding.turn_id == db.Turn.id, db.TurnEmbedding.space_id == space.id)
    turns = (
        select(db.Turn.id, db.Turn.text)
        .outerjoin(db.TurnEmbedding, own)
        .where(
            db.Turn.id > done.turn_id,
            db.TurnEmbedding.turn_id.is_(None),
            db.Turn.superseded.is_(False),
            db.Turn.state != "open",
        )
        .order_by(db.Turn.id)
        .limit(limit - len(found))
    )
    found.extend(Pending("turn", row.id, row.text) for row in connection.execute(turns))
    passages = chunks.where(db.Chunk.passage_id.is_not(None)).limit(limit - len(found))
    found.extend(Pending("chunk", row.id, row.text) for row in connection.execute(passages))
    if not found:
        done.chunk_id = connection.scalar(select(func.max(db.Chunk.id))) or 0
        newest = connection.scalar(select(func.max(db.Turn.id))) or 0
        being_said = connection.scalar(
            select(func.min(db.Turn.id)).where(db.Turn.id > done.turn_id, db.Turn.state == "open")
        )
        done.turn_id = newest if being_said is None else being_said - 1
    return found


def n_pending(connection: Connection) -> int:
    """How many chunks and live turns have no vector in the space that serves."""
    chunks = select(func.count()).select_from(db.Chunk).outerjoin(db.Embedding, SERVING)
    turns = select(func.count()).select_from(db.Turn).outerjoin(db.TurnEmbedding, SERVING_TURN)
    live = (db.Turn.superseded.is_(False), db.Turn.state != "open")
    n_chunks = connection.scalar(chunks.where(db.Embedding.chunk_id.is_(None))) or 0
    return n_chunks + (connection.scalar(turns.where(db.TurnEmbedding.turn_id.is_(None), *live)) or 0)


def store(connection: Connection, space: SpaceInfo, items: Sequence[Pending], vectors: Vectors) -> None:
    """Writes vectors [n, d], and the events of new chunks where the space serves; what was forgotten in the meantime,
    or has one by now, is skipped."""
    blobs = {(item.kind, item.id): pack(vector) for item, vector in zip(items, vectors, strict=True)}
    left = {(item.kind, item.id): item.text for item in pending_of(connection, space, items)}
    chunk_ids = [item.id for item in items if left.get((item.kind, item.id)) == item.text and item.kind == "chunk"]
    scopes = scopes_of(connection, chunk_ids)
    if chunk_ids:
        values = [
            {"chunk_id": i, "space_id": space.id, "scope": scopes[i], "vector": blobs["chunk", i]} for i in chunk_ids
        ]
        connection.execute(insert(db.Embedding), values)
        if space.serving:
            _tell(connection, "add", chunk_ids)
    turn_ids = [item.id for item in items if left.get((item.kind, item.id)) == item.text and item.kind == "turn"]
    if turn_ids:
        own = [{"turn_id": i, "space_id": space.id, "vector": blobs["turn", i]} for i in turn_ids]
        connection.execute(insert(db.TurnEmbedding), own)


def pending_of(connection: Connection, space: SpaceInfo, items: Sequence[Pending]) -> list[Pending]:
    """Those of the items that are still without a vector, with their texts of now."""
    chunk_ids = [item.id for item in items if item.kind == "chunk"]
    turn_ids = [item.id for item in items if item.kind == "turn"]
    embedded = select(db.Embedding.chunk_id).where(
        db.Embedding.space_id == space.id, db.Embedding.chunk_id.in_(chunk_ids)
    )
    chunks = select(db.Chunk.id, db.Chunk.text).where(db.Chunk.id.in_(chunk_ids), db.Chunk.id.not_in(embedded))
    own = select(db.TurnEmbedding.turn_id).where(
        db.TurnEmbedding.space_id == space.id, db.TurnEmbedding.turn_id.in_(turn_ids)
    )
    turns = select(db.Turn.id, db.Turn.text).where(
        db.Turn.id.in_(turn_ids), db.Turn.superseded.is_(False), db.Turn.id.not_in(own)
    )
    found = [Pending("chunk", row.id, row.text) for row in connection.execute(chunks)]
    return found + [Pending("turn", row.id, row.text) for row in connection.execute(turns)]


# Whose a chunk is: its owner's number, or minus its conversation's where there is no user.
SCOPE = case((db.Owner.user_key != "", db.Chunk.owner_id), else_=-db.Chunk.conversation_id)


def scopes_of(connection: Connection, chunk_ids: Collection[int]) -> dict[int, int]:
    """The scope of each chunk."""
    statement = select(db.Chunk.id, SCOPE).join(db.Owner, db.Owner.id == db.Chunk.owner_id)
    found = (connection.execute(statement.where(db.Chunk.id.in_(part))) for part in batches(chunk_ids))
    return {row[0]: row[1] for rows in found for row in rows}


def delete_chunks(connection: Connection, chunk_ids: Collection[int]) -> dict[str, int]:
    """Removes chunks with their vectors and derived texts, and tells the indexes. Returns rows removed by table."""
    removed = {"chunks": 0, "embeddings": 0, "derived": 0}
    for part in batches(chunk_ids):
        served = select(db.Embedding.chunk_id).join(db.Space).where(db.Space.serving, db.Embedding.chunk_id.in_(part))
        _tell(connection, "delete", list(connection.scalars(served)))
        removed["embeddings"] += connection.execute(
            delete(db.Embedding).where(db.Embedding.chunk_id.in_(part))
        ).rowcount
        removed["derived"] += connection.execute(delete(db.Derived).where(db.Derived.chunk_id.in_(part))).rowcount
        removed["chunks"] += connection.execute(delete(db.Chunk).where(db.Chunk.id.in_(part))).rowcount
    return removed


def last_event(connection: Connection) -> int:
    """The sequence of the newest event; 0 before the first."""
    return connection.scalar(_LAST_EVENT) or 0


def events_after(connection: Connection, sequence: int) -> dict[int, str]:
    """The last action on every chunk that changed after ``sequence``."""
    statement = select(db.Event.chunk_id, db.Event.action).where(db.Event.sequence > sequence)
    return {row[0]: row[1] for row in connection.execute(statement.order_by(db.Event.sequence))}


def count(connection: Connection, space: SpaceInfo) -> int:
    """Number of chunk vectors of a space."""
    statement = select(func.count()).select_from(db.Embedding).where(db.Embedding.space_id == space.id)
    return connection.scalar(statement) or 0


def _read(space: SpaceInfo) -> Select[int, int, bytes]:
    columns = select(db.Embedding.chunk_id, db.Embedding.scope, db.Embedding.vector)
    return columns.where(db.Embedding.space_id == space.id)


def _arrays(rows: Sequence[Row[int, int, bytes]], dimension: int) -> tuple[Ids, Vectors, Ids]:
    ids, scopes = np.array([(row[0], row[1]) for row in rows], dtype=np.int64).reshape(-1, 2).T
    return ids, unpack([row[2] for row in rows], dimension), scopes


def read(connection: Connection, space: SpaceInfo, chunk_ids: Collection[int]) -> tuple[Ids, Vectors, Ids]:
    """Vectors of chunks: ids [n], float32 [n, d] and scopes [n]; chunks without one are left out."""
    statement = _read(space)
    rows = [
        row
        for part in batches(chunk_ids)
        for row in connection.execute(statement.where(db.Embedding.chunk_id.in_(part)))
    ]
    return _arrays(rows, space.dimension)


def read_after(connection: Connection, space: SpaceInfo, chunk_id: int, limit: int) -> tuple[Ids, Vectors, Ids]:
    """The next ``limit`` vectors in order of chunk id, for rebuilding an index piece by piece."""
    statement = _read(space).where(db.Embedding.chunk_id > chunk_id).order_by(db.Embedding.chunk_id).limit(limit)
    return _arrays(connection.execute(statement).all(), space.dimension)
