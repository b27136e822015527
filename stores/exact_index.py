"""Vectors in rows, one matrix a scope, searched exactly."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from typing import BinaryIO

import numpy as np

from memstream.errors import StoreCorruptError
from memstream.stores.base import Ids, Vectors, check_vectors

_BLOCK = 256  # rows written or read at once: what a save takes for a moment stays with the process
_MAPPED_BYTES = 1 << 20  # larger matrices get pages of their own, which leave no hole in the heap when they grow


def _zeros(n: int, dimension: int) -> Vectors:
    """Rows [n, dimension] of zeros that take memory when they are written."""
    n_bytes = 4 * n * dimension
    if n_bytes < _MAPPED_BYTES:
        return np.zeros((n, dimension), dtype=np.float32)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.float32).reshape(n, dimension)


class Rows:
    """The vectors of one scope in the order of their ids, in arrays that grow by half."""

    def __init__(self, dimension: int) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._matrix = np.empty((0, dimension), dtype=np.float32)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> Ids:
        """Their ids [n], ascending: a view."""
        return self._ids[: self._n]

    @property
    def matrix(self) -> Vectors:
        """The vectors [n, d]: a view."""
        return self._matrix[: self._n]

    def find(self, ids: Ids) -> tuple[Ids, Ids]:
        """Which of the ids are held, and in which rows."""
        rows = np.searchsorted(self.ids, ids)
        known = rows < self._n
        known[known] = self._ids[rows[known]] == ids[known]
        return ids[known], rows[known]

    def upsert(self, ids: Ids, vectors: Vectors) -> None:
        """Adds vectors, or replaces those that are there."""
        known, rows = self.find(ids)
        if len(known):
            self._matrix[rows] = vectors[np.isin(ids, known)]
            fresh = ~np.isin(ids, known)
            ids, vectors = ids[fresh], vectors[fresh]
        if not len(ids):
            return
        order = np.argsort(ids)
        first = int(ids[order[0]])
        self._reserve(self._n + len(ids))
        at = int(np.searchsorted(self.ids, first))
        self._ids[self._n : self._n + len(ids)] = ids[order]
        self._matrix[self._n : self._n + len(ids)] = vectors[order]
        self._n += len(ids)
        if at < self._n - len(ids):  # vectors are made in the order of their ids, nearly always
            again = at + np.argsort(self._ids[at : self._n])
            self._ids[at : self._n], self._matrix[at : self._n] = self._ids[again], self._matrix[again]

    def _reserve(self, n: int) -> None:
        if n <= len(self._ids):
            return
        capacity = max(n, len(self._ids) * 3 // 2, 8)
        ids = np.empty(capacity, dtype=np.int64)
        matrix = _zeros(capacity, self._matrix.shape[1])
        ids[: self._n], matrix[: self._n] = self.ids, self.matrix
        self._ids, self._matrix = ids, matrix

    def delete(self, ids: Ids) -> int:
        """Removes ids and their bytes. Returns how many were there."""
        _, rows = self.find(ids)
        if not len(rows):
            return 0
        kept = np.ones(self._n, dtype=bool)
        kept[rows] = False
        first, n = int(rows.min()), self._n - len(rows)
        self._ids[first:n] = self._ids[first : self._n][kept[first:]]
        self._matrix[first:n] = self._matrix[first : self._n][kept[first:]]
        self._matrix[n : self._n] = 0.0  # a forgotten vector does not stay in memory
        self._n = n
        return len(rows)


def best(ids: Ids, scores: Vectors, k: int, without: Collection[int] = ()) -> tuple[Ids, Vectors]:
    """The k best of ids [n] by scores [n] outside ``without``, best first, ties by id."""
    if len(without):
        kept = ~np.isin(ids, np.fromiter(without, dtype=np.int64))
        ids, scores = ids[kept], scores[kept]
    if k < len(ids):
        near = np.flatnonzero(scores >= np.partition(scores, -k)[-k]) if k > 0 else np.empty(0, dtype=np.int64)
        ids, scores = ids[near], scores[near]
    order = np.lexsort((ids, -scores))[:k]
    return ids[order], scores[order]


class ExactIndex:
    """A matrix for each scope; a search is one product with it."""

    backend = "exact"
    precision = 0.0

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._scopes: dict[int, Rows] = {}
        self._scope_of: dict[int, int] = {}

    def upsert(self, ids: Ids, vectors: Vectors, scopes: Ids) -> None:
        """Adds vectors [n, d] of ``scopes`` [n] under ids [n], replacing those that are there."""
        check_vectors(ids, vectors, self.dimension, scopes)
        moved = [
            i for i, scope in zip(ids.tolist(), scopes.tolist(), strict=True) if self._scope_of.get(i, scope) != scope
        ]
        if moved:
            self.delete(np.array(moved, dtype=np.int64))
        for scope in np.unique(scopes).tolist():
            mine = scopes == scope
            self._put(scope, ids[mine], vectors[mine])
            self._scope_of.update(dict.fromkeys(ids[mine].tolist(), scope))

    def _put(self, scope: int, ids: Ids, vectors: Vectors) -> None:
        rows = self._scopes.get(scope)
        if rows is None:
            rows = self._scopes[scope] = Rows(self.dimension)
        rows.upsert(ids, vectors)

    def delete(self, ids: Ids) -> int:
        """Removes ids; unknown ones are ignored. Returns how many were removed."""
        n = len(self._scope_of)
        for scope, mine in self._by_scope(ids).items():
            self._drop(scope, np.array(mine, dtype=np.int64))
            for i in mine:
                del self._scope_of[i]
        return n - len(self._scope_of)

    def _by_scope(self, ids: Ids) -> dict[int, list[int]]:
        """Those of the ids that are held, by their scopes."""
        found: dict[int, list[int]] = {}
        for i in dict.fromkeys(ids.tolist()):
            scope = self._scope_of.get(i)
            if scope is not None:
                found.setdefault(scope, []).append(i)
        return found

    def _drop(self, scope: int, ids: Ids) -> None:
        rows = self._scopes[scope]
        rows.delete(ids)
        if not len(rows):
            del self._scopes[scope]

    def search(self, query: Vectors, scope: int, k: int, *, without: Collection[int] = ()) -> tuple[Ids, Vectors]:
        """Finds the at most k best of a scope for ``query`` [d]; see VectorIndex."""
        rows = self._scopes.get(scope)
        if rows is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        return best(rows.ids, rows.matrix @ query, k, without)

    def get(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Those of the ids that are held [m], and their vectors [m, d]."""
        by_scope = self._by_scope(ids)
        found = [self._read(scope, np.array(mine, dtype=np.int64)) for scope, mine in by_scope.items()]
        if not found:
            return np.empty(0, dtype=np.int64), np.empty((0, self.dimension), dtype=np.float32)
        return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])

    def _read(self, scope: int, ids: Ids) -> tuple[Ids, Vectors]:
        rows = self._scopes[scope]
        known, where = rows.find(ids)
        return known, rows.matrix[where]

    def scopes_of(self, ids: Ids) -> Ids:
        """The scope [n] of each id; 0 for those that are not held."""
        return np.array([self._scope_of.get(i, 0) for i in ids.tolist()], dtype=np.int64)

    def count(self) -> int:
        """Number of vectors held."""
        return len(self._scope_of)

    def ids(self) -> Ids:
        """All ids, ascending."""
        return np.sort(np.fromiter(self._scope_of, dtype=np.int64, count=len(self._scope_of)))

    def dump(self, file: BinaryIO) -> None:
        """Writes each scope: number, count, ids and rows, little-endian; vectors as float16, as SQL holds them."""
        for scope, rows in self._scopes.items():
            file.write(np.array([scope, len(rows)], dtype="<i8").tobytes())
            file.write(rows.ids.astype("<i8", copy=False).tobytes())
            for start in range(0, len(rows), _BLOCK):
                file.write(rows.matrix[start : start + _BLOCK].astype("<f2").data)

    def load(self, file: BinaryIO, count: int) -> None:
        """Replaces everything by ``count`` vectors that ``dump`` wrote."""
        self._scopes, self._scope_of = {}, {}
        while len(self._scope_of) < count:
            scope, n = np.frombuffer(_exactly(file, 16), dtype="<i8").tolist()
            if not 0 < n <= count - len(self._scope_of):
                raise StoreCorruptError("the index file holds another count than it says")
            ids = np.frombuffer(_exactly(file, 8 * n), dtype="<i8").astype(np.int64)
            rows = self._scopes[scope] = Rows(self.dimension)
            for start in range(0, n, _BLOCK):
                part = ids[start : start + _BLOCK]
                data = _exactly(file, 2 * len(part) * self.dimension)
                rows.upsert(part, np.frombuffer(data, dtype="<f2").reshape(len(part), -1).astype(np.float32))
            self._scope_of.update(dict.fromkeys(ids.tolist(), scope))


def _exactly(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise StoreCorruptError("the index file is too short")
    return data
