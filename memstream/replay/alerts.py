"""Decides which lines to point out: those above a running threshold, once per incident."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from memstream.replay.config import ReplayConfig

_STEP = 1 / 64  # nats
_LOWEST = -16.0  # lower scores count as this
_N_STEPS = 4096  # scores up to 48 are told apart
_OUTLIER = 0.05  # nats above the threshold, which a higher score counts as
_LEAST = 3.0  # nats, below which no line stands out: one in twenty is not rare
_MOST = 10  # incidents in a summary
_HOUR = timedelta(hours=1)

Reason = Literal["score", "rate", "silence"]
Verdict = Literal["quiet", "alert", "held_back"]


class RunningQuantile:
    """A quantile of everything seen so far, from counts in steps of 1/64; memory never grows."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._counts = [0] * _N_STEPS
        self._n = 0
        self._at = 0  # the step that holds the quantile
        self._below = 0  # how many values lie in lower steps

    def add(self, value: float) -> None:
        """Counts a value."""
        step = min(_N_STEPS - 1, max(0, int((value - _LOWEST) / _STEP)))
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
        return _LOWEST + (self._at + 1) * _STEP if self._n else 0.0

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``."""
        counts = [[step, count] for step, count in enumerate(self._counts) if count]
        return {"counts": counts, "n": self._n, "at": self._at, "below": self._below}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned."""
        self._n, self._at, self._below = state["n"], state["at"], state["below"]
        for step, count in state["counts"]:
            self._counts[step] = count


