"""The vector index in memory: opened from its file, kept up by following the store's events, rebuilt when in doubt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Protocol

import numpy as np
from sqlalchemy import Connection, delete, insert, select

from memstream.errors import ConfigError, StoreCorruptError
from memstream.stores import index_file, vectors
from memstream.stores import schema as db
from memstream.stores.base import VectorIndex, Vectors
from memstream.stores.exact_index import ExactIndex
from memstream.stores.faiss_index import FaissIndex, faiss_installed
from memstream.stores.index_file import Header
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_log = logging.getLogger(__name__)
_PIECE = 1024  # vectors read from SQL at once


class SearchIndex(Protocol):
    """What finds the vectors of a store, one scope at a time. Thread safe.

    Attributes:
        space: whose vectors are searched; None before the first vector or ``refresh``.
        unsaved_events: how many events its file is behind.
    """

    @property
    def space(self) -> SpaceInfo | None: ...

    @property
    def unsaved_events(self) -> int: ...

    def refresh(self) -> None:
        """Brings it up to the newest event, whoever wrote it."""

    def follow(self) -> None:
        """The same, unless nothing was searched yet and it need not take memory before that."""

    def search(self, query: Vectors, scope: int, k: int, without: Collection[int]) -> list[int]:
        """The at most k best of a scope for ``query`` [d], best first. Call ``refresh`` before."""

    def cosines(self, queries: Vectors, chunk_ids: Collection[int]) -> dict[int, list[float]]:
        """The cosine of each chunk that is held with each query [n, d]."""

    def holds(self, chunk_ids: Collection[int]) -> bool:
        """True where any of the chunks is still there."""

    def improve(self) -> None:
        """Builds better indexes for scopes that have grown large; searches go on meanwhile."""

    def rebuild(self) -> None:
        """Makes it anew from the vectors in SQL; ``checkpoint`` then saves it."""

    def count(self) -> int:
        """How many vectors are held."""

    def checkpoint(self) -> None:
        """Saves what can be saved.

        Raises:
            StoreError: the disk refused; what was saved before stays.
        """

    def problems(self) -> list[str]:
        """What differs between it and the vectors in SQL."""


def open_index(store: SqlStore, kind: str, *, lazy: bool) -> SearchIndex:
    """The index of a store.

    Args:
        store: whose vectors are searched.
        kind: ``auto``: pgvector on PostgreSQL, else FAISS where it is installed, else exact; or ``exact``, ``faiss``,
            ``pgvector``, or ``faiss:`` and FAISS's own description of the indexes of large scopes, such as
            ``faiss:IVF4096,SQ8``.
        lazy: takes no memory until something is searched.

    Raises:
        ConfigError: another kind, or pgvector without PostgreSQL.
        MissingExtraError: FAISS is asked for by name, and not installed.
    """
    if kind not in ("auto", "exact", "faiss", "pgvector") and not kind.startswith("faiss:"):
        raise ConfigError(f"index is {kind!r}; allowed: 'auto', 'exact', 'faiss', 'faiss:FACTORY', 'pgvector'")
    if kind == "pgvector" and store.dialect != "postgresql":
        raise ConfigError("index is 'pgvector', but the store is not on PostgreSQL; use 'auto'")
    if store.dialect == "postgresql" and kind in ("auto", "pgvector"):
        from memstream.stores.pgvector_index import PgVectorIndex

        return PgVectorIndex(store)
    return LiveIndex(store, kind, lazy=lazy)


class LiveIndex:
    """The index in memory over all scopes of one store. Thread safe: one thread at a time.

    Args:
        store: whose vectors it caches.
        kind: as in ``open_index``.
        lazy: takes no memory until something is searched.
    """

    def __init__(self, store: SqlStore, kind: str, *, lazy: bool = False) -> None:
        self._store = store
        self._kind = kind
        self._lazy = lazy
        self._lock = threading.RLock()
        self._index: VectorIndex | None = None
        self._space: SpaceInfo | None = None
        self._sequence = 0
        self._saved_sequence: int | None = None

    @property
    def space(self) -> SpaceInfo | None:
        """The space whose vectors are held."""
        return self._space

    def refresh(self) -> None:
        """Brings the index up to the newest event, whoever wrote it."""
        with self._lock, self._store.read() as connection:
            self._update(connection)

    def _update(self, connection: Connection) -> None:
        if self._index is None or self._has_moved(connection):
            self._open(connection)
        else:
            self._replay(connection)

    def _has_moved(self, connection: Connection) -> bool:
        """True where another space serves now."""
        space = vectors.find_space(connection)
        return space is None or self._space is None or space.id != self._space.id

    def follow(self) -> None:
        """Brings the index up to date, unless it is lazy and nothing was searched yet."""
        if self._index is not None or not self._lazy:
            self.refresh()

    def search(self, query: Vectors, scope: int, k: int, without: Collection[int]) -> list[int]:
        """The at most k best of a scope for ``query`` [d]; see VectorIndex. Call ``refresh`` before."""
        with self._lock:
            if self._index is None:
                return []
            ids, _ = self._index.search(query, scope, k, without=without)
            return list(ids.tolist())

    def cosines(self, queries: Vectors, chunk_ids: Collection[int]) -> dict[int, list[float]]:
        """The cosine of each chunk that is held with each query [n, d]."""
        with self._lock:
            if self._index is None:
                return {}
            ids, matrix = self._index.get(np.fromiter(chunk_ids, dtype=np.int64))
            return dict(zip(ids.tolist(), (matrix @ queries.T).tolist(), strict=True))

    def holds(self, chunk_ids: Collection[int]) -> bool:
        """True where any of the chunks is still in the index."""
        return bool(self.cosines(np.zeros((1, self._index.dimension if self._index else 0), np.float32), chunk_ids))

    def improve(self) -> None:
        """Builds better indexes for scopes that have grown large. Takes seconds, in which searches go on."""
        while True:
            with self._lock:
                index = self._index
                if not isinstance(index, FaissIndex) or (scope := index.overgrown()) is None:
                    return
                ids, matrix = index.copy(scope)
            built = index.build(ids, matrix)
            with self._lock:
                if index is self._index:
                    index.install(scope, built)

    def _new(self, dimension: int) -> VectorIndex:
        if self._kind == "auto" and faiss_installed():
            return FaissIndex(dimension)
        if self._kind.startswith("faiss"):
            return FaissIndex(dimension, self._kind.partition(":")[2] or None)
        if self._kind == "auto":
            _log.info("FAISS is not installed; vectors are searched exactly (pip install 'memstream[cpu]' is faster)")
        return ExactIndex(dimension)

    def _open(self, connection: Connection) -> None:
        space = vectors.find_space(connection)
        if space is None:
            return
        self._space = space
        self._index = self._new(space.dimension)
        path = self._store.index_path
        if path is None or not path.exists():
            self._rebuild(connection)
            return
        try:
            header = self._read(connection, self._index, space)
            self._sequence = self._saved_sequence = header.last_sequence
            self._replay(connection)
            if self._index.count() != vectors.count(connection, space):
                raise StoreCorruptError("its count differs from the store's")
        except StoreCorruptError as error:
            _log.info("rebuilding the vector index %s from the store: %s", path, error)
            self._rebuild(connection)

    def _read(self, connection: Connection, index: VectorIndex, space: SpaceInfo) -> Header:
        """Loads the index file after checking that it is this store's."""
        path = self._store.index_path
        assert path is not None
        header, checksum = index_file.read_header(path)
        state = connection.execute(
            select(db.IndexState.last_sequence, db.IndexState.count.label("n"), db.IndexState.checksum)
        ).one_or_none()
        if (header.backend, header.space, header.dimension) != (index.backend, space.fingerprint, space.dimension):
            raise StoreCorruptError("it was made by another backend or embedder")
        said = (header.last_sequence, header.count, checksum)
        if state is None or said != (state.last_sequence, state.n, state.checksum):
            raise StoreCorruptError("it is not the one the store knows")
        if header.last_sequence > vectors.last_event(connection):
            raise StoreCorruptError("it is ahead of the store")
        index_file.load(path, index, header)
        return header

    def rebuild(self) -> None:
        """Builds the index anew from the vectors in SQL; ``checkpoint`` then saves it."""
        with self._lock, self._store.read() as connection:
            self._space = vectors.find_space(connection)
            if self._space is not None:
                self._rebuild(connection)

    def _rebuild(self, connection: Connection) -> None:
        assert self._space is not None
        index = self._new(self._space.dimension)
        last = 0
        while True:
            ids, matrix, scopes = vectors.read_after(connection, self._space, last, _PIECE)
            if not len(ids):
                break
            index.upsert(ids, matrix, scopes)
            last = int(ids[-1])
        self._index, self._sequence, self._saved_sequence = index, vectors.last_event(connection), None

    def _replay(self, connection: Connection) -> None:
        assert self._index is not None
        assert self._space is not None
        newest = vectors.last_event(connection)
        if newest < self._sequence:
            _log.info("rebuilding the vector index: the store was replaced by an older one")
            self._rebuild(connection)
            return
        if newest == self._sequence:
            return
        changed = vectors.events_after(connection, self._sequence)
        gone = [chunk for chunk, action in changed.items() if action == "delete"]
        self._index.delete(np.array(gone, dtype=np.int64))
        added = [chunk for chunk, action in changed.items() if action == "add"]
        for start in range(0, len(added), _PIECE):
            ids, matrix, scopes = vectors.read(connection, self._space, added[start : start + _PIECE])
            self._index.upsert(ids, matrix, scopes)
        self._sequence = newest

    def count(self) -> int:
        """How many vectors are held."""
        with self._lock:
            return 0 if self._index is None else self._index.count()

    @property
    def unsaved_events(self) -> int:
        """How many events the index file is behind."""
        with self._lock:
            return self._sequence - (self._saved_sequence or 0)

    def checkpoint(self) -> None:
        """Saves the index file, if anything changed; a lazy index that was never searched is left as it is.

        Raises:
            StoreError: the disk refused; the old file stays, and the next open rebuilds.
        """
        path = self._store.index_path
        if path is None:
            return
        with self._lock, self._store.lock_index():
            index_file.sweep(path)
            self.follow()
            if self._index is None or self._space is None or self._saved_sequence == self._sequence:
                return
            header = Header(
                backend=self._index.backend,
                space=self._space.fingerprint,
                dimension=self._space.dimension,
                last_sequence=self._sequence,
                count=self._index.count(),
            )
            checksum = index_file.save(path, self._index, header)
            with self._store.write() as connection:
                connection.execute(delete(db.IndexState))
                connection.execute(
                    insert(db.IndexState).values(
                        space_id=self._space.id,
                        last_sequence=header.last_sequence,
                        count=header.count,
                        checksum=checksum,
                    )
                )
            self._saved_sequence = self._sequence

    def problems(self) -> list[str]:
        """What differs between the index, brought up to date, and the vectors in SQL."""
        with self._lock, self._store.read() as connection:  # one view of the store for both
            self._update(connection)
            if self._index is None or self._space is None:
                return []
            n_seen, last = 0, 0
            found: list[str] = []
            while True:
                ids, matrix, scopes = vectors.read_after(connection, self._space, last, _PIECE)
                if not len(ids):
                    break
                last = int(ids[-1])
                n_seen += len(ids)
                held = self._index.scopes_of(ids)
                found.extend(f"chunk {i} has a vector in the store, but not in the index" for i in ids[held == 0][:3])
                elsewhere = ids[(held != 0) & (held != scopes)]
                found.extend(f"the index holds chunk {i} in another's scope" for i in elsewhere[:3])
                known, vectors_held = self._index.get(ids)
                order = np.argsort(known)
                expected = matrix[np.isin(ids, known)]
                wrong = known[order][(np.abs(vectors_held[order] - expected) > self._index.precision).any(axis=1)]
                found.extend(f"the index holds another vector for chunk {i} than the store" for i in wrong[:3])
            n_held = self._index.count()
            if not found and n_seen != n_held:
                found.append(f"the index holds {n_held} vectors, the store {n_seen}")
            return found
