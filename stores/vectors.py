"""Vectors in SQL: spaces, float16 blobs, and the events every index follows. Inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, Row, case, delete, func, insert, select, update

from memstream.errors import DimensionMismatchError, StoreCorruptError
from memstream.stores import schema as db
from memstream.stores.base import Ids, Vectors
from memstream.stores.rows import batches


@dataclass(frozen=True, slots=True)
class SpaceInfo:
    """The embedding space of a store."""

    id: int
    name: str
    fingerprint: str
    dimension: int
    gate: float | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A text that has no vector yet: of a chunk or of a single turn."""

    kind: str
    id: int
    text: str


def find_space(connection: Connection) -> SpaceInfo | None:
    """The store's embedding space; None before the first embedder."""
    row = connection.execute(
        select(db.Space.id, db.Space.name, db.Space.fingerprint, db.Space.dimension, db.Space.gate)
    ).one_or_none()
    return None if row is None else SpaceInfo(*row)


def ensure_space(connection: Connection, name: str, fingerprint: str, dimension: int) -> SpaceInfo:
    """The store's space, created on first use.

    Raises:
        DimensionMismatchError: the store was made with another embedder, even one of the same dimension.
    """
    space = find_space(connection)
    if space is None:
        connection.execute(
            insert(db.Space).values(name=name, fingerprint=fingerprint, dimension=dimension, normalised=True)
        )
        space = find_space(connection)
        assert space is not None
    check_space(space, name, fingerprint, dimension)
    return space


def check_space(space: SpaceInfo, name: str, fingerprint: str, dimension: int) -> None:
    """Refuses another embedder than the store's.

    Raises:
        DimensionMismatchError: naming both.
    """
    if (space.fingerprint, space.dimension) != (fingerprint, dimension):
        raise DimensionMismatchError(
            f"the store's vectors were made by {space.name} ({space.dimension} dimensions, fingerprint "
            f"{space.fingerprint[:12]}), not by {name} ({dimension} dimensions, fingerprint {fingerprint[:12]}); "
            "their vectors cannot be mixed. Use the same embedder, or a new store"
        )


def set_gate(connection: Connection, space_id: int, gate: float) -> None:
    """Keeps the calibrated gate of a space."""
    connection.execute(update(db.Space).where(db.Space.id == space_id).values(gate=gate))


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


def pending(connection: Connection, limit: int) -> list[Pending]:
    """The oldest chunks and live turns without a vector, at most ``limit``."""
    chunks = (
        select(db.Chunk.id, db.Chunk.text)
        .outerjoin(db.Embedding, db.Embedding.chunk_id == db.Chunk.id)
        .where(db.Embedding.chunk_id.is_(None))
        .order_by(db.Chunk.id)
        .limit(limit)
    )
    found = [Pending("chunk", row.id, row.text) for row in connection.execute(chunks)]
    turns = (
        select(db.Turn.id, db.Turn.text)
        .outerjoin(db.TurnEmbedding, db.TurnEmbedding.turn_id == db.Turn.id)
        .where(db.TurnEmbedding.turn_id.is_(None), db.Turn.superseded.is_(False), db.Turn.state != "open")
        .order_by(db.Turn.id)
        .limit(limit - len(found))
    )
    found.extend(Pending("turn", row.id, row.text) for row in connection.execute(turns))
    return found


def n_pending(connection: Connection) -> int:
    """How many chunks and live turns have no vector."""
    chunks = select(db.Chunk.id).outerjoin(db.Embedding, db.Embedding.chunk_id == db.Chunk.id)
    turns = select(db.Turn.id).outerjoin(db.TurnEmbedding, db.TurnEmbedding.turn_id == db.Turn.id)
    live = (db.TurnEmbedding.turn_id.is_(None), db.Turn.superseded.is_(False), db.Turn.state != "open")
    bare = (chunks.where(db.Embedding.chunk_id.is_(None)), turns.where(*live))
    return sum(connection.scalar(select(func.count()).select_from(part.subquery())) or 0 for part in bare)


