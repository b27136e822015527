"""What a search found: turns, facts and passages with their scores, the windows they were found under, and the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memstream.stores.documents import StoredPassage
from memstream.stores.rows import Turn


@dataclass(slots=True)
class Hit:
    """A turn, a fact or a passage of a document, with its scores.

    Attributes:
        evidence: how far it is above the gate (0 and more lets it in), or below.
        boosts: what else spoke for it.
        rerank: the reranker's score, where one has read it.
    """

    turn: Turn | None
    fact: tuple[int, str] | None
    score: float
    dense: float | None
    lexical: float | None
    terms: tuple[str, ...]
    evidence: float
    boosts: tuple[str, ...] = ()
    dense_rank: int | None = None
    lexical_rank: int | None = None
    rerank: float | None = None
    passage: StoredPassage | None = None

    @property
    def text(self) -> str:
        """What was found."""
        if self.passage is not None:
            return self.passage.text
        return self.turn.text if self.turn is not None else self.fact[1] if self.fact is not None else ""


def through_the_gate(hits: Sequence[Hit]) -> list[Hit]:
    """What may be recalled, in the same order: all of them, if any is above the gate."""
    return list(hits) if any(hit.evidence >= 0 for hit in hits) else []


@dataclass(frozen=True, slots=True)
class RankedWindow:
    """A key and its score: the turns it stands for, in order."""

    turn_ids: list[int]
    score: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """What one search found, best first.

    Attributes:
        hits: all that say something of what was asked for themselves; "Thanks, noted." in a good window does not.
        windows: the keys to turns that were scored.
        best_score: of whatever was scored; None where nothing was.
        n_considered: how many memories were searched.
    """

    hits: list[Hit]
    windows: list[RankedWindow]
    best_score: float | None
    n_considered: int


def set_ranks(hits: list[Hit]) -> None:
    """Numbers the hits in the dense and in the lexical list, from 1."""
    for rank, hit in enumerate(sorted((h for h in hits if h.dense is not None), key=lambda h: -(h.dense or 0.0)), 1):
        hit.dense_rank = rank
    for rank, hit in enumerate(sorted((h for h in hits if h.lexical), key=lambda h: -(h.lexical or 0.0)), 1):
        hit.lexical_rank = rank
