"""Making all vectors anew with another embedder, while the old ones go on being searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from memstream.memory import gate
from memstream.memory.embedder import Embedder, embed
from memstream.stores import lines, vectors
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_PIECE = 64  # texts embedded between two writes
_DROPPED_AT_ONCE = 2000

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reindexed:
    """What was done.

    Attributes:
        name: of the embedder that serves now.
        made: vectors made now; what an interrupted run had made is not counted.
        dropped: vectors removed, of the embedder of before and of one that was given up.
    """

    name: str
    made: int
    dropped: int


def reindex(store: SqlStore, embedder: Embedder, progress: Progress | None = None) -> Reindexed:
    """Makes the vectors of everything with ``embedder``, then has them searched instead of the old ones, in one step.

    Until then the old ones serve, and what is said meanwhile gets vectors of both kinds. Killed at any moment, it goes
    on where it was when it is called again with the same embedder; with another one it begins anew.

    Args:
        store: searched and written to by others meanwhile.
        embedder: of the new vectors.
        progress: called with the number of texts done and of all texts.
    """
    dropped = _give_up_others(store, embedder)
    with store.write() as connection:
        space = vectors.find_space(connection)
        if space is None or space.fingerprint != embedder.fingerprint:
            begin = vectors.ensure_space if space is None else vectors.begin_space
            space = begin(connection, embedder.name, embedder.fingerprint, embedder.dimension)
    made = _fill(store, embedder, space, progress)
    return Reindexed(name=embedder.name, made=made, dropped=dropped + _drop_old(store, space))


def _give_up_others(store: SqlStore, embedder: Embedder) -> int:
    """Removes what was begun with a third embedder, or is left of the one before."""
    with store.read() as connection:
        begun = vectors.next_space(connection)
    return 0 if begun is None or begun.fingerprint == embedder.fingerprint else _drop(store, begun)


def _fill(store: SqlStore, embedder: Embedder, space: SpaceInfo, progress: Progress | None) -> int:
    """Makes what is missing in a space, until it is whole and serves. Returns how many vectors were made."""
    done, made = vectors.Done(), 0
    while True:
        with store.read() as connection:
            items = vectors.pending(connection, space, _PIECE, done)
        if not items:
            if space.gate is None:
                value = gate.calibrate(embedder)
                with store.write() as connection:
                    vectors.set_gate(connection, space.id, value)
            with store.write() as connection:  # nobody else writes now
                if not vectors.pending(connection, space, 1, done):
                    if not space.serving:
                        vectors.serve(connection, space)
                    return made
            continue
        matrix = embed(embedder, [item.text for item in items])
        with store.write(durable=False) as connection:
            vectors.store(connection, space, items, matrix)
            made += len(items)
            if progress is not None:
                progress(*_counts(connection, space))


def _counts(connection: Connection, space: SpaceInfo) -> tuple[int, int]:
    """How many texts have a vector in a space, and how many texts there are."""
    own = select(func.count()).select_from(db.TurnEmbedding).where(db.TurnEmbedding.space_id == space.id)
    live = select(func.count()).select_from(db.Turn).where(db.Turn.superseded.is_(False), db.Turn.state != "open")
    n_chunks = connection.scalar(select(func.count()).select_from(db.Chunk)) or 0
    n_done = vectors.count(connection, space) + (connection.scalar(own) or 0)
    return n_done, n_chunks + (connection.scalar(live) or 0)


def _drop_old(store: SqlStore, serving: SpaceInfo) -> int:
    with store.read() as connection:
        old = vectors.next_space(connection)
    return 0 if old is None or old.id == serving.id else _drop(store, old)


def _drop(store: SqlStore, space: SpaceInfo) -> int:
    """Removes a space that does not serve, a piece at a time, so that nobody waits for long."""
    dropped = 0
    while True:
        with store.write() as connection:
            n = vectors.drop_vectors(connection, space, _DROPPED_AT_ONCE)
            if not n:
                lines.drop_vectors(connection, space.id)
                vectors.drop_space(connection, space)
                return dropped
        dropped += n
