"""How much the keys in reach matter, and each turn, fact and passage under them.

Windows are scored and single turns are returned. All scores are shares: the lexical one is BM25 (k1 = 1.2, b = 0.5;
statistics of what the scope may see alone) over what a text of average length with every word of the query would
score, the dense one a cosine. So they add up without being standardised over a scope that nobody could score whole:

    window = lexical + best turn's (cosine + 0.2 if its speaker was asked about - 0.1 if it only asks)
             + 0.5 x window's cosine + 0.5 x closeness to a date that was asked for
    turn   = best window that holds it + 0.55 x own lexical + 0.6 x own cosine + 0.1 x own closeness
             + 0.09 if its speaker was asked about - 0.1 if it only asks

A turn's own cosine is that of its vector, or of the nearest of the particulars it tells where that is nearer.
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

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, and_, select

from memstream.memory.chunker import WINDOW_TURNS
from memstream.memory.dates import find_dates
from memstream.memory.hits import Hit, Ranked, RankedWindow, set_ranks
from memstream.memory.measure import TYPICAL_CHARS, TYPICAL_PASSAGE_CHARS
from memstream.memory.particulars import SPEAKER
from memstream.memory.query import is_question
from memstream.memory.reach import Reach
from memstream.stores import documents, fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.documents import StoredPassage
from memstream.stores.rows import Turn

_WINDOW_COSINE = 0.5
_DATE = 0.5
_OWN_DATE = 0.1
_DATE_DAYS = 5.0  # people tell of a day within days
_OWN_LEXICAL = 0.55
_OWN_COSINE = 0.6
_SPEAKER = 0.09
_SPEAKER_IN_WINDOW = 0.2
_QUESTION = 0.1  # who asked knew less than who told


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
    dense: float  # as in _Key, or of the nearest of its particulars; 0 where it has no vector
    whole: float | None
    closeness: float
    asked: bool  # its speaker was asked about
    question: bool


class Scoring:
    """Scores what is in reach."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def run(self, connection: Connection) -> Ranked:
        """Scores the turns and facts under the chosen keys, best first; what is gone by now is left out."""
        self._connection = connection
        keys, facts = self._find_keys()
        turns = {turn.id: turn for key in keys.values() for turn in key.turns}
        turns |= self._recallable(
            [turn_id for turn_id in self._reach.best(self._reach.turn_terms) if turn_id not in turns]
        )
        cosines = self._cosines(list(turns))
        told = self._reach.told_cosines()
        own = {turn.id: self._judge(turn, cosines.get(turn.id), told.get(turn.id, 0.0)) for turn in turns.values()}
        best: dict[int, _Key] = {}
        for key in keys.values():
            self._score_key(key, own)
            for turn in key.turns:
                if turn.id not in best or key.score > best[turn.id].score:
                    best[turn.id] = key
        hits = [self._turn_hit(turn, best.get(turn.id), own[turn.id]) for turn in turns.values()]
        hits.extend(self._fact_hits(facts))
        if self._reach.view.documents:
            hits.extend(self._passage_hits())
        hits.sort(key=lambda hit: (-hit.score, -(hit.turn.id if hit.turn else 0)))
        set_ranks(hits)
        windows = [RankedWindow(key.turns, key.score) for key in keys.values()]
        windows.sort(key=lambda window: (-window.score, -window.turns[-1].id))
        return Ranked(hits, windows, self._reach.n_considered)

    def _recallable(self, turn_ids: list[int]) -> dict[int, Turn]:
        """Those of the turns that may still be recalled."""
        statement = select(*rows.TURN_COLUMNS).where(db.Turn.id.in_(turn_ids), self._reach.view.recallable_turns())
        return {row[0]: Turn(*row) for row in self._connection.execute(statement)}

    def _find_keys(self) -> tuple[dict[int, _Key], dict[int, list[float] | None]]:
        """Keys by chunk id with their turns, and the facts found with their cosines."""
        keys: dict[int, _Key] = {}
        for part in rows.batches(self._reach.chosen):
            statement = (
                select(db.Chunk.id.label("key"), *rows.TURN_COLUMNS)
                .join(db.Turn, and_(
                    db.Turn.conversation_id == db.Chunk.conversation_id,
                    db.Turn.sequence >= db.Chunk.first_sequence,
                    db.Turn.sequence <= db.Chunk.last_sequence,
                ))
                .where(db.Chunk.id.in_(part), self._reach.view.chunks(), self._reach.view.recallable_turns())
                .order_by(db.Turn.sequence)
            )  # fmt: skip
            for row in self._connection.execute(statement):
                key = keys.get(row[0])
                if key is None:
                    whole, dense = self._reach.dense.get(row[0], (None, None))
                    key = keys[row[0]] = _Key(dense=dense, whole=whole)
                key.turns.append(Turn(*row[1:]))
        facts: dict[int, list[float] | None] = dict.fromkeys(self._reach.best(self._reach.fact_terms))
        for part in rows.batches(self._reach.dense):
            of_facts = select(db.Chunk.id, db.Chunk.fact_id).where(
                db.Chunk.id.in_(part), db.Chunk.kind == "fact", self._reach.view.chunks()
            )
            facts.update(
                (fact_id, self._reach.dense[key]) for key, fact_id in self._connection.execute(of_facts) if fact_id
            )
        return keys, facts

    def _cosines(self, turn_ids: list[int]) -> dict[int, list[float]]:
        """Cosines of the turns' own vectors with both vectors of the query."""
        if self._reach.space is None or self._reach.both is None:
            return {}
        return vectors.turn_cosines(self._connection, self._reach.space, turn_ids, self._reach.both)

    def _judge(self, turn: Turn, cosines: list[float] | None, told: float) -> _Own:
        terms = self._reach.turn_terms.get(turn.id, ())
        whole, dense = cosines or (None, 0.0)
        return _Own(
            lexical=self._reach.measure.bm25(dict.fromkeys(terms, 1), len(turn.text) / TYPICAL_CHARS),
            dense=max(0.0, dense, told),
            whole=whole,
            closeness=self._closeness(turn),
            asked=self._is_asked_about(turn),
            question=is_question(turn.text),
        )

    def _closeness(self, turn: Turn) -> float:
        """1 for a turn said on a date that was asked for, or that tells of it; less with each day beside it."""
        if not self._reach.query.dates:
            return 0.0
        day = turn.created.date()
        told, _ = find_dates(turn.text, today=day, oldest=day)
        days = [day, *(span.first for span in told), *(span.last for span in told)]
        nearest = min(span.distance(day) for span in self._reach.query.dates for day in days)
        return math.exp(-nearest / _DATE_DAYS)

    def _is_asked_about(self, turn: Turn) -> bool:
        """True where the query names who said it (``Name: ...``), or means the one who asks or the one who answers."""
        named = SPEAKER.match(turn.text)
        if named is not None:
            return not self._reach.query.newest.isdisjoint(fulltext.words(named[1]))
        return turn.role in self._reach.query.roles

    def _score_key(self, key: _Key, own: dict[int, _Own]) -> None:
        counts: dict[str, int] = {}
        for turn in key.turns:
            for term in self._reach.turn_terms.get(turn.id, ()):
                counts[term] = counts.get(term, 0) + 1
        length = sum(len(turn.text) for turn in key.turns) / (len(key.turns) * TYPICAL_CHARS)
        mine = [own[turn.id] for turn in key.turns]
        score = self._reach.measure.bm25(counts, length) + _WINDOW_COSINE * max(0.0, key.dense or 0.0)
        score += max(o.dense + _SPEAKER_IN_WINDOW * o.asked - _QUESTION * o.question for o in mine)
        score += _DATE * max(o.closeness for o in mine)
        key.score = score * min(1.0, WINDOW_TURNS / len(key.turns))  # a summary of many turns tells little of each
        key.terms = set(counts)

    def _turn_hit(self, turn: Turn, key: _Key | None, own: _Own) -> Hit:
        terms = self._reach.turn_terms.get(turn.id, [])
        score = own.lexical + own.dense if key is None else key.score
        score += _OWN_LEXICAL * own.lexical + _OWN_COSINE * own.dense
        score += _OWN_DATE * own.closeness + _SPEAKER * own.asked - _QUESTION * own.question
        cosine = max((c for c in (own.whole, key.whole if key else None) if c is not None), default=None)
        evidence = self._reach.measure.evidence(own.whole, terms, key.terms if key else terms)
        near = self._reach.measure.is_near(own.whole, terms)
        boosts = [name for name, so in (("date", own.closeness > 0.5), ("speaker", own.asked)) if so]
        return Hit(turn, None, score, cosine, own.lexical or None, tuple(terms), evidence, near, tuple(boosts))

    def _fact_hits(self, facts: dict[int, list[float] | None]) -> list[Hit]:
        texts = self._connection.execute(select(db.Fact.id, db.Fact.text).where(db.Fact.id.in_(list(facts))))
        return [
            self._alone(text, self._reach.fact_terms.get(number, []), facts[number], TYPICAL_CHARS, fact=(number, text))
            for number, text in texts
        ]

    def _passage_hits(self) -> list[Hit]:
        keys = documents.passages_of_keys(self._connection, self._reach.chosen, self._reach.view.documents)
        return [
            self._alone(
                passage.text,
                self._reach.passage_terms.get(passage.id, []),
                self._reach.dense.get(keys[passage.id]),
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
        lexical = self._reach.measure.bm25(dict.fromkeys(terms, 1), len(text) / typical_chars)
        return Hit(
            None,
            fact,
            (1 + _OWN_LEXICAL) * lexical + (1 + _WINDOW_COSINE + _OWN_COSINE) * max(0.0, dense),
            whole,
            lexical or None,
            tuple(terms),
            self._reach.measure.evidence(whole, terms, terms),
            self._reach.measure.is_near(whole, terms),
            passage=passage,
        )
