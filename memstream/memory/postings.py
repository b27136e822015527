"""Which texts hold which words of a question, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memstream.stores.base import Ids

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]


class Postings:
    """The texts of one kind that hold any of the terms.

    Args:
        ids: of those that hold each term.
    """

    def __init__(self, ids: Sequence[Sequence[int]] = ()) -> None:
        self._ids = [np.array(mine, dtype=np.int64) for mine in ids]

    def held(self, ids: Ids) -> Flags:
        """Which of the texts [n] hold which of the t terms: [n, t]."""
        found = np.zeros((len(ids), len(self._ids)), dtype=np.bool_)
        for column, mine in enumerate(self._ids):
            if len(mine):
                found[:, column] = np.isin(ids, mine)
        return found

    def best(self, weights: Numbers, n: int) -> Ids:
        """The at most n texts whose terms weigh most by ``weights`` [t], best first, the newest first among equals."""
        if not any(len(mine) for mine in self._ids):
            return np.empty(0, dtype=np.int64)
        ids, which = np.unique(np.concatenate(self._ids), return_inverse=True)
        each = np.repeat(weights, [len(mine) for mine in self._ids])
        return ids[np.lexsort((-ids, -np.bincount(which, each)))[:n]]
