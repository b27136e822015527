"""The vector index without FAISS: one matrix, searched exactly."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from memstream.errors import StoreCorruptError
from memstream.stores.base import Ids, Vectors, check_vectors

_BLOCK = 2048  # rows gathered at once: bounds what a search allocates (3 MiB at 384 dimensions)


def best(ids: Ids, scores: Vectors, k: int) -> tuple[Ids, Vectors]:
    """The k best of ids [n] by scores [n], best first, ties by id."""
    order = np.lexsort((ids, -scores))[:k]
    return ids[order], scores[order]


class ExactIndex:
    """Vectors in rows of one float32 matrix that grows by half; a deleted row is filled by the last one."""

    backend = "exact"

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._matrix = np.empty((0, dimension), dtype=np.float32)
        self._row_ids = np.empty(0, dtype=np.int64)
        self._rows: dict[int, int] = {}

    def upsert(self, ids: Ids, vectors: Vectors) -> None:
        """Adds vectors [n, d] under ids [n], replacing those that are there."""
        check_vectors(ids, vectors, self.dimension)
        self._reserve(len(self._rows) + len(ids))
        for chunk_id, vector in zip(ids.tolist(), vectors, strict=True):
            row = self._rows.setdefault(chunk_id, len(self._rows))
            self._matrix[row] = vector
            self._row_ids[row] = chunk_id

    def _reserve(self, n: int) -> None:
        if n > len(self._matrix):
            capacity = max(n, len(self._matrix) * 3 // 2)
            matrix = np.empty((capacity, self.dimension), dtype=np.float32)
            row_ids = np.empty(capacity, dtype=np.int64)
            used = len(self._rows)
            matrix[:used], row_ids[:used] = self._matrix[:used], self._row_ids[:used]
            self._matrix, self._row_ids = matrix, row_ids

    def delete(self, ids: Ids) -> int:
        """Removes ids; unknown ones are ignored. Returns how many were removed."""
        removed = 0
        for chunk_id in ids.tolist():
            row = self._rows.pop(chunk_id, None)
            if row is None:
                continue
            removed += 1
            last = len(self._rows)
            if row != last:
                moved = int(self._row_ids[last])
                self._matrix[row], self._row_ids[row], self._rows[moved] = self._matrix[last], moved, row
            self._matrix[last] = 0.0  # a forgotten vector does not stay in memory
        return removed

    def search(self, query: Vectors, candidates: Ids, k: int) -> tuple[Ids, Vectors]:
        """Finds the at most k best of ``candidates`` for ``query`` [d]; see VectorIndex."""
        known = [(i, row) for i in candidates.tolist() if (row := self._rows.get(i)) is not None]
        ids = np.array([i for i, _ in known], dtype=np.int64)
        rows = np.array([row for _, row in known], dtype=np.int64)
        scores = np.empty(len(rows), dtype=np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            scores[block] = self._matrix[rows[block]] @ query
        return best(ids, scores, k)

    def count(self) -> int:
        """Number of vectors held."""
        return len(self._rows)

    def ids(self) -> Ids:
        """All ids, ascending."""
        return np.sort(self._row_ids[: len(self._rows)])

    def get(self, ids: Ids) -> Vectors:
        """The vectors [n, d] of ids that must all be held."""
        rows = np.array([self._rows[i] for i in ids.tolist()], dtype=np.int64)
        return self._matrix[rows]

    def dump(self, file: BinaryIO) -> None:
        """Writes ids, then rows, little-endian."""
        n = len(self._rows)
        file.write(self._row_ids[:n].astype("<i8", copy=False).tobytes())
        for start in range(0, n, _BLOCK):
            file.write(self._matrix[start : min(n, start + _BLOCK)].astype("<f4", copy=False).tobytes())

    def load(self, file: BinaryIO, count: int) -> None:
        """Replaces everything by ``count`` vectors that ``dump`` wrote."""
        ids = np.frombuffer(file.read(8 * count), dtype="<i8").astype(np.int64)
        self.__init__(self.dimension)  # type: ignore[misc]
        self._reserve(count)
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            data = file.read(4 * n * self.dimension)
            if len(data) != 4 * n * self.dimension or len(ids) != count:
                raise StoreCorruptError("the index file is too short")
            self.upsert(ids[start : start + n], np.frombuffer(data, dtype="<f4").reshape(n, -1).astype(np.float32))
