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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from typing import Any

import numpy as np
from sqlalchemy import Connection, Executable, and_, bindparam, select

from memstream.memory.chunker import WINDOW_TURNS
from memstream.memory.dates import find_dates
from memstream.memory.hits import Hit, Ranked, RankedWindow, set_ranks
from memstream.memory.measure import TYPICAL_CHARS, TYPICAL_PASSAGE_CHARS
from memstream.memory.particulars import SPEAKER
from memstream.memory.postings import Flags, Numbers
from memstream.memory.query import is_question
from memstream.memory.reach import Reach
from memstream.memory.view import IDS, RECALLABLE_TURNS
from memstream.stores import documents, fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Ids
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
_SEQUENCES = 2**32  # more than a conversation has
_NOTHING = 0  # numbers of rows begin at 1

_Make = Callable[..., Hit]
_Found = tuple[float | None, list[Hit]]  # the best score, and the hits


def _place(conversation_id: Any, sequence: Any) -> Any:
    """Where a turn is among all turns, those of a conversation one after the other: of numbers or of arrays."""
    return conversation_id * _SEQUENCES + sequence


_TURNS = (
    select(*rows.TURN_COLUMNS, db.TurnEmbedding.vector)
    .outerjoin(db.TurnEmbedding, and_(
        db.TurnEmbedding.turn_id == db.Turn.id, db.TurnEmbedding.space_id == bindparam("space_id"),
    ))
    .where(RECALLABLE_TURNS)
)  # fmt: skip
_TURNS_OF = _TURNS.where(db.Turn.id.in_(IDS))
_TURNS_UNDER = _TURNS.where(db.Turn.id.in_(
    select(db.Turn.id)
    .join(db.Chunk, and_(
        db.Chunk.conversation_id == db.Turn.conversation_id,
        db.Chunk.first_sequence <= db.Turn.sequence,
        db.Chunk.last_sequence >= db.Turn.sequence,
    ))
    .where(db.Chunk.id.in_(IDS))
))  # fmt: skip
_FACTS = select(db.Fact.id, db.Fact.text).where(db.Fact.id.in_(IDS))


@dataclass(frozen=True, slots=True)
class _Said:
    """The n turns in reach in order of their places, as columns, and what each has by itself."""

    rows: Sequence[Any]  # as of ``rows.TURN_COLUMNS``
    ids: Ids
    places: Ids
    held: Flags  # of the query's terms [n, t]
    relative_lengths: Numbers
    lexical: Numbers
    dense: Numbers  # cosine with what tells memories apart, its own or of what it tells in particular; or 0
    whole: Numbers  # cosine with the whole question; not a number where it has no vector
    closeness: Numbers
    asked: Flags  # its speaker was asked about
    question: Flags


@dataclass(frozen=True, slots=True)
class _Windows:
    """The k windows that hold any of the turns: turns ``start`` to ``stop``, exclusive, and their scores."""

    start: Ids
    stop: Ids
    held: Flags
    whole: Numbers
    score: Numbers
    best: Ids  # the window of the highest score of each turn; -1 where it is in none


