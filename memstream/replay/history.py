"""What a report draws: a replay over time, in a bounded number of buckets however long it runs."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from memstream.replay.events import Alert, Event, Note, Record, Summary

MOST_BUCKETS = 300
MOST_ALERTS = 200
_MOST_TEMPLATES = 60  # counted in one bucket


@dataclass(slots=True)
class Bucket:
    """Some lines that follow each other.

    Attributes:
        n_lines: how many.
        highest: highest score; None where no line has one.
        threshold: the last one.
        levels: lines by OpenTelemetry severity number, 0 for none.
        templates: lines by template.
        n_alerts: alerts given.
        resident_bytes: memory of the process at its end.
        first_time: log time of the first line that tells one.
    """

    n_lines: int = 0
    highest: float | None = None
    threshold: float | None = None
    levels: Counter[int] = field(default_factory=Counter)
    templates: Counter[int] = field(default_factory=Counter)
    n_alerts: int = 0
    resident_bytes: int = 0
    first_time: datetime | None = None

    def join(self, later: Bucket) -> None:
        """Takes the lines of the bucket behind this one in."""
        self.n_lines += later.n_lines
        scores = [score for score in (self.highest, later.highest) if score is not None]
        self.highest = max(scores, default=None)
        self.threshold = self.threshold if later.threshold is None else later.threshold
        self.levels += later.levels
        self.templates = Counter(dict((self.templates + later.templates).most_common(_MOST_TEMPLATES)))
        self.n_alerts += later.n_alerts
        self.resident_bytes = later.resident_bytes or self.resident_bytes
        self.first_time = self.first_time or later.first_time


class History:
    """A sink that keeps what a report needs. When there are too many buckets, neighbours are joined.

    Attributes:
        buckets: all, oldest first.
        lines_per_bucket: of all but the last.
        alerts: the first ones.
        n_alerts: all of them.
        notes: what happened to the streams, the first ones.
        summary: the last one; None before the end.
    """

    def __init__(self) -> None:
        self.buckets = [Bucket()]
        self.lines_per_bucket = 1
        self.alerts: list[Alert] = []
        self.n_alerts = 0
        self.notes: list[Note] = []
        self.summary: Summary | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event in."""
        if isinstance(event, Record):
            self._add(event)
        elif isinstance(event, Alert):
            self.n_alerts += 1
            self.buckets[-1].n_alerts += 1
            if len(self.alerts) < MOST_ALERTS:
                self.alerts.append(event)
        elif isinstance(event, Note):
            if len(self.notes) < MOST_ALERTS:
                self.notes.append(event)
        else:
            self.summary = event

    def _add(self, record: Record) -> None:
        bucket = self.buckets[-1]
        if bucket.n_lines >= self.lines_per_bucket:
            bucket.resident_bytes = resident_bytes()
            if len(self.buckets) >= MOST_BUCKETS:
                self._halve()
            bucket = Bucket()
            self.buckets.append(bucket)
        bucket.n_lines += record.lines
        bucket.levels[record.severity or 0] += 1
        bucket.first_time = bucket.first_time or record.time
        if record.score is not None:
            bucket.highest = record.score if bucket.highest is None else max(bucket.highest, record.score)
            bucket.threshold = record.threshold
        if record.template is not None and (
            record.template in bucket.templates or len(bucket.templates) < _MOST_TEMPLATES
        ):
            bucket.templates[record.template] += 1

    def _halve(self) -> None:
        for bucket, later in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            bucket.join(later)
        self.buckets = self.buckets[::2]
        self.lines_per_bucket *= 2


def resident_bytes() -> int:
    """Memory of this process: now where the system tells it, else its peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
