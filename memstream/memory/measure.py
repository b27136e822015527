"""How much the words and cosines of one text count for a query: see the formulas in ``scoring.py``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from memstream.memory.query import Query

TYPICAL_CHARS = 120.0  # a turn of this length counts as average
TYPICAL_PASSAGE_CHARS = 600.0  # and a passage of this one

_K1, _B = 1.2, 0.5
_FEW = 100  # of fewer texts, a word is weighed as if there were so many: it cannot be known to be common
_RARE = 3  # an identifier in so few texts says what is meant
_GATE_OWN = 0.2  # of the words that were asked for, those in the text itself
_GATE_WINDOW = 0.3  # and those in its window
_NEAR = 0.5  # of the gate: the least cosine of a hit that has no word in common with the question
_GATE_HALF = 0.25  # what half of the words are worth: the gate is meant for a hit that has so many


class Measure:
    """Weighs words by how rare they are among all that one search may see.

    Args:
        query: what is asked.
        gate: least cosine of a hit that holds half of the words.
        counts: how many texts hold each word of the query.
        n_texts: how many there are.
    """

    def __init__(self, query: Query, gate: float, counts: Mapping[str, int], n_texts: int) -> None:
        self._gate = gate
        self._weights = {
            term: query.terms[term] * math.log(1 + (max(n_texts, n, _FEW) - n + 0.5) / (n + 0.5))
            for term, n in counts.items()
        }
        self._mass = max(sum(self._weights.values()), 1e-6)
        self._identifiers = {
            term
            for term, n in counts.items()
            if term in query.newest and 0 < n <= _RARE and any(char.isdigit() for char in term)
        }

    def weight(self, terms: Iterable[str]) -> float:
        """How much of what was asked for is in these words, for comparing."""
        return sum(self._weights[term] for term in terms)

    def share(self, terms: Iterable[str]) -> float:
        """How much of what was asked for is in these words, 0 to 1."""
        return self.weight(terms) / self._mass

    def bm25(self, counts: Mapping[str, int], relative_length: float) -> float:
        """The share of what one occurrence of every query term would score at average length."""
        norm = _K1 * (1 - _B + _B * relative_length)
        return sum(self._weights[term] * n * (_K1 + 1) / (n + norm) for term, n in counts.items()) / self._mass

    def evidence(self, cosine: float | None, own: Iterable[str], around: Iterable[str]) -> float:
        """How far a text is above the gate, or below: by its cosine, its own words and those of its window."""
        if not self._identifiers.isdisjoint(own):
            return 1.0
        said = _GATE_OWN * self.share(own) + _GATE_WINDOW * self.share(around)
        return (cosine or 0.0) + said - self._gate - _GATE_HALF

    def is_near(self, cosine: float | None, own: Sequence[str]) -> bool:
        """True for a text that says something of what was asked for itself."""
        return bool(own) or (cosine is not None and cosine >= _NEAR * self._gate)
