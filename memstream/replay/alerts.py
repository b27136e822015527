"""Decides which lines to point out: those above a running quantile, once per incident."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from memstream.replay.normalise import Line
from memstream.replay.templates import Template

_STEP = 1 / 64  # nats per token
_N_STEPS = 2048  # scores up to 32 are told apart; less than 1e-13 of a chance per token
_MOST = 10  # incidents in a summary


class RunningQuantile:
    """A quantile of everything seen so far, from counts in steps of 1/64; memory never grows."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._counts = [0] * _N_STEPS
        self._n = 0
        self._at = 0  # the step that holds the quantile
        self._below = 0  # how many values lie in lower steps

    def add(self, value: float) -> None:
        """Counts a value, 0 or more."""
        step = min(_N_STEPS - 1, max(0, int(value / _STEP)))
        self._counts[step] += 1
        self._n += 1
        self._below += step < self._at
        need = self._share * self._n
        while self._below + self._counts[self._at] < need:
            self._below += self._counts[self._at]
            self._at += 1
        while self._at and self._below >= need:
            self._at -= 1
            self._below -= self._counts[self._at]

    @property
    def value(self) -> float:
        """The upper end of the step that at least the share of all values lie in or below; 0 before the first value."""
        return (self._at + 1) * _STEP if self._n else 0.0


@dataclass(slots=True)
class Incident:
    """A line that was pointed out, and what followed from it.

    Attributes:
        id: from 1.
        line: the line that was pointed out.
        template: its template, as it was then.
        score: of that line.
        n_repeats: later lines of the same template while it was open.
        last_line: running count of lines when it was last seen.
    """

    id: int
    line: Line
    template: str
    score: float
    n_repeats: int
    last_line: int


Verdict = Literal["quiet", "alert", "held_back"]


class Decision:
    """Judges lines in order.

    A line alerts when its score lies above the quantile of the lines before it, and the line before it did not (the
    rising edge), and its template has no open incident. Lines that are not scored count as 0: they are of a kind that
    was seen before. So ``q0.99`` means about one line in a hundred, whatever share of the lines is scored. At the start
    everything is new, which says nothing about the stream: the first line of each template that comes up during the
    burn-in is left out of the quantile.

    Args:
        share: of the quantile.
        burn_in_lines: lines before the first alert.
        incident_lines: an incident ends when its template was not seen for this many lines.
    """

    def __init__(self, *, share: float, burn_in_lines: int, incident_lines: int) -> None:
        self._quantile = RunningQuantile(share)
        self._burn_in_lines = burn_in_lines
        self._incident_lines = incident_lines
        self._open: OrderedDict[int, Incident] = OrderedDict()  # by template; the one seen longest ago first
        self._ended: list[Incident] = []  # of those that have ended, the ones with the most repeats
        self._above = False
        self._n_lines = 0
        self.n_alerts = 0
        self.n_held_back = 0
        self.n_repeats = 0

    @property
    def threshold(self) -> float:
        """What the next line's score has to exceed."""
        return self._quantile.value

    def judge(
        self, line: Line, template: Template, score: float | None, *, new: bool
    ) -> tuple[Verdict, Incident | None]:
        """Judges one line.

        Args:
            line: the line.
            template: its template.
            score: None for a line that was not scored.
            new: True for the first line of its template.
        """
        self._n_lines += 1
        self._end_old_incidents()
        threshold, value = self.threshold, score or 0.0
        burning_in = self._n_lines <= self._burn_in_lines
        if not (burning_in and new):
            self._quantile.add(value)
        above = value > threshold and not burning_in
        rising = above and not self._above
        self._above = above
        incident = self._open.get(template.id)
        if incident is not None:
            incident.n_repeats += 1
            incident.last_line = self._n_lines
            self._open.move_to_end(template.id)
            self.n_repeats += 1
            self.n_held_back += above
            return ("held_back" if above else "quiet"), incident
        if not rising:
            self.n_held_back += above
            return ("held_back" if above else "quiet"), None
        self.n_alerts += 1
        incident = Incident(self.n_alerts, line, template.text, value, 0, self._n_lines)
        self._open[template.id] = incident
        return "alert", incident

    def _end_old_incidents(self) -> None:
        while self._open:
            template_id, incident = next(iter(self._open.items()))
            if self._n_lines - incident.last_line <= self._incident_lines:
                return
            del self._open[template_id]
            self._ended = _most([*self._ended, incident])

    def most_repeated(self) -> list[Incident]:
        """The incidents with the most repeats, at most ten, ended ones too."""
        return _most([*self._ended, *self._open.values()])


def _most(incidents: list[Incident]) -> list[Incident]:
    return heapq.nlargest(_MOST, incidents, key=lambda incident: (incident.n_repeats, -incident.id))
