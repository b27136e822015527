"""What ``memstream replay`` shows on a terminal while it runs; nothing of it goes to stdout."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memstream.replay import Alert, Event, Record, Replay
from memstream.report import shown

_EVERY_S = 0.25
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 60
_TEMPLATES = 5
_ALERTS = 5


class LiveView:
    """Rate, lag, a sparkline of scores, the most frequent templates and the latest alerts.

    Args:
        console: of a terminal; None takes stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._scores: deque[float] = deque(maxlen=_POINTS)  # highest of each stretch between two pictures
        self._highest: float | None = None
        self._alerts: deque[Alert] = deque(maxlen=_ALERTS)
        self._last, self._last_lines = time.monotonic(), 0
        self._rate = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def sink(self, event: Event) -> None:
        """Takes scores and alerts in."""
        if isinstance(event, Record) and event.score is not None:
            self._highest = event.score if self._highest is None else max(self._highest, event.score)
        elif isinstance(event, Alert):
            self._alerts.append(event)

    def progress(self, replay: Replay) -> None:
        """Draws a new picture, a few times a second at most."""
        passed = time.monotonic() - self._last
        if passed < _EVERY_S:
            return
        self._rate = (replay.n_lines - self._last_lines) / passed
        self._last, self._last_lines = time.monotonic(), replay.n_lines
        if self._highest is not None:
            self._scores.append(self._highest)
            self._highest = None
        self._live.update(self.picture(replay), refresh=True)

    def picture(self, replay: Replay) -> Group:
        """What is shown now."""
        summary = replay.summary()
        head = Text(
            f"{summary.lines:,} lines  {self._rate:,.0f}/s  {summary.lag_bytes:,} bytes behind  "
            f"{summary.templates:,} templates  {summary.alerts:,} alerts  ({summary.mode})",
            style="bold",
        )
        table = Table.grid(padding=(0, 2))
        for _, text, n in replay.frequent_templates(_TEMPLATES):
            table.add_row(Text(f"{n:,}", justify="right"), Text(shown(text), overflow="ellipsis", no_wrap=True))
        alerts = Table.grid(padding=(0, 2))
        for alert in self._alerts:
            place = Text(f"{shown(alert.stream)}:{alert.line}", style="red", no_wrap=True)
            alerts.add_row(place, Text(shown(alert.message), overflow="ellipsis", no_wrap=True))
        return Group(head, Text(f"score {sparkline(self._scores)}"), table, alerts)


def sparkline(values: deque[float]) -> str:
    """Values as a row of bars, the least the lowest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    steps = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / ((high - low) or 1.0) * steps)] for value in values)
