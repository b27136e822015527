"""What one search looks at: turns and facts that hold a word of it, and keys near in words, meaning or time."""

from __future__ import annotations

import heapq
import math
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Connection, and_, func, or_, select

from memstream.memory.live_index import LiveIndex
from memstream.memory.query import Query
from memstream.memory.view import View
from memstream.stores import fulltext
from memstream.stores import schema as db
from memstream.stores.base import Vectors

_MAX_POSTINGS = 2000  # newest turns looked at per term; a term in more of them says little
_LEXICAL = 96  # turns whose windows are scored, and facts
_DENSE_WINDOWS = 64
_DATED_WINDOWS = 512  # of the dates asked for, newest first; the nearest in meaning of them
_MAX_SPAN = 64  # sequences a window reaches over at most, gaps included
_FEW_TURNS = 100  # in a scope of fewer, a word is weighed as if there were so many: it cannot be known to be common
_RARE_TURNS = 3  # an identifier in so few turns says what is meant
_COMMON_PART = 8  # a word in an eighth of the turns is all over the place
_COMMON_TURNS = 32  # of so many turns at least


class Reach:
    """Words and candidates of one search, found in one transaction, and vectors, outside of it.

    Attributes:
        view: whose memories.
        query: what is asked.
        turn_terms: the query's terms in each turn that holds any.
        fact_terms: likewise in each fact.
        idf: how much each term tells.
        mass: what a text with every term of the query would have of it.
        identifiers: terms that say by themselves what is meant.
        common: terms that are all over the scope.
        chosen: ids of the keys (chunks) to be scored.
        both: the query's vectors [2, d], see ``Query.embed``; None without an embedder.
        dense: cosines of chosen keys with both.
        n_considered: number of memories searched.
    """

    def __init__(self, view: View, query: Query) -> None:
        self.view, self.query = view, query
        self.turn_terms: dict[int, list[str]] = {}
        self.fact_terms: dict[int, list[str]] = {}
        self.idf: dict[str, float] = {}
        self.mass = 1.0
        self.identifiers: set[str] = set()
        self.common: set[str] = set()
        self.chosen: set[int] = set()
        self.both: Vectors | None = None
        self.dense: dict[int, list[float]] = {}
        self.n_considered = 0
        self._window: list[int] = []
        self._dated: list[int] = []

    def look_up(self, connection: Connection, *, has_vectors: bool) -> None:
        """Finds which turns and facts hold which words, and the keys that may be searched."""
        self._connection = connection
        n_turns = self._count_turns()
        self.n_considered = n_turns + self._count_facts()
        self._look_up_terms(n_turns)
        self.chosen = self._windows_around(self.best(self.turn_terms))
        self._dated = self._windows_of_dates()
        self._window = list(connection.scalars(select(db.Chunk.id).where(self.view.window())))
        if not has_vectors:
            self.chosen |= set(self._dated)

    def search_vectors(self, index: LiveIndex, both: Vectors) -> None:
        """Adds the keys that are near in meaning, and the cosines of those already chosen."""
        self.both = both
        self.chosen.update(index.search(both[1], self.view.scope, _DENSE_WINDOWS, self._window))
        dated = index.cosines(both, self._dated)
        self.chosen.update(sorted(dated, key=lambda key: -dated[key][1])[:_DENSE_WINDOWS])
        self.dense = index.cosines(both, self.chosen)

    def _count_turns(self) -> int:
        statement = select(func.count()).select_from(db.Turn).join(db.Conversation).where(self.view.turns())
        return self._connection.scalar(statement) or 0

    def _count_facts(self) -> int:
        return self._connection.scalar(select(func.count()).select_from(db.Fact).where(self.view.facts())) or 0

    def _look_up_terms(self, n_turns: int) -> None:
        view = self.view
        for term in self.query.terms:
            found = fulltext.turns_with(
                self._connection, view.scope_term, term, view.asking_id, view.window_from, _MAX_POSTINGS
            )
            facts = fulltext.facts_with(self._connection, view.scope_term, term, _MAX_POSTINGS)
            n = len(found) + len(facts)
            self.idf[term] = math.log(1 + (max(n_turns, n, _FEW_TURNS) - n + 0.5) / (n + 0.5))
            if term in self.query.newest:
                if 0 < n <= _RARE_TURNS and any(char.isdigit() for char in term):
                    self.identifiers.add(term)
                if n_turns >= _COMMON_TURNS and n >= n_turns / _COMMON_PART:
                    self.common.add(term)
            for turn_id in found:
                self.turn_terms.setdefault(turn_id, []).append(term)
            for fact_id in facts:
                self.fact_terms.setdefault(fact_id, []).append(term)
        self.mass = max(sum(self.query.terms[term] * idf for term, idf in self.idf.items()), 1e-6)

    def best(self, terms: dict[int, list[str]]) -> list[int]:
        """Of the turns or facts with their terms, those that hold the most of what was asked for."""

        def weight(item: tuple[int, list[str]]) -> tuple[float, int]:
            return (-sum(self.query.terms[term] * self.idf[term] for term in item[1]), -item[0])

        return [number for number, _ in heapq.nsmallest(_LEXICAL, terms.items(), key=weight)]

    def _windows_around(self, turn_ids: list[int]) -> set[int]:
        statement = (
            select(db.Chunk.id)
            .join(db.Turn, and_(
                db.Turn.conversation_id == db.Chunk.conversation_id,
                db.Chunk.last_sequence >= db.Turn.sequence,
                db.Chunk.last_sequence <= db.Turn.sequence + _MAX_SPAN,
                db.Chunk.first_sequence <= db.Turn.sequence,
            ))
            .where(db.Turn.id.in_(turn_ids), self.view.chunks())
        )  # fmt: skip
        return set(self._connection.scalars(statement))

    def _windows_of_dates(self) -> list[int]:
        """Windows whose last turn was said on a date that was asked for, or a few days around it."""
        if not self.query.dates:
            return []
        before, after = timedelta(days=3), timedelta(days=10)
        said = [
            and_(db.Turn.created >= _midnight(span.first - before), db.Turn.created < _midnight(span.last + after))
            for span in self.query.dates
        ]
        statement = (
            select(db.Chunk.id)
            .join(db.Turn, and_(
                db.Turn.conversation_id == db.Chunk.conversation_id, db.Turn.sequence == db.Chunk.last_sequence,
            ))
            .where(self.view.chunks(), or_(*said))
            .order_by(db.Chunk.id.desc())
            .limit(_DATED_WINDOWS)
        )  # fmt: skip
        return list(self._connection.scalars(statement))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
