"""What happens off the reply's path: the vectors of everything new."""

from __future__ import annotations

import threading
from collections.abc import Callable

from memstream.memory.embedder import Embedder, embed
from memstream.memory.live_index import LiveIndex
from memstream.memory.worker import Worker
from memstream.stores import vectors
from memstream.stores.sql import SqlStore

_PIECE = 64  # texts embedded between two looks at the store
_CHECKPOINT_EVENTS = 2000  # the index file is written after so many changes,
_CHECKPOINT_PART = 8  # or, of a large one, after an eighth has changed


class Indexer:
    """One background thread. Its queue need not survive: what has no vector is found in the store again.

    Args:
        store: read and written in short transactions, never across a call of the embedder.
        index: told of new vectors.
        embedder: None makes no vectors.
    """

    def __init__(self, store: SqlStore, index: LiveIndex, embedder: Embedder | None) -> None:
        self._store, self._index, self._embedder = store, index, embedder
        self._lock = threading.Lock()
        self._queued = False
        self._worker = Worker("indexing")

    def wake(self) -> None:
        """Has what is without a vector embedded, unless that is queued already."""
        with self._lock:
            if self._embedder is None or self._queued:
                return
            self._queued = True
        self._worker.submit(self._embed_pending)

    def warm_up(self, then: Callable[[], object]) -> None:
        """Has embedder and index loaded, and ``then`` called, so that the first recall need not wait for them."""
        if self._embedder is not None:
            self._worker.submit(lambda: self._load(then))

    def _load(self, then: Callable[[], object]) -> None:
        assert self._embedder is not None
        embed(self._embedder, ["first"])
        self._index.refresh()
        self._index.improve()
        then()

    def _embed_pending(self) -> None:
        assert self._embedder is not None
        self._queued = False  # first: whoever wakes from now on may have written what the next look misses
        while True:
            with self._store.read() as connection:
                items = vectors.pending(connection, _PIECE)
            if not items:
                return
            matrix = embed(self._embedder, [item.text for item in items])
            with self._store.write(durable=False) as connection:
                space = vectors.find_space(connection)
                assert space is not None
                vectors.store(connection, space.id, items, matrix)
            self._index.follow()
            self._index.improve()
            if self._index.unsaved_events >= max(_CHECKPOINT_EVENTS, self._index.count() // _CHECKPOINT_PART):
                self._index.checkpoint()

    def flush(self) -> None:
        """Waits for everything queued, and for what that queues.

        Raises:
            MemstreamError: the first of what went wrong since the last flush.
        """
        self._worker.flush()

    def shutdown(self) -> None:
        """Takes no more work and ends the thread."""
        self._worker.shutdown()
