"""How often each template comes: what scores of single lines hide, because a gate hides lines that are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

BUCKET_LINES = 1000
_SETTLED_BUCKETS = 4  # before which nothing is said of a template
_KEEP = 0.9  # share of the mean that an older bucket keeps
_DEVIATIONS = 8.0  # of a Poisson count,
_TIMES = 5.0  # and so many times the mean: real logs come in bursts
_LEAST_SILENT = 50.0  # lines a bucket that a template must have had before its silence says something


class Change(NamedTuple):
    """A template whose rate changed: its text, how many lines of it came, and how many were due."""

    template_id: int
    text: str
    kind: Literal["rate", "silence"]
    n_lines: int
    expected: float


class Rates:
    """Counts templates in buckets of 1,000 lines, each beside a fading mean of its earlier buckets."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._means: dict[int, tuple[int, float]] = {}  # buckets seen, mean
        self._texts: dict[int, str] = {}
        self._n_lines = 0

    def add(self, template_id: int, text: str) -> Iterator[Change]:
        """Counts a line; at the end of a bucket yields what changed."""
        self._texts[template_id] = text
        self._counts[template_id] = self._counts.get(template_id, 0) + 1
        self._n_lines += 1
        if self._n_lines % BUCKET_LINES == 0:
            yield from self._end_bucket()

    def _end_bucket(self) -> Iterator[Change]:
        counts, self._counts = self._counts, {}
        for template_id in sorted(self._means.keys() | counts.keys()):
            n_lines = counts.get(template_id, 0)
            n_buckets, mean = self._means.get(template_id, (0, float(n_lines)))
            if n_buckets >= _SETTLED_BUCKETS:
                if n_lines > max(mean + _DEVIATIONS * math.sqrt(mean + 1), _TIMES * mean):
                    yield Change(template_id, self._texts[template_id], "rate", n_lines, mean)
                elif n_lines == 0 and mean >= _LEAST_SILENT:
                    yield Change(template_id, self._texts[template_id], "silence", 0, mean)
            mean = _KEEP * mean + (1 - _KEEP) * n_lines
            if mean < 0.01:
                self._means.pop(template_id, None)
            else:
                self._means[template_id] = (n_buckets + 1, mean)
        self._texts = {template_id: self._texts[template_id] for template_id in self._means}

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``."""
        return {
            "counts": list(self._counts.items()),
            "means": [[template_id, *mean] for template_id, mean in self._means.items()],
            "texts": list(self._texts.items()),
            "n_lines": self._n_lines,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned."""
        self._counts = dict(state["counts"])
        self._means = {template_id: (n, mean) for template_id, n, mean in state["means"]}
        self._texts = dict(state["texts"])
        self._n_lines = state["n_lines"]
