"""The vector index with FAISS for large scopes; small ones are searched exactly. FAISS is imported on first use."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection
from typing import Any, BinaryIO

import numpy as np

from memstream.errors import ConfigError, MissingExtraError, StoreCorruptError
from memstream.stores.base import Ids, Vectors
from memstream.stores.exact_index import ExactIndex, best

LARGE = 20_000  # a scope of more vectors is worth an index of its own
_GROWN = 4  # times the size it was trained at: trained anew
_PER_LIST = 64  # vectors a list is trained on
_PROBED = 8  # one of so many lists is searched
_LEAST_PROBED = 16
_FILE_BLOCK = 1 << 20
_ADDED_AT_ONCE = 65_536


def faiss_installed() -> bool:
    """True where the module ``faiss`` can be imported (``memstream[cpu]`` or ``memstream[gpu]``)."""
    return importlib.util.find_spec("faiss") is not None


class FaissIndex(ExactIndex):
    """Scopes of more than ``large`` vectors get a FAISS index of their own: made by ``build``, put in by ``install``.

    Args:
        dimension: of every vector.
        factory: FAISS's own description of such an index; None takes inverted lists of float16 vectors, their number
            fitted to the scope.
        large: how many vectors a scope may have before it is worth one.

    Raises:
        MissingExtraError: FAISS is not installed.
        ConfigError: FAISS does not understand ``factory``, or cannot delete from such an index.
    """

    def __init__(self, dimension: int, factory: str | None = None, *, large: int = LARGE) -> None:
        if not faiss_installed():
            raise MissingExtraError("FAISS is not installed; run: pip install 'memstream[cpu]'")
        import faiss

        super().__init__(dimension)
        self._faiss: Any = faiss
        self._factory = factory
        self._threshold = large
        self._large: dict[int, Any] = {}
        self._trained_at: dict[int, int] = {}
        self.backend = f"faiss:{factory}" if factory else "faiss"
        if factory is not None:
            self._new(factory)
            self.precision = 0.0 if factory.endswith(("Flat", "SQfp16")) else 1.0

    def _new(self, factory: str) -> Any:
        """An empty index that can delete and give vectors back."""
        try:
            made = self._faiss.index_factory(self.dimension, factory, self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(f"FAISS does not understand the index {factory!r}") from error
        inverted = self._faiss.try_extract_index_ivf(made)
        if inverted is not None:
            inverted.set_direct_map_type(self._faiss.DirectMap.Hashtable)
            inverted.nprobe = max(_LEAST_PROBED, inverted.nlist // _PROBED)
            if factory.endswith("SQfp16"):
                inverted.by_residual = False  # float16 as SQL holds it, rather than of the distance to a list's centre
            return made
        if not isinstance(self._faiss.downcast_index(made), (self._faiss.IndexFlat, self._faiss.IndexScalarQuantizer)):
            raise ConfigError(
                f"the FAISS index {factory!r} cannot delete, and memories must be forgettable; "
                "use IVF..., Flat or SQ..., or leave it out"
            )
        return self._faiss.IndexIDMap2(made)

    # --- large scopes

    def overgrown(self) -> int | None:
        """A scope that has become worth a FAISS index, or a larger one; None where there is none."""
        for scope, rows in self._scopes.items():
            if len(rows) > self._threshold:
                return scope
        for scope, index in self._large.items():
            if index.ntotal > _GROWN * self._trained_at[scope]:
                return scope
        return None

    def copy(self, scope: int) -> tuple[Ids, Vectors]:
        """The ids [n] and vectors [n, d] of a scope, for ``build``."""
        if scope in self._large:
            ids = self._held(self._large[scope])
            return ids, self._reconstruct(self._large[scope], ids)
        rows = self._scopes[scope]
        return rows.ids.copy(), rows.matrix.copy()

    def build(self, ids: Ids, vectors: Vectors) -> Any:
        """A FAISS index of a scope's vectors, which takes seconds; touches nothing that is being searched."""
        n_lists = 2 ** round(math.log2(math.sqrt(len(ids))))
        index = self._new(self._factory or f"IVF{n_lists},SQfp16")
        inverted = self._faiss.try_extract_index_ivf(index)
        if inverted is not None:
            inverted.cp.max_points_per_centroid = _PER_LIST
            inverted.cp.niter = 10
        if not index.is_trained:
            n = min(len(ids), _PER_LIST * (inverted.nlist if inverted is not None else 1024))
            index.train(vectors[np.random.default_rng(0).permutation(len(ids))[:n]])
        for start in range(0, len(ids), _ADDED_AT_ONCE):
            part = slice(start, start + _ADDED_AT_ONCE)
            index.add_with_ids(np.ascontiguousarray(vectors[part]), np.ascontiguousarray(ids[part]))
        return index

    def install(self, scope: int, index: Any) -> None:
        """Puts in what ``build`` made of an earlier copy of a scope, and brings it up to date."""
        held = self._held(index)
        now, _ = self.copy(scope) if scope in self._large or scope in self._scopes else (held[:0], None)
        gone, fresh = np.setdiff1d(held, now), np.setdiff1d(now, held)
        if len(gone):
            self._remove(index, gone)
        if len(fresh):
            ids, vectors = self._read(scope, fresh)
            index.add_with_ids(np.ascontiguousarray(vectors), ids)
        self._scopes.pop(scope, None)
        self._large.pop(scope, None)
        if len(now):
            self._large[scope], self._trained_at[scope] = index, len(now)

    def _held(self, index: Any) -> Ids:
        """The ids in a FAISS index, ascending."""
        inverted = self._faiss.try_extract_index_ivf(index)
        if inverted is None:
            return np.sort(self._faiss.vector_to_array(index.id_map).astype(np.int64))
        lists = inverted.invlists
        parts = [
            self._faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy()
            for i in range(inverted.nlist)
            if lists.list_size(i)
        ]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def _remove(self, index: Any, ids: Ids) -> None:
        ids = np.ascontiguousarray(ids)
        index.remove_ids(
            self._faiss.IDSelectorArray(len(ids), self._faiss.swig_ptr(ids))
        )  # inverted lists take no other

    def _reconstruct(self, index: Any, ids: Ids) -> Vectors:
        if not len(ids):
            return np.empty((0, self.dimension), dtype=np.float32)
        return np.asarray(index.reconstruct_batch(np.ascontiguousarray(ids)), dtype=np.float32)

    # --- the index

    def _put(self, scope: int, ids: Ids, vectors: Vectors) -> None:
        index = self._large.get(scope)
        if index is None:
            super()._put(scope, ids, vectors)
            return
        known = np.array([i for i in ids.tolist() if i in self._scope_of], dtype=np.int64)
        if len(known):
            self._remove(index, known)
        index.add_with_ids(np.ascontiguousarray(vectors), np.ascontiguousarray(ids))

    def _drop(self, scope: int, ids: Ids) -> None:
        index = self._large.get(scope)
        if index is None:
            super()._drop(scope, ids)
            return
        self._remove(index, ids)
        if not index.ntotal:
            del self._large[scope], self._trained_at[scope]

    def _read(self, scope: int, ids: Ids) -> tuple[Ids, Vectors]:
        index = self._large.get(scope)
        return super()._read(scope, ids) if index is None else (ids, self._reconstruct(index, ids))

    def search(self, query: Vectors, scope: int, k: int, *, without: Collection[int] = ()) -> tuple[Ids, Vectors]:
        """Finds the at most k best of a scope for ``query`` [d]; see VectorIndex."""
        index = self._large.get(scope)
        if index is None:
            return super().search(query, scope, k, without=without)
        scores, ids = index.search(np.ascontiguousarray(query[None]), min(k + len(without), index.ntotal))
        found = ids[0] >= 0
        return best(ids[0][found], scores[0][found], k, without)

    def dump(self, file: BinaryIO) -> None:
        """Streams the large scopes in FAISS's own format, without a second copy in memory, then the small ones."""
        file.write(np.array([len(self._large)], dtype="<i8").tobytes())
        for scope, index in self._large.items():
            file.write(np.array([scope, index.ntotal, self._trained_at[scope]], dtype="<i8").tobytes())
            self._write(file, index)
        super().dump(file)

    def _write(self, file: BinaryIO, index: Any) -> None:
        refused: list[OSError] = []

        def write(data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:  # FAISS would tell it as a RuntimeError without the reason
                refused.append(error)
                raise

        try:
            self._faiss.write_index(index, self._faiss.PyCallbackIOWriter(write, _FILE_BLOCK))
        except RuntimeError as error:
            if refused:
                raise refused[0] from error
            raise

    def load(self, file: BinaryIO, count: int) -> None:
        """Replaces everything by what ``dump`` wrote; the caller has checked the file's checksum."""
        self._large, self._trained_at = {}, {}
        scope_of: dict[int, int] = {}
        (n_large,) = np.frombuffer(file.read(8), dtype="<i8").tolist()
        for _ in range(n_large):
            scope, n, trained_at = np.frombuffer(file.read(24), dtype="<i8").tolist()
            try:
                index = self._faiss.read_index(self._faiss.PyCallbackIOReader(file.read, _FILE_BLOCK))
            except RuntimeError as error:
                raise StoreCorruptError(f"FAISS cannot read it: {error}") from error
            if index.d != self.dimension or index.ntotal != n:
                raise StoreCorruptError("the index file holds another dimension or count than it says")
            self._large[scope], self._trained_at[scope] = index, trained_at
            scope_of.update(dict.fromkeys(self._held(index).tolist(), scope))
        super().load(file, count - len(scope_of))
        self._scope_of.update(scope_of)
        if len(self._scope_of) != count:
            raise StoreCorruptError("the index file holds an id twice")
