"""Finding what matters: full-text and dense search over one scope, gated, fused, scored turn by turn.

Windows are scored and single turns are returned: a turn's score is that of the best window that holds it, plus a share
of its own. The lexical score is BM25 (k1 = 1.2, b = 0.5) over windows, its statistics taken from the scope alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from memstream.errors import ConfigError
from memstream.memory.chunker import WINDOW_TURNS
from memstream.memory.embedder import Embedder, embed
from memstream.memory.live_index import LiveIndex
from memstream.stores import fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope, Vectors
from memstream.stores.rows import Turn
from memstream.stores.sql import SqlStore

_K1, _B = 1.2, 0.5
_NO_WINDOW = 2**62
_MAX_TERMS = 32
_MAX_POSTINGS = 2000  # newest turns looked at per term; a term in more of them says little
_LEXICAL_TURNS = 96  # turns whose windows are scored
_DENSE_WINDOWS = 48
_MAX_SPAN = 64  # sequences a window reaches over at most, gaps included
_RARE_TURNS = 3  # a word in so few turns is rare,
_RARE_PART = 50  # or in a fiftieth of them;
_RARE_PART_ALONE = 8  # in an eighth where there are no vectors to judge by
_DENSE_WEIGHT = 1.0
_OWN_SHARE = 0.7
_BESIDE = 0.5  # of the gate: what a turn must say itself to come in with its window; "Thanks, noted." does not
_QUESTION_FACTOR = 0.8  # who asked knew less than who told
_ASSISTANT_FACTOR = 0.9


@dataclass(frozen=True, slots=True)
class View:
    """What one search may see: an owner or a single conversation, minus the asking conversation's window."""

    owner_id: int
    conversation_id: int | None
    asking_id: int = -1
    window_from: int = _NO_WINDOW

    @property
    def scope_term(self) -> str:
        """The full-text term every visible row carries."""
        return f"o{self.owner_id}" if self.conversation_id is None else f"c{self.conversation_id}"

    def chunks(self) -> ColumnElement[bool]:
        """Which keys are visible, as SQL."""
        mine = db.Chunk.owner_id == self.owner_id
        if self.conversation_id is not None:
            mine = and_(mine, db.Chunk.conversation_id == self.conversation_id)
        outside = or_(
            db.Chunk.conversation_id.is_(None),
            db.Chunk.conversation_id != self.asking_id,
            db.Chunk.last_sequence.is_(None),
            db.Chunk.last_sequence < self.window_from,
        )
        return and_(mine, outside)

    def turns(self) -> ColumnElement[bool]:
        """Which turns are visible, as SQL over turns joined with conversations."""
        mine = db.Conversation.owner_id == self.owner_id
        if self.conversation_id is not None:
            mine = and_(mine, db.Turn.conversation_id == self.conversation_id)
        return and_(mine, self.recallable_turns())

    def recallable_turns(self) -> ColumnElement[bool]:
        """Which turns under a visible key may be recalled, as SQL over turns alone."""
        outside = or_(db.Turn.conversation_id != self.asking_id, db.Turn.sequence < self.window_from)
        return and_(outside, db.Turn.superseded.is_(False), db.Turn.state != "open")


def view_of(connection: Connection, scope: Scope, window_from: int | None) -> View | None:
    """What a scope sees; None where nothing is stored for it.

    Raises:
        ConfigError: the scope names neither a user nor a conversation.
    """
    if scope.user is None and scope.conversation is None:
        raise ConfigError("a scope without a user needs a conversation: without either it would be everybody's memory")
    owner_id = rows.find_owner(connection, scope)
    if owner_id is None:
        return None
    conversation_id = None if scope.conversation is None else rows.find_conversation(connection, scope)
    if scope.user is None and conversation_id is None:
        return None
    return View(
        owner_id,
        conversation_id if scope.user is None else None,
        -1 if conversation_id is None else conversation_id,
        _NO_WINDOW if window_from is None else window_from,
    )


@dataclass(slots=True)
class Hit:
    """A turn or fact that passed the gate, with its scores."""

    turn: Turn | None
    fact: tuple[int, str] | None
    score: float
    dense: float | None
    lexical: float | None
    terms: tuple[str, ...]
    passed: bool
    dense_rank: int | None = None
    lexical_rank: int | None = None


