"""What one search looks at: texts that hold a word of it, and keys near in words, meaning or time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Executable, and_, or_, select
from sqlalchemy.orm import aliased

from memstream.memory.live_index import SearchIndex
from memstream.memory.measure import Measure
from memstream.memory.postings import Postings
from memstream.memory.query import Query
from memstream.memory.view import IDS, KEYS_IN_WINDOW, TURNS_IN_WINDOW, VISIBLE_KEYS, View
from memstream.stores import documents, fulltext, rows
from memstream.stores import schema as db
from memstream.stores.base import Vectors
from memstream.stores.vectors import SpaceInfo

_POSTINGS = 12_000  # newest texts looked at for all words together, shared out evenly,
_MOST_POSTINGS, _LEAST_POSTINGS = 2000, 500  # within so many for each; a word in more of them says little
_MANY, _MOST_PART = 10_000, 4  # texts of a scope that are many, and a fourth of all; see ``fulltext.newest_with``
_LEXICAL = 96  # turns whose windows are scored, facts, and passages
_DENSE_WINDOWS = 64
_DENSE = 128  # windows, and particulars that lead to theirs
_DATED_WINDOWS = 512  # of the dates asked for, newest first; the nearest in meaning of them
_MAX_SPAN = 64  # sequences a window reaches over at most, gaps included
_COMMON_PART = 8  # a word in an eighth of the turns is all over the place
_COMMON_TURNS = 32  # of so many turns at least

Span = tuple[int, int, int]  # a conversation, and the first and last sequence of some of its turns

_SPAN = (db.Chunk.conversation_id, db.Chunk.first_sequence, db.Chunk.last_sequence)
_LAST_TURN = and_(db.Turn.conversation_id == db.Chunk.conversation_id, db.Turn.sequence == db.Chunk.last_sequence)
_WINDOW = select(db.Chunk.id, *_SPAN).where(db.Chunk.kind != "fact", VISIBLE_KEYS)
_WINDOWS_AROUND = _WINDOW.join(db.Turn, and_(
    db.Turn.conversation_id == db.Chunk.conversation_id,
    db.Chunk.last_sequence >= db.Turn.sequence,
    db.Chunk.last_sequence <= db.Turn.sequence + _MAX_SPAN,
    db.Chunk.first_sequence <= db.Turn.sequence,
)).where(db.Turn.id.in_(IDS))  # fmt: skip
_NEAR = (
    select(db.Chunk.id, db.Chunk.kind, db.Chunk.fact_id, db.Turn.id, *_SPAN)
    .outerjoin(db.Turn, _LAST_TURN)
    .where(db.Chunk.id.in_(IDS), VISIBLE_KEYS)
)
_AROUND = aliased(db.Chunk)  # a window; remembered facts are in none
_TOLD = (
    select(db.Chunk.id, db.Chunk.conversation_id, db.Chunk.last_sequence)
    .join(_AROUND, and_(
        _AROUND.conversation_id == db.Chunk.conversation_id,
        _AROUND.first_sequence <= db.Chunk.last_sequence,
        _AROUND.last_sequence >= db.Chunk.last_sequence,
    ))
    .where(_AROUND.id.in_(IDS), db.Chunk.kind == "fact", VISIBLE_KEYS)
)  # fmt: skip
_KEYS_IN_WINDOW = select(db.Chunk.id).where(KEYS_IN_WINDOW)
_TURNS_IN_WINDOW = select(db.Turn.id).where(TURNS_IN_WINDOW)


class Reach:
    """Words and keys of one search, found in one transaction, and vectors, outside of it.

    Attributes:
        view: whose memories.
        query: what is asked.
        turns: the turns that hold words of the query; likewise
        facts: and
        passages.
        measure: how much the words count.
        common: words that are all over the scope.
        windows: keys to be scored, with the turns they stand for.
        told: particulars of these turns: keys with conversation and sequence.
        fact_keys: of facts near in meaning, by fact.
        passage_keys: of passages near in words or meaning, by passage.
        space: of the vectors; None without any.
        both: the query's vectors [2, d], see ``Query.embed``.
        dense: cosines of keys with both.
        n_considered: number of memories searched.
    """

    measure: Measure

    def __init__(self, view: View, query: Query) -> None:
        self.view, self.query = view, query
        self.turns = self.facts = self.passages = Postings()
        self.common: set[str] = set()
        self.windows: dict[int, Span] = {}
        self.told: dict[int, tuple[int, int]] = {}
        self.fact_keys: dict[int, int] = {}
        self.passage_keys: dict[int, int] = {}
        self.space: SpaceInfo | None = None
        self.both: Vectors | None = None
        self.dense: dict[int, list[float]] = {}
        self.n_considered = 0
        shared = [fulltext.scope_words(owner_id, None) for owner_id in view.documents]
        self._scopes = {"turn": [view.scope_term], "fact": [view.scope_term], "passage": shared}
        self._sizes: Counter[tuple[str, str]] = Counter()
        self._in_window: set[int] = set()
        self._dated: dict[int, Span] = {}
        self._not_searched: list[int] = []
        self._near: set[int] = set()

    def count(self, connection: Connection) -> int:
        """How many memories there are to search; the first step."""
        self._in_window = set(connection.scalars(_TURNS_IN_WINDOW, self.view.values()))
        terms = {scope for names in self._scopes.values() for scope in names}
        self._sizes = fulltext.sizes(connection, {fulltext.ALL, *terms})
        self.n_considered = sum(map(self._n_rows, self._scopes)) - len(self._in_window)
        return self.n_considered

    def _n_rows(self, kind: str) -> int:
        return sum(self._sizes[f"{kind}_words", scope] for scope in self._scopes[kind])

    def look_up(self, connection: Connection, gate: float, *, has_vectors: bool) -> None:
        """Finds which turns and facts hold which words, and the keys that may be searched."""
        self._connection = connection
        self._look_up_terms(gate)
        self.windows = self._windows_around(self.best(self.turns))
        self._dated = self._windows_of_dates()
        if has_vectors:
            self._not_searched = list(connection.scalars(_KEYS_IN_WINDOW, self.view.values()))
        else:
            self.windows |= self._dated
        if self.view.documents:
            self.passage_keys = documents.keys_of(connection, self.best(self.passages))

    def search_vectors(self, index: SearchIndex, space: SpaceInfo, both: Vectors) -> None:
        """Adds the keys that are near in meaning."""
        self.space, self.both = space, both
        self._near.update(index.search(both[1], self.view.scope, _DENSE, self._not_searched))
        for scope in self.view.knowledge:
            self._near.update(index.search(both[1], scope, _DENSE_WINDOWS, []))
        dated = index.cosines(both, self._dated)
        nearest = sorted(dated, key=lambda key: -dated[key][1])[:_DENSE_WINDOWS]
        self.windows |= {key: self._dated[key] for key in nearest}

    def follow(self, connection: Connection) -> None:
        """Finds what the near keys stand for, puts the windows of its turn in the place of each particular, and finds
        all that the windows' turns tell."""
        self._connection = connection
        particulars: list[int] = []
        for part in rows.batches(self._near):
            found: Sequence[Any] = connection.execute(_NEAR, self.view.values(part)).all()
            for key, kind, fact_id, turn_id, *span in found:
                if fact_id is not None:
                    self.fact_keys[fact_id] = key
                elif kind == "fact":
                    particulars.append(turn_id)
                elif kind != "passage":
                    self.windows[key] = (span[0], span[1], span[2])
        if self.view.documents:
            self.passage_keys |= documents.passages_of_keys(connection, self._near, self.view.documents)
        self.windows |= self._windows_around(particulars)
        for part in rows.batches(self.windows):
            told: Sequence[Any] = connection.execute(_TOLD, self.view.values(part)).all()
            self.told.update((key, (conversation_id, sequence)) for key, conversation_id, sequence in told)

    def compare(self, index: SearchIndex) -> None:
        """Finds the cosines of all keys that were found."""
        assert self.both is not None
        found = (self.windows, self.told, self.fact_keys.values(), self.passage_keys.values())
        self.dense = index.cosines(self.both, {key for keys in found for key in keys})

    def best(self, postings: Postings) -> list[int]:
        """Of texts that hold words of the query, those that hold the most of what was asked for."""
        return list(postings.best(self.measure.weights, _LEXICAL).tolist())

    def _look_up_terms(self, gate: float) -> None:
        terms = tuple(self.query.terms)
        n = {kind: self._n_rows(kind) for kind in self._scopes}
        found: dict[str, list[list[int]]] = {}
        for kind, names in self._scopes.items():
            most = _MANY <= n[kind] >= self._sizes[f"{kind}_words", fulltext.ALL] / _MOST_PART
            out = self._in_window if kind == "turn" else set()
            found[kind] = [self._texts_with(kind, names, term, most, out) if n[kind] else [] for term in terms]
        n["turn"] -= len(self._in_window)
        said = [len(turns) + len(facts) for turns, facts in zip(found["turn"], found["fact"], strict=True)]
        if n["turn"] >= _COMMON_TURNS:
            often = n["turn"] / _COMMON_PART
            self.common = {t for t, m in zip(terms, said, strict=True) if t in self.query.newest and m >= often}
        counts = [m + len(passages) for m, passages in zip(said, found["passage"], strict=True)]
        self.measure = Measure(self.query, gate, counts, n["turn"] + n["passage"])
        self.turns, self.facts, self.passages = (Postings(found[kind]) for kind in ("turn", "fact", "passage"))

    def _texts_with(self, kind: str, scopes: Sequence[str], term: str, most: bool, out: Collection[int]) -> list[int]:
        """The newest texts of a kind that hold a word, but for some."""
        limit = min(_MOST_POSTINGS, max(_LEAST_POSTINGS, _POSTINGS // len(self.query.terms))) + len(out)
        found = fulltext.newest_with(self._connection, f"{kind}_words", scopes, term, limit, most=most)
        return [number for number in found if number not in out] if out else found

    def _windows_around(self, turn_ids: Sequence[int]) -> dict[int, Span]:
        return self._spans(_WINDOWS_AROUND, turn_ids) if turn_ids else {}

    def _windows_of_dates(self) -> dict[int, Span]:
        """Windows whose last turn was said on a date that was asked for, or a few days around it."""
        if not self.query.dates:
            return {}
        before, after = timedelta(days=3), timedelta(days=10)
        said = [
            and_(db.Turn.created >= _midnight(span.first - before), db.Turn.created < _midnight(span.last + after))
            for span in self.query.dates
        ]
        on_a_date = _WINDOW.join(db.Turn, _LAST_TURN).join(db.Conversation).where(self.view.turns(), or_(*said))
        return self._spans(on_a_date.order_by(db.Chunk.id.desc()).limit(_DATED_WINDOWS))

    def _spans(self, statement: Executable, ids: Sequence[int] = ()) -> dict[int, Span]:
        found = self._connection.execute(statement, self.view.values(ids))
        return {key: (row[0], row[1], row[2]) for key, *row in found}


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
