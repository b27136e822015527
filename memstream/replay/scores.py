"""Three scores of every line, and the one that decisions are made on."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEANING_WEIGHT = 4.0
# What a stated severity is worth, in nats, from which OpenTelemetry severity number on.
_SEVERITY_NATS = ((21, 8.0), (17, 5.0), (13, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What is known of one line.

    Attributes:
        surprise: mean negative log-likelihood of its tokens in the live cache, nats; None for lines the model did not
            read. It habituates: the lines of a burst become the most predictable of all.
        novelty: how rare lines of its template have been so far, nats: log((lines + 1) / (of its template + 1)).
        meaning: how much the first line of its template reads like a failure (meaning.py).
        severity: OpenTelemetry severity number, 1 to 24; None where the line states none.
    """

    surprise: float | None
    novelty: float
    meaning: float
    severity: int | None


def novelty(n_lines: int, n_before: int) -> float:
    """Nats: of ``n_lines`` lines so far, ``n_before`` were of the same template."""
    return math.log((n_lines + 1) / (n_before + 1))


def combined(scores: Scores) -> float:
    """The score of a line in nats: rare *or* said to be severe, shifted by what it reads like.

    Rarity and stated severity are two reasons for the same thing, so their odds are added: a line that says it is
    fatal gains little from being rare. Surprise has no part in it (docs/adr/0021).
    """
    severity = scores.severity or 0
    stated = next((nats for least, nats in _SEVERITY_NATS if severity >= least), 0.0)
    high, low = max(stated, scores.novelty), min(stated, scores.novelty)
    return high + math.log1p(math.exp(low - high)) + MEANING_WEIGHT * scores.meaning