@dataclass(slots=True)
class _Key:
    """A window, summary or fact under consideration."""

    turns: list[Turn] = field(default_factory=list)
    dense: float | None = None
    score: float = 0.0
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """A query made ready outside of any transaction: weighted terms, and its vector where there is an embedder."""

    terms: dict[str, float]
    newest: frozenset[str]
    vector: Vectors | None


def is_question(text: str) -> bool:
    """True for a text that only asks."""
    return text.rstrip().rstrip("\"')").endswith(("?", "？"))


def make_query(query_turns: Sequence[str], embedder: Embedder | None) -> Query:
    """Weighs the latest turns, newest last: the newest counts fully, earlier ones the more the less it says itself."""
    texts = [text for text in query_turns if text.strip()]
    if not texts:
        return Query({}, frozenset(), None)
    newest = fulltext.query_terms(texts[-1], _MAX_TERMS)
    weight = 0.15 if len(newest) >= 2 else 0.5
    terms = dict.fromkeys(newest, 1.0)
    weights = [1.0]
    for text in reversed(texts[:-1]):
        context = [term for term in fulltext.query_terms(text, _MAX_TERMS) if term not in terms]
        for term in context[: _MAX_TERMS - len(terms)]:
            terms[term] = weight / len(context)  # a long turn must not drown the newest one
        weights.append(weight)
        weight /= 2
    vector = None
    if embedder is not None:
        matrix = embed(embedder, texts[::-1])
        mixed = np.asarray(weights, dtype=np.float32) @ matrix
        vector = np.asarray(mixed / max(float(np.linalg.norm(mixed)), 1e-6), dtype=np.float32)
    return Query(terms, frozenset(newest), vector)


class Retriever:
    """Ranks the memories of a scope for a query."""

    def __init__(self, store: SqlStore, index: LiveIndex) -> None:
        self._store = store
        self._index = index

    def rank(self, scope: Scope, query: Query, window_from: int | None, gate: float) -> tuple[list[Hit], int]:
        """All candidates, best first, and how many memories were searched; see ``Hit.passed`` for the gate.

        Args:
            scope: whose memories.
            query: from ``make_query``.
            window_from: turns of the asking conversation from this sequence on are left out; None: none are.
            gate: least cosine of a hit without a rare-term match.
        """
        # The index is never asked inside a transaction: its lock is taken before the store's, by everybody.
        with self._store.read() as connection:
            view = view_of(connection, scope, window_from)
            if view is None:
                return [], 0
            ranking = _Ranking(view, query, gate)
            ranking.look_up(connection)
        if query.vector is not None:
            self._index.refresh()
            ranking.search_vectors(self._index)
        with self._store.read() as connection:
            return ranking.run(connection), ranking.n_considered