class Scoring:
    """Scores what is in reach."""

    def __init__(self, reach: Reach) -> None:
        self._reach, self._measure = reach, reach.measure
        self._asked: dict[str, bool] = {}  # by the name a turn begins with

    def run(self, connection: Connection) -> Ranked:
        """Scores turns, facts and passages, best first; what is gone by now is left out."""
        self._connection = connection
        said = self._judge(self._read_turns())
        windows = self._score_windows(said)
        kinds = [self._turn_hits(said, windows), self._fact_hits()]
        if self._reach.view.documents:
            kinds.append(self._passage_hits())
        hits = [hit for _, found in kinds for hit in found]
        hits.sort(key=lambda hit: (-hit.score, -(hit.turn.id if hit.turn else 0)))
        set_ranks(hits)
        best = max((score for score, _ in kinds if score is not None), default=None)
        return Ranked(hits, _ranked(said, windows), best, self._reach.n_considered)

    def _read_turns(self) -> list[Any]:
        """The turns in reach that may be recalled, in order of their places, each with its vector."""
        space, found = self._reach.space, dict[int, Any]()

        def read(statement: Executable, ids: Sequence[int]) -> None:
            values = self._reach.view.values(ids, space_id=space.id if space is not None else _NOTHING)
            found.update({row[0]: row for row in self._connection.execute(statement, values).all()})

        for part in rows.batches(self._reach.windows):
            read(_TURNS_UNDER, part)
        if alone := [turn_id for turn_id in self._reach.best(self._reach.turns) if turn_id not in found]:
            read(_TURNS_OF, alone)
        return sorted(found.values(), key=lambda row: _place(row[7], row[1]))

    def _judge(self, found: list[Any]) -> _Said:
        columns = list(zip(*found, strict=True)) or [()] * 9
        ids, places = (
            np.array(columns[0], dtype=np.int64),
            _place(*(np.array(columns[i], dtype=np.int64) for i in (7, 1))),
        )
        texts, cosines = columns[3], self._own_cosines(columns[8])
        held = self._reach.turns.held(ids)
        lengths = np.array([len(text) for text in texts], dtype=np.float64) / TYPICAL_CHARS
        dense = np.maximum(np.nan_to_num(cosines[:, 1]), 0.0)
        told = np.array([_place(*turn) for turn in self._reach.told.values()], dtype=np.int64)
        there = np.isin(told, places)
        np.maximum.at(
            dense, np.searchsorted(places, told[there]), np.nan_to_num(self._cosines(self._reach.told)[there, 1])
        )
        dated = self._reach.query.dates
        return _Said(
            found,
            ids,
            places,
            held,
            lengths,
            lexical=self._measure.bm25(held, lengths),
            dense=dense,
            whole=cosines[:, 0],
            closeness=np.array(list(map(self._closeness, columns[5], texts)) if dated else np.zeros(len(ids))),
            asked=np.array(list(map(self._is_asked_about, columns[2], texts)), dtype=np.bool_),
            question=np.array(list(map(is_question, texts)), dtype=np.bool_),
        )

    def _own_cosines(self, blobs: Sequence[bytes | None]) -> Numbers:
        """The cosines [n, 2] of the turns' own vectors with the query's; not numbers where a turn has none."""
        cosines = np.full((len(blobs), 2), np.nan)
        known = [i for i, blob in enumerate(blobs) if blob is not None]
        if known and self._reach.space is not None and self._reach.both is not None:
            matrix = vectors.unpack([blob for blob in blobs if blob is not None], self._reach.space.dimension)
            cosines[known] = matrix @ self._reach.both.T
        return cosines

    def _closeness(self, created: datetime, text: str) -> float:
        """1 for a turn said on a date that was asked for, or that tells of it; less with each day beside it."""
        day = created.date()
        told, _ = find_dates(text, today=day, oldest=day)
        days = [day, *(span.first for span in told), *(span.last for span in told)]
        nearest = min(span.distance(day) for span in self._reach.query.dates for day in days)
        return math.exp(-nearest / _DATE_DAYS)

    def _is_asked_about(self, role: str, text: str) -> bool:
        """True where the query names who said it (``Name: ...``), or means the one who asks or the one who answers."""
        named = SPEAKER.match(text) if ": " in text else None
        if named is None:
            return role in self._reach.query.roles
        asked = self._asked.get(named[1])
        if asked is None:
            asked = self._asked[named[1]] = not self._reach.query.newest.isdisjoint(fulltext.words(named[1]))
        return asked

    def _score_windows(self, said: _Said) -> _Windows:
        spans = list(self._reach.windows.values())
        start = np.searchsorted(said.places, [_place(span[0], span[1]) for span in spans])
        stop = np.searchsorted(said.places, [_place(span[0], span[2]) for span in spans], side="right")
        there = stop > start
        start, stop, cosines = start[there], stop[there], self._cosines(self._reach.windows)[there]
        n = stop - start
        first = np.cumsum(n) - n
        window = np.repeat(np.arange(len(n)), n)  # of each turn in each window, and which turn that is
        turn = np.arange(n.sum()) + np.repeat(start - first, n)
        counts = np.add.reduceat(said.held[turn].astype(np.float64), first)
        lengths = np.add.reduceat(said.relative_lengths[turn], first) / n
        told = said.dense + _SPEAKER_IN_WINDOW * said.asked - _QUESTION * said.question
        score = self._measure.bm25(counts, lengths) + _WINDOW_COSINE * np.maximum(np.nan_to_num(cosines[:, 1]), 0.0)
        score += np.maximum.reduceat(told[turn], first) + _DATE * np.maximum.reduceat(said.closeness[turn], first)
        score *= np.minimum(1.0, WINDOW_TURNS / n)  # a summary of many turns tells little of each
        order = np.argsort(score[window], kind="stable")
        best = np.full(len(said.ids), -1)
        best[turn[order]] = window[order]  # the last one written is the highest
        return _Windows(start, stop, counts > 0, cosines[:, 0], score, best)

    def _cosines(self, keys: Iterable[int]) -> Numbers:
        """The cosines [k, 2] of keys with the query's vectors; not numbers where a key has none."""
        found = [self._reach.dense.get(key, (math.nan, math.nan)) for key in keys]
        return np.array(found, dtype=np.float64).reshape(-1, 2)

    def _turn_hits(self, said: _Said, windows: _Windows) -> _Found:
        inside = windows.best >= 0
        score, whole, around = said.lexical + said.dense, said.whole.copy(), said.held.copy()
        best = windows.best[inside]
        score[inside], around[inside] = windows.score[best], windows.held[best]
        whole[inside] = np.fmax(whole[inside], windows.whole[best])
        score += _OWN_LEXICAL * said.lexical + _OWN_COSINE * said.dense
        score += _OWN_DATE * said.closeness + _SPEAKER * said.asked - _QUESTION * said.question

        def make(i: int, **scores: Any) -> Hit:
            boosts = (("date", said.closeness[i] > 0.5), ("speaker", said.asked[i]))
            turn = Turn(*said.rows[i][:-1])
            return Hit(turn, None, **scores, boosts=tuple(name for name, so in boosts if so))

        return self._hits(make, score, said.lexical, said.whole, whole, said.held, around)

    def _fact_hits(self) -> _Found:
        keys = dict.fromkeys(self._reach.best(self._reach.facts), _NOTHING) | self._reach.fact_keys
        found = [(row[0], row[1]) for row in self._connection.execute(_FACTS, {"ids": list(keys)})] if keys else []
        held = self._reach.facts.held(np.array([number for number, _ in found], dtype=np.int64))
        lengths = np.array([len(text) for _, text in found]) / TYPICAL_CHARS
        cosines = self._cosines(keys[number] for number, _ in found)
        return self._alone(lambda i, **scores: Hit(None, found[i], **scores), held, lengths, cosines)

    def _passage_hits(self) -> _Found:
        keys = self._reach.passage_keys
        found = documents.passages(self._connection, ids=keys)
        held = self._reach.passages.held(np.array([passage.id for passage in found], dtype=np.int64))
        lengths = np.array([len(passage.text) for passage in found]) / TYPICAL_PASSAGE_CHARS
        cosines = self._cosines(keys[passage.id] for passage in found)
        return self._alone(lambda i, **scores: Hit(None, None, **scores, passage=found[i]), held, lengths, cosines)

    def _alone(self, make: _Make, held: Flags, relative_lengths: Numbers, cosines: Numbers) -> _Found:
        """Facts or passages: each is its own window."""
        lexical, whole = self._measure.bm25(held, relative_lengths), cosines[:, 0]
        score = (1 + _OWN_LEXICAL) * lexical
        score += (1 + _WINDOW_COSINE + _OWN_COSINE) * np.maximum(np.nan_to_num(cosines[:, 1]), 0.0)
        return self._hits(make, score, lexical, whole, whole, held, held)

    def _hits(
        self, make: _Make, score: Numbers, lexical: Numbers, own: Numbers, cosine: Numbers, held: Flags, around: Flags
    ) -> _Found:
        """The best score, and a hit for each text that says something itself.

        Args:
            make: a hit of the text of that number.
            score: of each text.
            lexical: share of it.
            own: its cosine with the whole question,
            cosine: or that of its window where it is nearer.
            held: the terms in it,
            around: and in its window.
        """
        evidence = self._measure.evidence(own, held, around)
        hits = [
            make(
                i,
                score=float(score[i]),
                dense=None if math.isnan(cosine[i]) else float(cosine[i]),
                lexical=float(lexical[i]) or None,
                terms=tuple(compress(self._measure.terms, held[i])),
                evidence=float(evidence[i]),
            )
            for i in np.flatnonzero(self._measure.is_near(own, held)).tolist()
        ]
        return (float(score.max()) if len(score) else None), hits


def _ranked(said: _Said, windows: _Windows) -> list[RankedWindow]:
    """The windows, best first, the newest first among equals."""
    order = np.lexsort((-said.ids[windows.stop - 1], -windows.score))
    return [
        RankedWindow(said.ids[windows.start[i] : windows.stop[i]].tolist(), float(windows.score[i]))
        for i in order.tolist()
    ]