def store(connection: Connection, space_id: int, items: Sequence[Pending], vectors: Vectors) -> None:
    """Writes vectors [n, d] and the events of new chunks; what was forgotten in the meantime is skipped."""
    blobs = {(item.kind, item.id): pack(vector) for item, vector in zip(items, vectors, strict=True)}
    texts = {(item.kind, item.id): item.text for item in items}

    def still_pending(kind: str, rows: Iterable[Row[int, str]]) -> list[int]:
        return [row[0] for row in rows if texts[kind, row[0]] == row[1]]

    chunk_ids = [item.id for item in items if item.kind == "chunk"]
    chunks = (
        select(db.Chunk.id, db.Chunk.text)
        .outerjoin(db.Embedding, db.Embedding.chunk_id == db.Chunk.id)
        .where(db.Chunk.id.in_(chunk_ids), db.Embedding.chunk_id.is_(None))
        .order_by(db.Chunk.id)
    )
    if ids := still_pending("chunk", connection.execute(chunks)):
        made = [{"chunk_id": i, "space_id": space_id, "vector": blobs["chunk", i]} for i in ids]
        connection.execute(insert(db.Embedding), made)
        connection.execute(insert(db.Event), [{"action": "add", "chunk_id": i} for i in ids])
    turn_ids = [item.id for item in items if item.kind == "turn"]
    turns = (
        select(db.Turn.id, db.Turn.text)
        .outerjoin(db.TurnEmbedding, db.TurnEmbedding.turn_id == db.Turn.id)
        .where(db.Turn.id.in_(turn_ids), db.Turn.superseded.is_(False), db.TurnEmbedding.turn_id.is_(None))
    )
    if ids := still_pending("turn", connection.execute(turns)):
        made = [{"turn_id": i, "space_id": space_id, "vector": blobs["turn", i]} for i in ids]
        connection.execute(insert(db.TurnEmbedding), made)


def delete_chunks(connection: Connection, chunk_ids: Collection[int]) -> dict[str, int]:
    """Removes chunks with their vectors and derived texts, and tells the indexes. Returns rows removed by table."""
    removed = {"chunks": 0, "embeddings": 0, "derived": 0}
    for part in batches(chunk_ids):
        embedded = list(connection.scalars(select(db.Embedding.chunk_id).where(db.Embedding.chunk_id.in_(part))))
        for chunk_id in embedded:
            connection.execute(insert(db.Event).values(action="delete", chunk_id=chunk_id))
        removed["embeddings"] += connection.execute(
            delete(db.Embedding).where(db.Embedding.chunk_id.in_(part))
        ).rowcount
        removed["derived"] += connection.execute(delete(db.Derived).where(db.Derived.chunk_id.in_(part))).rowcount
        removed["chunks"] += connection.execute(delete(db.Chunk).where(db.Chunk.id.in_(part))).rowcount
    return removed


def last_event(connection: Connection) -> int:
    """The sequence of the newest event; 0 before the first."""
    return connection.scalar(select(func.max(db.Event.sequence))) or 0


def events_after(connection: Connection, sequence: int) -> dict[int, str]:
    """The last action on every chunk that changed after ``sequence``."""
    statement = select(db.Event.chunk_id, db.Event.action).where(db.Event.sequence > sequence)
    return {row[0]: row[1] for row in connection.execute(statement.order_by(db.Event.sequence))}


def count(connection: Connection) -> int:
    """Number of chunk vectors in SQL."""
    return connection.scalar(select(func.count()).select_from(db.Embedding)) or 0


# Whose a chunk is: its owner's number, or minus its conversation's where there is no user.
SCOPE = case((db.Owner.user_key != "", db.Chunk.owner_id), else_=-db.Chunk.conversation_id)
_READ = (
    select(db.Embedding.chunk_id, SCOPE, db.Embedding.vector)
    .join(db.Chunk, db.Chunk.id == db.Embedding.chunk_id)
    .join(db.Owner, db.Owner.id == db.Chunk.owner_id)
)


def _arrays(rows: Sequence[Row[int, int, bytes]], dimension: int) -> tuple[Ids, Vectors, Ids]:
    ids, scopes = np.array([(row[0], row[1]) for row in rows], dtype=np.int64).reshape(-1, 2).T
    return ids, unpack([row[2] for row in rows], dimension), scopes


def read(connection: Connection, chunk_ids: Collection[int], dimension: int) -> tuple[Ids, Vectors, Ids]:
    """Vectors of chunks: ids [n], float32 [n, d] and scopes [n]; chunks without one are left out."""
    rows = [
        row for part in batches(chunk_ids) for row in connection.execute(_READ.where(db.Embedding.chunk_id.in_(part)))
    ]
    return _arrays(rows, dimension)


def read_after(connection: Connection, chunk_id: int, limit: int, dimension: int) -> tuple[Ids, Vectors, Ids]:
    """The next ``limit`` vectors in order of chunk id, for rebuilding an index piece by piece."""
    statement = _READ.where(db.Embedding.chunk_id > chunk_id).order_by(db.Embedding.chunk_id).limit(limit)
    return _arrays(connection.execute(statement).all(), dimension)


def read_turns(connection: Connection, turn_ids: Collection[int], dimension: int) -> dict[int, Vectors]:
    """Vectors of single turns by id, float32 [d]; turns without one are left out."""
    found: dict[int, Vectors] = {}
    for part in batches(turn_ids):
        rows = connection.execute(
            select(db.TurnEmbedding.turn_id, db.TurnEmbedding.vector).where(db.TurnEmbedding.turn_id.in_(part))
        ).all()
        matrix = unpack([row[1] for row in rows], dimension)
        found.update((row[0], matrix[i]) for i, row in enumerate(rows))
    return found
