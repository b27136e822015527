"""The vector index on FAISS: ``IndexIDMap2(IndexFlatIP)``, exact, on unit vectors. FAISS is imported on first use."""

from __future__ import annotations

import importlib.util
from typing import Any, BinaryIO

import numpy as np

from memstream.errors import MissingExtraError, StoreCorruptError
from memstream.stores.base import Ids, Vectors, check_vectors
from memstream.stores.exact_index import best

_GATHER_BELOW = 2048  # so few candidates are gathered rather than the whole index scanned
_FILE_BLOCK = 1 << 20


def faiss_installed() -> bool:
    """True where the module ``faiss`` can be imported (``memstream[cpu]`` or ``memstream[gpu]``)."""
    return importlib.util.find_spec("faiss") is not None


class FaissIndex:
    """FAISS, guarded against what it does not check itself: duplicate ids, NaN, wrong dimensions.

    Raises:
        MissingExtraError: FAISS is not installed.
    """

    backend = "faiss"

    def __init__(self, dimension: int) -> None:
        if not faiss_installed():
            raise MissingExtraError("FAISS is not installed; run: pip install 'memstream[cpu]'")
        import faiss

        self._faiss: Any = faiss
        self.dimension = dimension
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._held: set[int] = set()

    def upsert(self, ids: Ids, vectors: Vectors) -> None:
        """Adds vectors [n, d] under ids [n], replacing those that are there."""
        check_vectors(ids, vectors, self.dimension)
        self.delete(ids)
        if len(ids):
            self._index.add_with_ids(np.ascontiguousarray(vectors), np.ascontiguousarray(ids))
            self._held.update(ids.tolist())

    def delete(self, ids: Ids) -> int:
        """Removes ids; unknown ones are ignored. Returns how many were removed."""
        known = np.array([i for i in ids.tolist() if i in self._held], dtype=np.int64)
        if len(known):
            self._index.remove_ids(known)
            self._held.difference_update(known.tolist())
        return len(known)

    def search(self, query: Vectors, candidates: Ids, k: int) -> tuple[Ids, Vectors]:
        """Finds the at most k best of ``candidates`` for ``query`` [d]; see VectorIndex."""
        known = np.array([i for i in candidates.tolist() if i in self._held], dtype=np.int64)
        k = min(k, len(known))
        if k == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        if len(known) <= _GATHER_BELOW:
            return best(known, self.get(known) @ query, k)
        chosen = self._faiss.IDSelectorBatch(known)
        parameters = self._faiss.SearchParameters(sel=chosen)
        scores, ids = self._index.search(np.ascontiguousarray(query[None]), k, params=parameters)
        return best(ids[0], scores[0], k)

    def count(self) -> int:
        """Number of vectors held."""
        return int(self._index.ntotal)

    def ids(self) -> Ids:
        """All ids, ascending."""
        return np.sort(np.array(self._faiss.vector_to_array(self._index.id_map), dtype=np.int64))

    def get(self, ids: Ids) -> Vectors:
        """The vectors [n, d] of ids that must all be held."""
        return np.asarray(self._index.reconstruct_batch(np.ascontiguousarray(ids)), dtype=np.float32)

    def dump(self, file: BinaryIO) -> None:
        """Streams FAISS's own format, without a second copy in memory."""
        refused: list[OSError] = []

        def write(data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:  # FAISS would tell it as a RuntimeError without the reason
                refused.append(error)
                raise

        try:
            self._faiss.write_index(self._index, self._faiss.PyCallbackIOWriter(write, _FILE_BLOCK))
        except RuntimeError as error:
            if refused:
                raise refused[0] from error
            raise

    def load(self, file: BinaryIO, count: int) -> None:
        """Replaces everything by what ``dump`` wrote; the caller has checked the file's checksum."""
        index = self._faiss.read_index(self._faiss.PyCallbackIOReader(file.read, _FILE_BLOCK))
        if index.d != self.dimension or index.ntotal != count:
            raise StoreCorruptError("the index file holds another dimension or count than it says")
        self._index = index
        self._held = set(self.ids().tolist())
        if len(self._held) != count:
            raise StoreCorruptError("the index file holds an id twice")