class _Ranking:
    """One search: words and candidates in one transaction, vectors outside, turns and scores in another."""

    def __init__(self, view: View, query: Query, gate: float) -> None:
        self._view, self._query, self._gate = view, query, gate
        self._turn_terms: dict[int, list[str]] = {}
        self._fact_terms: dict[int, list[str]] = {}
        self._idf: dict[str, float] = {}
        self._rare: set[str] = set()
        self._mass = 1.0
        self._visible: list[int] = []
        self._chosen: set[int] = set()
        self._dense: dict[int, float] = {}
        self.n_considered = 0

    def look_up(self, connection: Connection) -> None:
        """Finds which turns and facts hold which words, and the keys that may be searched."""
        self._connection = connection
        n_turns = self._count_turns()
        self.n_considered = n_turns + self._count_facts()
        self._look_up_terms(n_turns)
        self._chosen = self._windows_around(self._best_lexical_turns())
        if self._query.vector is not None:
            self._visible = list(connection.scalars(select(db.Chunk.id).where(self._view.chunks())))

    def search_vectors(self, index: LiveIndex) -> None:
        """Adds the keys that are near in meaning, and the cosine of those already chosen."""
        assert self._query.vector is not None
        for candidates, k in ((self._visible, _DENSE_WINDOWS), (sorted(self._chosen), len(self._chosen))):
            ids, scores = index.search(self._query.vector, np.array(candidates, dtype=np.int64), k)
            self._dense.update(zip(ids.tolist(), scores.tolist(), strict=True))
        self._chosen |= set(self._dense)

    def run(self, connection: Connection) -> list[Hit]:
        """Scores the turns and facts under the chosen keys, best first; what is gone by now is left out."""
        self._connection = connection
        keys, facts = self._find_keys()
        turns = {turn.id: turn for key in keys.values() for turn in key.turns}
        turns |= self._recallable([turn_id for turn_id in self._best_lexical_turns() if turn_id not in turns])
        own_dense = self._own_dense(list(turns))
        for key in keys.values():
            self._score_key(key, own_dense)
        best: dict[int, _Key] = {}
        for key in keys.values():
            for turn in key.turns:
                if turn.id not in best or key.score > best[turn.id].score:
                    best[turn.id] = key
        hits = [self._turn_hit(turn, best.get(turn.id), own_dense.get(turn.id)) for turn in turns.values()]
        hits.extend(self._fact_hits(facts))
        hits.sort(key=lambda hit: (-hit.score, -(hit.turn.id if hit.turn else 0)))
        _set_ranks(hits)
        return hits

    def _recallable(self, turn_ids: list[int]) -> dict[int, Turn]:
        """Those of the turns that may still be recalled."""
        statement = select(*rows.TURN_COLUMNS).where(db.Turn.id.in_(turn_ids), self._view.recallable_turns())
        return {row[0]: Turn(*row) for row in self._connection.execute(statement)}

    def _count_turns(self) -> int:
        statement = select(func.count()).select_from(db.Turn).join(db.Conversation).where(self._view.turns())
        return self._connection.scalar(statement) or 0

    def _count_facts(self) -> int:
        statement = select(func.count()).select_from(db.Chunk).where(self._view.chunks(), db.Chunk.kind == "fact")
        return self._connection.scalar(statement) or 0

    def _look_up_terms(self, n_turns: int) -> None:
        view = self._view
        rare_below = max(_RARE_TURNS, n_turns // (_RARE_PART if self._query.vector is not None else _RARE_PART_ALONE))
        for term in self._query.terms:
            found = fulltext.turns_with(
                self._connection, view.scope_term, term, view.asking_id, view.window_from, _MAX_POSTINGS
            )
            facts = fulltext.facts_with(self._connection, view.scope_term, term)
            n = len(found) + len(facts)
            self._idf[term] = math.log(1 + (max(n_turns, n) - n + 0.5) / (n + 0.5))
            if 0 < n <= rare_below and term in self._query.newest:
                self._rare.add(term)
            for turn_id in found:
                self._turn_terms.setdefault(turn_id, []).append(term)
            for fact_id in facts:
                self._fact_terms.setdefault(fact_id, []).append(term)
        self._mass = sum(weight * self._idf[term] for term, weight in self._query.terms.items()) or 1.0

    def _bm25(self, counts: dict[str, int], relative_length: float) -> float:
        """BM25 as a share of what one occurrence of every query term would score at average length."""
        norm = _K1 * (1 - _B + _B * relative_length)
        total = sum(
            self._query.terms[term] * self._idf[term] * n * (_K1 + 1) / (n + norm) for term, n in counts.items()
        )
        return total / self._mass

    def _best_lexical_turns(self) -> list[int]:
        def weight(item: tuple[int, list[str]]) -> tuple[float, int]:
            return (-sum(self._query.terms[term] * self._idf[term] for term in item[1]), -item[0])

        return [turn_id for turn_id, _ in sorted(self._turn_terms.items(), key=weight)[:_LEXICAL_TURNS]]

    def _find_keys(self) -> tuple[dict[int, _Key], dict[int, float | None]]:
        """Keys by chunk id with their turns, and the facts found with their cosine."""
        chosen, dense = self._chosen, self._dense
        keys: dict[int, _Key] = {}
        for part in rows.batches(chosen):
            statement = (
                select(db.Chunk.id.label("key"), *rows.TURN_COLUMNS)
                .join(db.Turn, and_(
                    db.Turn.conversation_id == db.Chunk.conversation_id,
                    db.Turn.sequence >= db.Chunk.first_sequence,
                    db.Turn.sequence <= db.Chunk.last_sequence,
                ))
                .where(db.Chunk.id.in_(part), self._view.recallable_turns())
            )  # fmt: skip
            for row in self._connection.execute(statement):
                keys.setdefault(row[0], _Key(dense=dense.get(row[0]))).turns.append(Turn(*row[1:]))
        facts: dict[int, float | None] = dict.fromkeys(self._fact_terms)
        for part in rows.batches(dense):
            of_facts = select(db.Chunk.id, db.Chunk.fact_id).where(db.Chunk.id.in_(part), db.Chunk.kind == "fact")
            facts.update((fact_id, dense[key]) for key, fact_id in self._connection.execute(of_facts) if fact_id)
        return keys, facts

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

    def _own_dense(self, turn_ids: list[int]) -> dict[int, float]:
        if self._query.vector is None:
            return {}
        own = vectors.read_turns(self._connection, turn_ids, len(self._query.vector))
        return {turn_id: float(vector @ self._query.vector) for turn_id, vector in own.items()}

    def _score_key(self, key: _Key, own_dense: dict[int, float]) -> None:
        counts: dict[str, int] = {}
        for turn in key.turns:
            for term in self._turn_terms.get(turn.id, ()):
                counts[term] = counts.get(term, 0) + 1
        length = sum(len(turn.text) for turn in key.turns) / (len(key.turns) * _TYPICAL_CHARS)
        cosines = [own_dense[turn.id] for turn in key.turns if turn.id in own_dense]
        if key.dense is not None:
            cosines.append(key.dense)
        score = self._bm25(counts, length) + _DENSE_WEIGHT * max(0.0, *cosines, 0.0)
        key.score = score * min(1.0, WINDOW_TURNS / len(key.turns))  # a summary of many turns tells little of each
        key.rare = not self._rare.isdisjoint(counts)

    def _turn_hit(self, turn: Turn, key: _Key | None, own: float | None) -> Hit:
        terms = self._turn_terms.get(turn.id, [])
        lexical = self._bm25(dict.fromkeys(terms, 1), len(turn.text) / _TYPICAL_CHARS)
        own_score = lexical + _DENSE_WEIGHT * max(0.0, own or 0.0)
        score = (own_score if key is None else key.score) + _OWN_SHARE * own_score
        if is_question(turn.text):
            score *= _QUESTION_FACTOR
        if turn.role != "user":
            score *= _ASSISTANT_FACTOR
        cosine = max((c for c in (own, key.dense if key else None) if c is not None), default=None)
        passed = not self._rare.isdisjoint(terms) or (own is not None and own >= self._gate)
        if key is not None and not passed and (terms or (own or 0.0) >= _BESIDE * self._gate):
            passed = key.rare or (key.dense is not None and key.dense >= self._gate)
        return Hit(turn, None, score, cosine, lexical or None, tuple(terms), passed)

    def _fact_hits(self, facts: dict[int, float | None]) -> list[Hit]:
        hits = []
        texts = self._connection.execute(select(db.Fact.id, db.Fact.text).where(db.Fact.id.in_(list(facts))))
        for fact_id, text in texts:
            terms, dense = self._fact_terms.get(fact_id, []), facts[fact_id]
            lexical = self._bm25(dict.fromkeys(terms, 1), len(text) / _TYPICAL_CHARS)
            score = (1 + _OWN_SHARE) * (lexical + _DENSE_WEIGHT * max(0.0, dense or 0.0))
            passed = not self._rare.isdisjoint(terms) or (dense is not None and dense >= self._gate)
            hits.append(Hit(None, (fact_id, text), score, dense, lexical or None, tuple(terms), passed))
        return hits


_TYPICAL_CHARS = 120.0  # a turn of this length counts as average


def _set_ranks(hits: list[Hit]) -> None:
    """Numbers the hits in the dense and in the lexical list, from 1."""
    for rank, hit in enumerate(sorted((h for h in hits if h.dense is not None), key=lambda h: -(h.dense or 0.0)), 1):
        hit.dense_rank = rank
    for rank, hit in enumerate(sorted((h for h in hits if h.lexical), key=lambda h: -(h.lexical or 0.0)), 1):
        hit.lexical_rank = rank
