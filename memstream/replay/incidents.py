"""What was pointed out before: finds the past incidents most like a new one."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from memstream.replay.events import PastIncident
from memstream.replay.normalise import mask

_WORD = re.compile(r"[^\W_]+")
_LEAST = 0.3  # less alike is not worth showing


class PastIncidents:
    """Incidents by the words of their first line, without what varies; compared by the share of words they have in
    common (Jaccard), the later of two equals first.

    Token overlap and not embeddings, because it was better: on BGL it puts one of the same kind first every time.

    Args:
        most: how many are kept; the oldest leave first.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._known: OrderedDict[int, tuple[frozenset[str], dict[str, Any]]] = OrderedDict()

    def add(self, incident: int, message: str, *, stream: str, line: int, time: datetime | None) -> None:
        """Remembers an incident."""
        told = {"message": message[:500], "stream": stream, "line": line, "time": time}
        self._known[incident] = (_words(message), told)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def nearest(self, message: str, limit: int = 3) -> tuple[PastIncident, ...]:
        """Those most like a message, best first, at most ``limit``."""
        words = _words(message)
        alike = [(_overlap(words, known), incident) for incident, (known, _) in self._known.items()]
        best = sorted((pair for pair in alike if pair[0] >= _LEAST), reverse=True)[:limit]
        return tuple(
            PastIncident(incident=incident, similarity=round(share, 3), **self._known[incident][1])
            for share, incident in best
        )

    def state(self) -> list[Any]:
        """Plain data for ``restore``."""
        return [
            [incident, told["message"], told["stream"], told["line"], told["time"] and told["time"].isoformat()]
            for incident, (_, told) in self._known.items()
        ]

    def restore(self, state: Sequence[Any]) -> None:
        """Goes on from what ``state`` returned."""
        for incident, message, stream, line, time in state:
            self.add(incident, message, stream=stream, line=line, time=time and datetime.fromisoformat(time))


def _words(message: str) -> frozenset[str]:
    masked = mask(message).lower()
    return frozenset(_WORD.findall(masked)) or frozenset([masked])


def _overlap(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)
