"""What happens off the reply's path: the vectors of everything new."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import Connection

from memstream.memory.embedder import Embedders, embed
from memstream.memory.live_index import SearchIndex
from memstream.memory.worker import Worker
from memstream.stores import vectors
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_PIECE = 64  # texts embedded between two looks at the store
_CHECKPOINT_EVENTS = 2000  # the index file is written after so many changes,
_CHECKPOINT_PART = 8  # or, of a large one, after an eighth has changed


class Indexer:
    """One background thread. Its queue need not survive: what has no vector is found in the store again.

    Args:
        store: read and written in short transactions, never across a call of the embedder.
        index: told of new vectors.
        embedders: of the store's vectors; none makes no vectors.
    """

    def __init__(self, store: SqlStore, index: SearchIndex, embedders: Embedders) -> None:
        self._store, self._index, self._embedders = store, index, embedders
        self._lock = threading.Lock()
        self._queued = False
        self._space_id: int | None = None
        self._done = vectors.Done()  # in that space
        self._worker = Worker("indexing")

    def wake(self, *, anew: bool = False) -> None:
        """Has what is without a vector embedded, unless that is queued already.

        Args:
            anew: looks at everything, not only at what came since the last look.
        """
        with self._lock:
            if anew:
                self._space_id = None
            if not self._embedders or self._queued:
                return
            self._queued = True
        self._worker.submit(self._embed_pending)

    def warm_up(self, then: Callable[[], object]) -> None:
        """Has embedder and index loaded, and ``then`` called, so that the first recall need not wait for them."""
        if self._embedders:
            self._worker.submit(lambda: self._load(then))

    def run(self, job: Callable[[], object]) -> None:
        """Has something else done off the reply's path."""
        self._worker.submit(job)

    def _load(self, then: Callable[[], object]) -> None:
        with self._store.read() as connection:
            space = vectors.find_space(connection)
        assert space is not None
        embed(self._embedders.of(space), ["first"])
        self._index.refresh()
        self._index.improve()
        then()

    def _embed_pending(self) -> None:
        self._queued = False  # first: whoever wakes from now on may have written what the next look misses
        while True:
            with self._store.read() as connection:
                space = self._look_at_space(connection)
                items = vectors.pending(connection, space, _PIECE, self._done)
            if not items:
                return
            matrix = embed(self._embedders.of(space), [item.text for item in items])
            with self._store.write(durable=False) as connection:
                if self._look_at_space(connection) == space:
                    vectors.store(connection, space, items, matrix)
            self._index.follow()
            self._index.improve()
            if self._index.unsaved_events >= max(_CHECKPOINT_EVENTS, self._index.count() // _CHECKPOINT_PART):
                self._index.checkpoint()

    def _look_at_space(self, connection: Connection) -> SpaceInfo:
        """The space that serves; where it is another than at the last look, all texts are looked at anew."""
        space = vectors.find_space(connection)
        assert space is not None
        if self._space_id != space.id:
            self._space_id, self._done = space.id, vectors.Done()
        return space

    def flush(self) -> None:
        """Waits for everything queued, and for what that queues.

        Raises:
            MemstreamError: the first of what went wrong since the last flush.
        """
        self._worker.flush()

    def shutdown(self) -> None:
        """Takes no more work and ends the thread."""
        self._worker.shutdown()
