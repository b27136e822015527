"""What one search looks at: texts that hold a word of it, and keys near in words, meaning or time."""

from __future__ import annotations

import heapq
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Connection, and_, func, or_, select
from sqlalchemy.orm import aliased

from memstream.memory.live_index import SearchIndex
from memstream.memory.measure import Measure
from memstream.memory.query import Query
from memstream.memory.view import View
from memstream.stores import documents, fulltext, rows
from memstream.stores import schema as db
from memstream.stores.base import Vectors
from memstream.stores.vectors import SpaceInfo

_MAX_POSTINGS = 2000  # newest turns looked at per term; a term in more of them says little
_LEXICAL = 96  # turns whose windows are scored, facts, and passages
_DENSE_WINDOWS = 64
_DENSE = 128  # windows, and particulars that lead to theirs
_DATED_WINDOWS = 512  # of the dates asked for, newest first; the nearest in meaning of them
_MAX_SPAN = 64  # sequences a window reaches over at most, gaps included
_COMMON_PART = 8  # a word in an eighth of the turns is all over the place
_COMMON_TURNS = 32  # of so many turns at least

# Keys of particulars with the turns that tell them.
_TOLD = (
    select(db.Chunk.id, db.Turn.id)
    .join(db.Turn, and_(
        db.Turn.conversation_id == db.Chunk.conversation_id, db.Turn.sequence == db.Chunk.last_sequence,
    ))
    .where(db.Chunk.kind == "fact", db.Chunk.fact_id.is_(None))
)  # fmt: skip


class Reach:
    """Words and keys of one search, found in one transaction, and vectors, outside of it.

    Attributes:
        view: whose memories.
        query: what is asked.
        turn_terms: the query's terms in each turn that holds any; likewise for facts and passages.
        measure: how much the terms count.
        common: terms that are all over the scope.
        chosen: ids of the keys (chunks) to be scored.
        space: of the vectors; None without any.
        both: the query's vectors [2, d], see ``Query.embed``.
        dense: cosines of the chosen keys with both, and of what their turns tell in particular.
        told: the turns of these particulars, by their keys.
        n_considered: number of memories searched.
    """

    measure: Measure

    def __init__(self, view: View, query: Query) -> None:
        self.view, self.query = view, query
        self.turn_terms: dict[int, list[str]] = {}
        self.fact_terms: dict[int, list[str]] = {}
        self.passage_terms: dict[int, list[str]] = {}
        self.common: set[str] = set()
        self.chosen: set[int] = set()
        self.space: SpaceInfo | None = None
        self.both: Vectors | None = None
        self.dense: dict[int, list[float]] = {}
        self.told: dict[int, int] = {}
        self.n_considered = 0
        self._window: list[int] = []
        self._dated: list[int] = []

    def look_up(self, connection: Connection, gate: float, *, has_vectors: bool) -> None:
        """Finds which turns and facts hold which words, and the keys that may be searched."""
        self._connection = connection
        n_turns = self._count_turns()
        n_passages = documents.count_passages(connection, self.view.documents) if self.view.documents else 0
        self.n_considered = n_turns + self._count_facts() + n_passages
        self._look_up_terms(gate, n_turns, n_passages)
        self.chosen = self._windows_around(self.best(self.turn_terms))
        self._dated = self._windows_of_dates()
        self._window = list(connection.scalars(select(db.Chunk.id).where(self.view.window())))
        if not has_vectors:
            self.chosen |= set(self._dated)
        if self.passage_terms:
            self.chosen.update(documents.keys_of(connection, self.best(self.passage_terms)).values())

    def search_vectors(self, index: SearchIndex, space: SpaceInfo, both: Vectors) -> None:
        """Adds the keys that are near in meaning."""
        self.space, self.both = space, both
        self.chosen.update(index.search(both[1], self.view.scope, _DENSE, self._window))
        for scope in self.view.knowledge:
            self.chosen.update(index.search(both[1], scope, _DENSE_WINDOWS, []))
        dated = index.cosines(both, self._dated)
        self.chosen.update(sorted(dated, key=lambda key: -dated[key][1])[:_DENSE_WINDOWS])

    def follow(self, connection: Connection) -> None:
        """Puts the windows of its turn in the place of each particular, and finds all that the windows' turns tell."""
        self._connection = connection
        found: dict[int, int] = {}
        for part in rows.batches(self.chosen):
            statement = _TOLD.where(db.Chunk.id.in_(part), self.view.chunks())
            found.update(connection.execute(statement).all())
        self.chosen -= found.keys()
        self.chosen |= self._windows_around(sorted(set(found.values())))
        window = aliased(db.Chunk)
        for part in rows.batches(self.chosen):
            inside = and_(
                window.conversation_id == db.Chunk.conversation_id,
                db.Chunk.last_sequence >= window.first_sequence,
                db.Chunk.last_sequence <= window.last_sequence,
            )
            statement = _TOLD.join(window, inside).where(window.id.in_(part), self.view.chunks())
            self.told.update(connection.execute(statement).all())

    def compare(self, index: SearchIndex) -> None:
        """Finds the cosines of all that was chosen."""
        assert self.both is not None
        self.dense = index.cosines(self.both, self.chosen | self.told.keys())

    def told_cosines(self) -> dict[int, float]:
        """The cosine of the nearest particular of each turn that tells any, with what tells memories apart."""
        best: dict[int, float] = {}
        for key, turn_id in self.told.items():
            if key in self.dense:
                best[turn_id] = max(best.get(turn_id, -1.0), self.dense[key][1])
        return best

    def _count_turns(self) -> int:
        statement = select(func.count()).select_from(db.Turn).join(db.Conversation).where(self.view.turns())
        return self._connection.scalar(statement) or 0

    def _count_facts(self) -> int:
        return self._connection.scalar(select(func.count()).select_from(db.Fact).where(self.view.facts())) or 0

    def _look_up_terms(self, gate: float, n_turns: int, n_passages: int) -> None:
        view = self.view
        counts: dict[str, int] = {}
        for term in self.query.terms:
            found = fulltext.turns_with(
                self._connection, view.scope_term, term, view.asking_id, view.window_from, _MAX_POSTINGS
            )
            facts = fulltext.facts_with(self._connection, view.scope_term, term, _MAX_POSTINGS)
            n = len(found) + len(facts)
            if term in self.query.newest and n_turns >= _COMMON_TURNS and n >= n_turns / _COMMON_PART:
                self.common.add(term)
            counts[term] = n
            if view.documents:
                passages = fulltext.passages_with(self._connection, view.documents, term, _MAX_POSTINGS)
                counts[term] += len(passages)
                for passage_id in passages:
                    self.passage_terms.setdefault(passage_id, []).append(term)
            for turn_id in found:
                self.turn_terms.setdefault(turn_id, []).append(term)
            for fact_id in facts:
                self.fact_terms.setdefault(fact_id, []).append(term)
        self.measure = Measure(self.query, gate, counts, n_turns + n_passages)

    def best(self, terms: dict[int, list[str]]) -> list[int]:
        """Of the turns, facts or passages with their terms, those that hold the most of what was asked for."""

        def weight(item: tuple[int, list[str]]) -> tuple[float, int]:
            return (-self.measure.weight(item[1]), -item[0])

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
            .where(db.Turn.id.in_(turn_ids), db.Chunk.kind != "fact", self.view.chunks())
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
            .where(db.Chunk.kind != "fact", self.view.chunks(), or_(*said))
            .order_by(db.Chunk.id.desc())
            .limit(_DATED_WINDOWS)
        )  # fmt: skip
        return list(self._connection.scalars(statement))


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