class RunningDeviations:
    """Mean plus so many standard deviations of everything seen so far (Welford's method)."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._n, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._n += 1
        apart = value - self._mean
        self._mean += apart / self._n
        self._squares += apart * (value - self._mean)

    @property
    def value(self) -> float:
        """The threshold; 0 before the first value."""
        return self._mean + self._deviations * math.sqrt(self._squares / self._n) if self._n else 0.0

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``."""
        return {"n": self._n, "mean": self._mean, "squares": self._squares}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned."""
        self._n, self._mean, self._squares = state["n"], state["mean"], state["squares"]


class Fixed:
    """A threshold that stays."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        """Changes nothing."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is judged: one line, or one silence.

    Attributes:
        stream: where it came from.
        line: its number there, from 1.
        time: UTC, where the line tells it.
        template_id: of its template.
        template: the text of its template.
        score: what the threshold is about; None: nothing to compare.
        new: True for the first line of its template.
    """

    stream: str
    line: int
    time: datetime | None
    template_id: int
    template: str
    score: float | None
    new: bool = False


@dataclass(slots=True)
class Incident:
    """What was pointed out, and what followed from it.

    Attributes:
        id: from 1.
        stream: where the first line came from.
        line: number of the first line.
        template: its template, as it was then.
        reason: why it was pointed out.
        score: of the first line.
        n_repeats: later lines of the same template while it was open.
        last_line: running count of lines when it was last seen.
        first_time: log time of its first line.
        last_time: log time of its last line.
    """

    id: int
    stream: str
    line: int
    template: str
    reason: Reason
    score: float
    n_repeats: int
    last_line: int
    first_time: datetime | None
    last_time: datetime | None


class Decision:
    """Judges lines in order.

    A line alerts when its score is above the threshold of the lines before it and no incident of its stream, template
    and reason is open (the rising edge). At the start everything is new, which says nothing about the stream: the
    first line of each template that comes up during the burn-in has no part in the threshold. After it, a score above
    the threshold counts as little more than the threshold itself, or one burst would hide whatever is less severe for
    as long as it is among the highest scores.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        kind, value = config.limit
        self._threshold: RunningQuantile | RunningDeviations | Fixed
        if kind == "quantile":
            self._threshold = RunningQuantile(value)
        elif kind == "deviations":
            self._threshold = RunningDeviations(value)
        else:
            self._threshold = Fixed(value)
        # The one seen longest ago first.
        self._open: OrderedDict[tuple[str, int, Reason], Incident] = OrderedDict()
        self._ended: list[Incident] = []  # of those that have ended, the ones with the most repeats
        self._recent: deque[datetime] = deque()  # when the alerts of the last hour were given, in the log's time
        self._n_lines = 0
        self.n_alerts = 0
        self.n_held_back = 0
        self.n_limited = 0
        self.n_repeats = 0

    @property
    def threshold(self) -> float:
        """What the next line's score has to exceed."""
        found = self._threshold.value
        return found if isinstance(self._threshold, Fixed) else max(found, _LEAST)

    def judge(self, mark: Mark) -> tuple[Verdict, Incident | None]:
        """Judges one line by its score."""
        self._n_lines += 1
        self._end_old_incidents()
        threshold = self.threshold
        burning_in = self._n_lines <= self._config.burn_in_lines
        if mark.score is not None and not (burning_in and mark.new):
            most = math.inf if burning_in else self._threshold.value + _OUTLIER
            self._threshold.add(min(mark.score, most))
        above = mark.score is not None and mark.score > threshold and not burning_in
        return self._open_incident(mark, "score", above)

    def report(self, mark: Mark, reason: Reason) -> tuple[Verdict, Incident | None]:
        """Judges something that is known to stand out, for another reason than a score."""
        return self._open_incident(mark, reason, True)

    def _open_incident(self, mark: Mark, reason: Reason, above: bool) -> tuple[Verdict, Incident | None]:
        key = (mark.stream, mark.template_id, reason)
        incident = self._open.get(key)
        if incident is not None and not self._is_over(incident, mark.time):
            incident.n_repeats += 1
            incident.last_line, incident.last_time = self._n_lines, mark.time or incident.last_time
            self._open.move_to_end(key)
            self.n_repeats += 1
            self.n_held_back += above
            return ("held_back" if above else "quiet"), incident
        if incident is not None:
            self._end(key)
        if not above:
            return "quiet", None
        if self._is_limited(mark.time):
            self.n_held_back += 1
            self.n_limited += 1
            return "held_back", None
        self.n_alerts += 1
        incident = Incident(
            self.n_alerts,
            mark.stream,
            mark.line,
            mark.template,
            reason,
            mark.score or 0.0,
            0,
            self._n_lines,
            mark.time,
            mark.time,
        )
        self._open[key] = incident
        return "alert", incident

    def _is_over(self, incident: Incident, time: datetime | None) -> bool:
        if time is None or incident.last_time is None:
            return False
        return (time - incident.last_time).total_seconds() > self._config.incident_s

    def _is_limited(self, time: datetime | None) -> bool:
        """True where the last hour of the log has had its alerts; lines without a time are not limited."""
        most = self._config.max_alerts_per_hour
        if not most or time is None:
            return False
        while self._recent and time - self._recent[0] >= _HOUR:
            self._recent.popleft()
        if len(self._recent) >= most:
            return True
        self._recent.append(time)
        return False

    def _end_old_incidents(self) -> None:
        while self._open:
            key, incident = next(iter(self._open.items()))
            if self._n_lines - incident.last_line <= self._config.incident_lines:
                return
            self._end(key)

    def _end(self, key: tuple[str, int, Reason]) -> None:
        self._ended = _most([*self._ended, self._open.pop(key)])

    def most_repeated(self) -> list[Incident]:
        """The incidents with the most repeats, at most ten, ended ones too."""
        return _most([*self._ended, *self._open.values()])

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``."""
        return {
            "threshold": self._threshold.state(),
            "open": [[*key, _plain(incident)] for key, incident in self._open.items()],
            "ended": [_plain(incident) for incident in self._ended],
            "recent": [time.isoformat() for time in self._recent],
            "counts": [self._n_lines, self.n_alerts, self.n_held_back, self.n_limited, self.n_repeats],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned."""
        self._threshold.restore(state["threshold"])
        self._open.update(
            {(stream, template, reason): _incident(rest) for stream, template, reason, rest in state["open"]}
        )
        self._ended = [_incident(rest) for rest in state["ended"]]
        self._recent.extend(datetime.fromisoformat(time) for time in state["recent"])
        self._n_lines, self.n_alerts, self.n_held_back, self.n_limited, self.n_repeats = state["counts"]


def _plain(incident: Incident) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(incident).items()
    }


def _incident(plain: dict[str, Any]) -> Incident:
    times = {name: plain[name] and datetime.fromisoformat(plain[name]) for name in ("first_time", "last_time")}
    return Incident(**{**plain, **times})


def _most(incidents: list[Incident]) -> list[Incident]:
    return heapq.nlargest(_MOST, incidents, key=lambda incident: (incident.n_repeats, -incident.id))
