"""Finding what matters: full-text and dense search over one scope, fused, scored turn by turn, gated.

Windows are scored and single turns are returned. All scores are shares: the lexical one is BM25 (k1 = 1.2, b = 0.5;
statistics of what the scope may see alone) over what a text of average length with every word of the query would
score, the dense one a cosine. So they add up without being standardised over a scope that nobody could score whole:

    window = lexical + best turn's (cosine + 0.2 if its speaker was asked about - 0.1 if it only asks)
             + 0.5 x window's cosine + 0.5 x closeness to a date that was asked for
    turn   = best window that holds it + 0.55 x own lexical + 0.6 x own cosine + 0.1 x own closeness
             + 0.09 if its speaker was asked about - 0.1 if it only asks

A fact and a passage of a document are their own window, and nobody's words:

    fact   = (1 + 0.55) x lexical + (1 + 0.5 + 0.6) x cosine

A hit passes the gate where its cosine with the whole question, and the share of the question's words that are in it and
around it, say enough together:

    cosine + 0.2 x share in the turn + 0.3 x share in its window >= gate + 0.25

or where it holds an identifier that was asked for (a word with a digit, in at most three turns). Words count by how
rare they are; one that nobody ever said counts most, so that a question about strangers finds nothing. Only hits that
have a word or half of the gate's cosine in common with the question count; where one passes, the others come with it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Connection, and_, func, or_, select

from memstream.memory.chunker import WINDOW_TURNS
from memstream.memory.dates import find_dates
from memstream.memory.embedder import Embedders
from memstream.memory.hits import Hit, Ranked, RankedWindow, set_ranks
from memstream.memory.live_index import SearchIndex
from memstream.memory.measure import TYPICAL_CHARS, TYPICAL_PASSAGE_CHARS, Measure
from memstream.memory.query import Query, is_question, make_query
from memstream.memory.view import View, oldest_day, view_of
from memstream.stores import documents, fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope, Vectors
from memstream.stores.documents import StoredPassage
from memstream.stores.rows import Turn
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_MAX_POSTINGS = 2000  # newest turns looked at per term; a term in more of them says little
_LEXICAL = 96  # turns whose windows are scored, facts, and passages
_DENSE_WINDOWS = 64
_DATED_WINDOWS = 512  # of the dates asked for, newest first; the nearest in meaning of them
_MAX_SPAN = 64  # sequences a window reaches over at most, gaps included
_COMMON_PART = 8  # a word in an eighth of the turns is all over the place
_COMMON_TURNS = 32  # of so many turns at least

_WINDOW_COSINE = 0.5
_DATE = 0.5
_OWN_DATE = 0.1
_DATE_DAYS = 5.0  # people tell of a day within days
_OWN_LEXICAL = 0.55
_OWN_COSINE = 0.6
_SPEAKER = 0.09
_SPEAKER_IN_WINDOW = 0.2
_QUESTION = 0.1  # who asked knew less than who told
_SPEAKER_PREFIX = re.compile(r"\s*((?:[^\W\d_][\w.'’-]{0,30} ?){1,3}): ")


@dataclass(slots=True)
class _Key:
    """A window, summary or fact under consideration."""

    turns: list[Turn] = field(default_factory=list)
    dense: float | None = None  # cosine with what tells memories apart
    whole: float | None = None  # cosine with the whole question
    score: float = 0.0
    terms: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Own:
    """What a turn has by itself."""

    lexical: float
    dense: float  # as in _Key; 0 where it has no vector
    whole: float | None
    closeness: float
    asked: bool  # its speaker was asked about
    question: bool


class Retriever:
    """Ranks the memories of a scope for a query."""

    def __init__(self, store: SqlStore, index: SearchIndex, embedders: Embedders) -> None:
        self._store = store
        self._index = index
        self._embedders = embedders

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
            ranking = _Ranking(view, query, gate)
            ranking.look_up(connection, has_vectors=bool(self._embedders))
        if self._embedders:
            self._index.refresh()
            if (space := self._index.space) is not None:
                both = query.embed(self._embedders.of(space), ranking.common)
                ranking.search_vectors(self._index, space, both)
        with self._store.read() as connection:
            return ranking.run(connection)


class _Ranking:
    """One search: words and candidates in one transaction, vectors outside, turns and scores in another."""

    def __init__(self, view: View, query: Query, gate: float) -> None:
        self._view, self._query, self._gate = view, query, gate
        self._turn_terms: dict[int, list[str]] = {}
        self._fact_terms: dict[int, list[str]] = {}
        self._passage_terms: dict[int, list[str]] = {}
        self._window: list[int] = []
        self._dated: list[int] = []
        self._chosen: set[int] = set()
        self._space: SpaceInfo | None = None
        self._both: Vectors | None = None
        self._dense: dict[int, list[float]] = {}
        self._n_considered = 0
        self.common: set[str] = set()

    # --- what may matter

    def look_up(self, connection: Connection, *, has_vectors: bool) -> None:
        """Finds which turns and facts hold which words, and the keys that may be searched."""
        self._connection = connection
        n_turns = self._count_turns()
        n_passages = documents.count_passages(connection, self._view.documents) if self._view.documents else 0
        self._n_considered = n_turns + self._count_facts() + n_passages
        self._look_up_terms(n_turns, n_passages)
        self._chosen = self._windows_around(self._best(self._turn_terms))
        self._dated = self._windows_of_dates()
        self._window = list(connection.scalars(select(db.Chunk.id).where(self._view.window())))
        if not has_vectors:
            self._chosen |= set(self._dated)
        if self._passage_terms:
            self._chosen.update(documents.keys_of(connection, self._best(self._passage_terms)).values())

    def search_vectors(self, index: SearchIndex, space: SpaceInfo, both: Vectors) -> None:
        """Adds the keys that are near in meaning, and the cosines of those already chosen."""
        self._space, self._both = space, both
        self._chosen.update(index.search(both[1], self._view.scope, _DENSE_WINDOWS, self._window))
        for scope in self._view.knowledge:
            self._chosen.update(index.search(both[1], scope, _DENSE_WINDOWS, []))
        dated = index.cosines(both, self._dated)
        self._chosen.update(sorted(dated, key=lambda key: -dated[key][1])[:_DENSE_WINDOWS])
        self._dense = index.cosines(both, self._chosen)

    def _count_turns(self) -> int:
        statement = select(func.count()).select_from(db.Turn).join(db.Conversation).where(self._view.turns())
        return self._connection.scalar(statement) or 0

    def _count_facts(self) -> int:
        return self._connection.scalar(select(func.count()).select_from(db.Fact).where(self._view.facts())) or 0

    def _look_up_terms(self, n_turns: int, n_passages: int) -> None:
        view = self._view
        counts: dict[str, int] = {}
        for term in self._query.terms:
            found = fulltext.turns_with(
                self._connection, view.scope_term, term, view.asking_id, view.window_from, _MAX_POSTINGS
            )
            facts = fulltext.facts_with(self._connection, view.scope_term, term, _MAX_POSTINGS)
            n = len(found) + len(facts)
            if term in self._query.newest and n_turns >= _COMMON_TURNS and n >= n_turns / _COMMON_PART:
                self.common.add(term)
            counts[term] = n
            if view.documents:
                passages = fulltext.passages_with(self._connection, view.documents, term, _MAX_POSTINGS)
                counts[term] += len(passages)
                for passage_id in passages:
                    self._passage_terms.setdefault(passage_id, []).append(term)
            for turn_id in found:
                self._turn_terms.setdefault(turn_id, []).append(term)
            for fact_id in facts:
                self._fact_terms.setdefault(fact_id, []).append(term)
        self._measure = Measure(self._query, self._gate, counts, n_turns + n_passages)

    def _best(self, terms: dict[int, list[str]]) -> list[int]:
        """Of the turns, facts or passages with their terms, those that hold the most of what was asked for."""

        def weight(item: tuple[int, list[str]]) -> tuple[float, int]:
            return (-self._measure.weight(item[1]), -item[0])

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
            .where(db.Turn.id.in_(turn_ids), self._view.chunks())
        )  # fmt: skip
        return set(self._connection.scalars(statement))

    def _windows_of_dates(self) -> list[int]:
        """Windows whose last turn was said on a date that was asked for, or a few days around it."""
        if not self._query.dates:
            return []
        before, after = timedelta(days=3), timedelta(days=10)
        said = [
            and_(db.Turn.created >= _midnight(span.first - before), db.Turn.created < _midnight(span.last + after))
            for span in self._query.dates
        ]
        statement = (
            select(db.Chunk.id)
            .join(db.Turn, and_(
                db.Turn.conversation_id == db.Chunk.conversation_id, db.Turn.sequence == db.Chunk.last_sequence,
            ))
            .where(self._view.chunks(), or_(*said))
            .order_by(db.Chunk.id.desc())
            .limit(_DATED_WINDOWS)
        )  # fmt: skip
        return list(self._connection.scalars(statement))

    # --- how much it matters

    def run(self, connection: Connection) -> Ranked:
        """Scores the turns and facts under the chosen keys, best first; what is gone by now is left out."""
        self._connection = connection
        keys, facts = self._find_keys()
        turns = {turn.id: turn for key in keys.values() for turn in key.turns}
        turns |= self._recallable([turn_id for turn_id in self._best(self._turn_terms) if turn_id not in turns])
        cosines = self._cosines(list(turns))
        own = {turn.id: self._judge(turn, cosines.get(turn.id)) for turn in turns.values()}
        best: dict[int, _Key] = {}
        for key in keys.values():
            self._score_key(key, own)
            for turn in key.turns:
                if turn.id not in best or key.score > best[turn.id].score:
                    best[turn.id] = key
        hits = [self._turn_hit(turn, best.get(turn.id), own[turn.id]) for turn in turns.values()]
        hits.extend(self._fact_hits(facts))
        if self._view.documents:
            hits.extend(self._passage_hits())
        hits.sort(key=lambda hit: (-hit.score, -(hit.turn.id if hit.turn else 0)))
        set_ranks(hits)
        windows = [RankedWindow(key.turns, key.score) for key in keys.values()]
        windows.sort(key=lambda window: (-window.score, -window.turns[-1].id))
        return Ranked(hits, windows, self._n_considered)

    def _recallable(self, turn_ids: list[int]) -> dict[int, Turn]:
        """Those of the turns that may still be recalled."""
        statement = select(*rows.TURN_COLUMNS).where(db.Turn.id.in_(turn_ids), self._view.recallable_turns())
        return {row[0]: Turn(*row) for row in self._connection.execute(statement)}

    def _find_keys(self) -> tuple[dict[int, _Key], dict[int, list[float] | None]]:
        """Keys by chunk id with their turns, and the facts found with their cosines."""
        keys: dict[int, _Key] = {}
        for part in rows.batches(self._chosen):
            statement = (
                select(db.Chunk.id.label("key"), *rows.TURN_COLUMNS)
                .join(db.Turn, and_(
                    db.Turn.conversation_id == db.Chunk.conversation_id,
                    db.Turn.sequence >= db.Chunk.first_sequence,
                    db.Turn.sequence <= db.Chunk.last_sequence,
                ))
                .where(db.Chunk.id.in_(part), self._view.chunks(), self._view.recallable_turns())
                .order_by(db.Turn.sequence)
            )  # fmt: skip
            for row in self._connection.execute(statement):
                key = keys.get(row[0])
                if key is None:
                    whole, dense = self._dense.get(row[0], (None, None))
                    key = keys[row[0]] = _Key(dense=dense, whole=whole)
                key.turns.append(Turn(*row[1:]))
        facts: dict[int, list[float] | None] = dict.fromkeys(self._best(self._fact_terms))
        for part in rows.batches(self._dense):
            of_facts = select(db.Chunk.id, db.Chunk.fact_id).where(
                db.Chunk.id.in_(part), db.Chunk.kind == "fact", self._view.chunks()
            )
            facts.update((fact_id, self._dense[key]) for key, fact_id in self._connection.execute(of_facts) if fact_id)
        return keys, facts

    def _cosines(self, turn_ids: list[int]) -> dict[int, tuple[float, float]]:
        """Cosines of the turns' own vectors with both vectors of the query."""
        if self._space is None or self._both is None:
            return {}
        own = vectors.read_turns(self._connection, self._space, turn_ids)
        return {
            turn_id: (float(vector @ self._both[0]), float(vector @ self._both[1])) for turn_id, vector in own.items()
        }

    def _judge(self, turn: Turn, cosines: tuple[float, float] | None) -> _Own:
        terms = self._turn_terms.get(turn.id, ())
        whole, dense = (None, 0.0) if cosines is None else (cosines[0], max(0.0, cosines[1]))
        return _Own(
            lexical=self._measure.bm25(dict.fromkeys(terms, 1), len(turn.text) / TYPICAL_CHARS),
            dense=dense,
            whole=whole,
            closeness=self._closeness(turn),
            asked=self._is_asked_about(turn),
            question=is_question(turn.text),
        )

    def _closeness(self, turn: Turn) -> float:
        """1 for a turn said on a date that was asked for, or that tells of it; less with each day beside it."""
        if not self._query.dates:
            return 0.0
        day = turn.created.date()
        told, _ = find_dates(turn.text, today=day, oldest=day)
        days = [day, *(span.first for span in told), *(span.last for span in told)]
        nearest = min(span.distance(day) for span in self._query.dates for day in days)
        return math.exp(-nearest / _DATE_DAYS)

    def _is_asked_about(self, turn: Turn) -> bool:
        """True where the query names who said it (``Name: ...``), or means the one who asks or the one who answers."""
        named = _SPEAKER_PREFIX.match(turn.text)
        if named is not None:
            return not self._query.newest.isdisjoint(fulltext.words(named[1]))
        return turn.role in self._query.roles

    def _score_key(self, key: _Key, own: dict[int, _Own]) -> None:
        counts: dict[str, int] = {}
        for turn in key.turns:
            for term in self._turn_terms.get(turn.id, ()):
                counts[term] = counts.get(term, 0) + 1
        length = sum(len(turn.text) for turn in key.turns) / (len(key.turns) * TYPICAL_CHARS)
        mine = [own[turn.id] for turn in key.turns]
        score = self._measure.bm25(counts, length) + _WINDOW_COSINE * max(0.0, key.dense or 0.0)
        score += max(o.dense + _SPEAKER_IN_WINDOW * o.asked - _QUESTION * o.question for o in mine)
        score += _DATE * max(o.closeness for o in mine)
        key.score = score * min(1.0, WINDOW_TURNS / len(key.turns))  # a summary of many turns tells little of each
        key.terms = set(counts)

    def _turn_hit(self, turn: Turn, key: _Key | None, own: _Own) -> Hit:
        terms = self._turn_terms.get(turn.id, [])
        score = own.lexical + own.dense if key is None else key.score
        score += _OWN_LEXICAL * own.lexical + _OWN_COSINE * own.dense
        score += _OWN_DATE * own.closeness + _SPEAKER * own.asked - _QUESTION * own.question
        cosine = max((c for c in (own.whole, key.whole if key else None) if c is not None), default=None)
        evidence = self._measure.evidence(own.whole, terms, key.terms if key else terms)
        near = self._measure.is_near(own.whole, terms)
        boosts = [name for name, so in (("date", own.closeness > 0.5), ("speaker", own.asked)) if so]
        return Hit(turn, None, score, cosine, own.lexical or None, tuple(terms), evidence, near, tuple(boosts))

    def _fact_hits(self, facts: dict[int, list[float] | None]) -> list[Hit]:
        texts = self._connection.execute(select(db.Fact.id, db.Fact.text).where(db.Fact.id.in_(list(facts))))
        return [
            self._alone(text, self._fact_terms.get(number, []), facts[number], TYPICAL_CHARS, fact=(number, text))
            for number, text in texts
        ]

    def _passage_hits(self) -> list[Hit]:
        keys = documents.passages_of_keys(self._connection, self._chosen, self._view.documents)
        return [
            self._alone(
                passage.text,
                self._passage_terms.get(passage.id, []),
                self._dense.get(keys[passage.id]),
                TYPICAL_PASSAGE_CHARS,
                passage=passage,
            )
            for passage in documents.passages(self._connection, ids=list(keys))
        ]

    def _alone(
        self,
        text: str,
        terms: Sequence[str],
        cosines: Sequence[float] | None,
        typical_chars: float,
        *,
        fact: tuple[int, str] | None = None,
        passage: StoredPassage | None = None,
    ) -> Hit:
        """A fact or passage with its score."""
        whole, dense = cosines or (None, 0.0)
        lexical = self._measure.bm25(dict.fromkeys(terms, 1), len(text) / typical_chars)
        return Hit(
            None,
            fact,
            (1 + _OWN_LEXICAL) * lexical + (1 + _WINDOW_COSINE + _OWN_COSINE) * max(0.0, dense),
            whole,
            lexical or None,
            tuple(terms),
            self._measure.evidence(whole, terms, terms),
            self._measure.is_near(whole, terms),
            passage=passage,
        )


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
