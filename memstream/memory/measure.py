"""How much the words and cosines of texts count for a query: see the formulas in ``scoring.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from memstream.memory.postings import Flags, Numbers
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

    Attributes:
        terms: of the query, t of them.
        weights: of the terms [t].

    Args:
        query: what is asked.
        gate: least cosine of a hit that holds half of the words.
        counts: how many texts hold each term.
        n_texts: how many there are.
    """

    def __init__(self, query: Query, gate: float, counts: Sequence[int], n_texts: int) -> None:
        self.terms = tuple(query.terms)
        self._gate = gate
        self.weights: Numbers = np.array(
            [
                query.terms[term] * math.log(1 + (max(n_texts, n, _FEW) - n + 0.5) / (n + 0.5))
                for term, n in zip(self.terms, counts, strict=True)
            ],
            dtype=np.float64,
        )
        self._mass = max(float(self.weights.sum()), 1e-6)
        self._identifiers: Flags = np.array(
            [
                term in query.newest and 0 < n <= _RARE and any(char.isdigit() for char in term)
                for term, n in zip(self.terms, counts, strict=True)
            ],
            dtype=np.bool_,
        )

    def share(self, held: Flags) -> Numbers:
        """How much of what was asked for is in texts [n] that hold terms [n, t], 0 to 1."""
        return np.asarray(held @ self.weights / self._mass)

    def bm25(self, counts: Numbers | Flags, relative_lengths: Numbers) -> Numbers:
        """The share of what one occurrence of every query term would score at average length.

        Args:
            counts: how often each of n texts has each term [n, t].
            relative_lengths: 1 for a text of average length [n].
        """
        norm = _K1 * (1 - _B + _B * relative_lengths)[:, None]
        return np.asarray((counts * (_K1 + 1) / (counts + norm)) @ self.weights / self._mass)

    def evidence(self, cosines: Numbers, own: Flags, around: Flags) -> Numbers:
        """How far texts are above the gate, or below.

        Args:
            cosines: with the whole question [n]; not a number where there is none.
            own: terms of each [n, t].
            around: and of its window [n, t].
        """
        said = _GATE_OWN * self.share(own) + _GATE_WINDOW * self.share(around)
        above = np.nan_to_num(cosines) + said - self._gate - _GATE_HALF
        return np.where((own & self._identifiers).any(axis=1), 1.0, above)

    def is_near(self, cosines: Numbers, own: Flags) -> Flags:
        """True for texts that say something of what was asked for themselves; as in ``evidence``."""
        return np.asarray(own.any(axis=1) | (cosines >= _NEAR * self._gate))
