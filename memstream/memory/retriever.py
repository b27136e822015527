"""Finding what matters: full-text and dense search over one scope, fused, scored turn by turn, gated.

``reach.py`` finds what may matter, ``scoring.py`` how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from memstream.memory.embedder import Embedder
from memstream.memory.hits import Ranked
from memstream.memory.live_index import LiveIndex
from memstream.memory.query import make_query
from memstream.memory.reach import Reach
from memstream.memory.scoring import Scoring
from memstream.memory.view import oldest_day, view_of
from memstream.stores.base import Scope
from memstream.stores.sql import SqlStore


class Retriever:
    """Ranks the memories of a scope for a query."""

    def __init__(self, store: SqlStore, index: LiveIndex, embedder: Embedder | None) -> None:
        self._store = store
        self._index = index
        self._embedder = embedder

    def rank(
        self, scope: Scope, query_turns: Sequence[str], *, window_from: int | None, gate: float, today: date
    ) -> Ranked:
        """All candidates, best first; see ``Hit.evidence`` for the gate.

        Args:
            scope: whose memories.
            query_turns: the latest turns, newest last; the newest asks.
            window_from: turns of the asking conversation from this sequence on are left out; None: none are.
            gate: least cosine of a hit that holds half of the words that were asked for.
            today: the day of the question.
        """
        # The index is never asked inside a transaction: its lock is taken before the store's, by everybody.
        with self._store.read() as connection:
            view = view_of(connection, scope, window_from)
            query = None if view is None else make_query(query_turns, today=today, oldest=oldest_day(connection, view))
            if view is None or query is None:
                return Ranked([], [], 0)
            reach = Reach(view, query)
            reach.look_up(connection, has_vectors=self._embedder is not None)
        if self._embedder is not None:
            both = query.embed(self._embedder, reach.common)
            self._index.refresh()
            reach.search_vectors(self._index, both)
        with self._store.read() as connection:
            return Scoring(reach, gate).run(connection)
