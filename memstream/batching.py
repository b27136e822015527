"""Continuous batching: whoever decodes a token goes along with the others that do at the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from memstream.engine import Engine
from memstream.streaming.row import Row

_PATIENCE_S = 0.004  # for those who took part in the last step and are choosing their next token


@dataclass(slots=True, eq=False)
class _Ask:
    """A token of one row that is to be fed."""

    row: Row
    token: int
    woken: threading.Event = field(default_factory=threading.Event)
    done: bool = False
    error: BaseException | None = None


class Batch:
    """Steps of single rows, asked for by many threads, in as few forwards as can be.

    There is no thread of its own: the first who asks leads, waits a little for those of the last step, and computes for
    all who have asked by then. Who asks while a forward runs goes along with the next. Nobody waits for a row that has
    ended, or whose reader is slow, longer than that little, once.

    Args:
        engine: of the rows.
        most: rows in one step.
    """

    def __init__(self, engine: Engine, *, most: int) -> None:
        self.engine, self._most = engine, most
        self._changed = threading.Condition()
        self._asked: list[_Ask] = []
        self._leading = False
        self._last = 1  # rows in the last step

    def step(self, row: Row, token: int) -> None:
        """Feeds one token to a row and renews its ``logits``.

        Raises:
            Exception: what the forward raised, for each of its rows.
        """
        ask = _Ask(row, token)
        with self._changed:
            self._asked.append(ask)
            lead = not self._leading
            self._leading = True
            self._changed.notify()
        if not lead:
            ask.woken.wait()
        if not ask.done:
            self._lead()
        if ask.error is not None:
            raise ask.error

    def _lead(self) -> None:
        chosen = self._gathered()
        error: BaseException | None = None
        try:
            self.engine.step([ask.row for ask in chosen], [ask.token for ask in chosen])
        except BaseException as raised:  # every row's thread raises it  # noqa: BLE001
            error = raised
        with self._changed:
            for ask in chosen:
                ask.done, ask.error = True, error
            self._leading = bool(self._asked)
            if self._asked:
                self._asked[0].woken.set()  # leads the next step
        for ask in chosen:
            ask.woken.set()

    def _gathered(self) -> Sequence[_Ask]:
        """Those who have asked, once the rows of the last step are among them or the patience is over."""
        deadline = time.monotonic() + _PATIENCE_S
        with self._changed:
            while len(self._asked) < self._last and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            chosen, self._asked = self._asked[: self._most], self._asked[self._most :]
            self._last = len(chosen)
        return chosen
