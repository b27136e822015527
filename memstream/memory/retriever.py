"""Finding what matters: full-text and dense search over one scope, fused, scored turn by turn, gated.

``reach.py`` finds what may matter, ``scoring.py`` how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date

from memstream.memory.embedder import Embedders
from memstream.memory.hits import Ranked
from memstream.memory.live_index import SearchIndex
from memstream.memory.query import make_query
from memstream.memory.reach import Reach
from memstream.memory.scoring import Scoring
from memstream.memory.view import oldest_day, view_of
from memstream.stores.base import Scope
from memstream.stores.sql import SqlStore


class Retriever:
    """Ranks the memories of a scope for a query."""

    def __init__(self, store: SqlStore, index: SearchIndex, embedders: Embedders) -> None:
        self._store = store
        self._index = index
        self._embedders = embedders

    def rank(
        self,
        scope: Scope,
        query_turns: Sequence[str],
        *,
        window_from: int | None,
        gate: Callable[[], float],
        today: date,
    ) -> Ranked:
        """All candidates, best first; see ``Hit.evidence`` for the gate.

        Args:
            scope: whose memories.
            query_turns: the latest turns, newest last; the newest asks.
            window_from: turns of the asking conversation from this sequence on are left out; None: none are.
            gate: least cosine of a hit that holds half of the words that were asked for; asked only where
                there is something to search, since it may have to load a model first.
            today: the day of the question.
        """
        # The index is never asked inside a transaction: its lock is taken before the store's, by everybody.
        with self._store.read() as connection:
            view = view_of(connection, scope, window_from)
            query = None if view is None else make_query(query_turns, today=today, oldest=oldest_day(connection, view))
            if view is None or query is None:
                return Ranked([], [], None, 0)
            reach = Reach(view, query)
            if not reach.count(connection):
                return Ranked([], [], None, 0)
        least = gate()
        with self._store.read() as connection:
            reach.look_up(connection, least, has_vectors=bool(self._embedders))
        if self._embedders:
            self._index.refresh()
            if (space := self._index.space) is not None:
                both = query.embed(self._embedders.of(space), reach.common)
                reach.search_vectors(self._index, space, both)
                with self._store.read() as connection:
                    reach.follow(connection)
                reach.compare(self._index)
        with self._store.read() as connection:
            return Scoring(reach).run(connection)
