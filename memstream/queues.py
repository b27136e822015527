"""Who waits for whom: turns of one conversation for each other, turns of all of them for a row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from memstream.errors import BusyError, OverloadedError

OWN_REPLY = "a reply of this agent is still being streamed in this thread; iterate to its end, or close it"


class TurnQueue:
    """One turn at a time; other threads wait. Waiting for oneself would be for ever, so it is an error."""

    PATIENCE_S = 2.0  # a turn that this thread began may be resumed by another one
    QUIET_S = 0.25  # after which nobody seems to wait for the next piece of a reply

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._steps = 0
        self._suspended: float | None = None  # since when the turn's caller has the latest piece

    def enter(self, cancelled: Callable[[], bool]) -> bool:
        """Waits for its turn; returns False where it was cancelled meanwhile.

        Raises:
            BusyError: the running turn waits for this very thread to go on.
        """
        seen, since = -1, time.monotonic()
        while not self._lock.acquire(timeout=0.05):
            if cancelled():
                return False
            if self._owner != threading.get_ident() or seen != self._steps:
                seen, since = self._steps, time.monotonic()
            elif time.monotonic() - since > self.PATIENCE_S:
                raise BusyError(OWN_REPLY)
        self.resumed()
        return True

    def try_enter(self) -> bool:
        """Takes its turn where nobody has it; never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        self.resumed()
        return True

    def is_mine(self) -> bool:
        """True where this very thread was the last to live the running turn."""
        return self._lock.locked() and self._owner == threading.get_ident()

    def is_taken(self) -> bool:
        """True while somebody has it."""
        return self._lock.locked()

    def resumed(self) -> None:
        """Notes which thread lives the turn now: the one that asked for its next piece."""
        self._owner = threading.get_ident()
        self._steps += 1
        self._suspended = None

    def suspended(self) -> None:
        """Notes that the turn's caller has a piece, and the turn goes on when it asks for the next."""
        self._suspended = time.monotonic()

    def is_quiet(self) -> bool:
        """True while no turn is lived, or the one that is was left standing by its caller."""
        since = self._suspended
        return not self._lock.locked() or (since is not None and time.monotonic() - since > self.QUIET_S)

    def leave(self) -> None:
        """Lets the next one in."""
        self._owner = self._suspended = None
        self._lock.release()

    def __enter__(self) -> None:
        self.enter(lambda: False)

    def __exit__(self, *exception: object) -> None:
        self.leave()


class Waiting:
    """The turns that wait: how many there are, and who comes into a row next.

    Args:
        most: more than so many never wait; None: any number does.

    Attributes:
        n: turns that wait now, for a row or for an earlier turn of their conversation.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._line: deque[Place] = deque()
        self.n = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a turn that waits.

        Raises:
            OverloadedError: as many as may wait do already.
        """
        with self._lock:
            if self._most is not None and self.n >= self._most:
                raise OverloadedError(
                    f"{self.n} turns wait already, and max_waiting is {self._most}: ask again later, or raise rows "
                    "or max_waiting"
                )
            self.n += 1
        try:
            yield
        finally:
            with self._lock:
                self.n -= 1

    @contextlib.contextmanager
    def in_line(self) -> Iterator[Place]:
        """Stands at the end of the line for a row meanwhile."""
        place = Place(self._line)
        with self._lock:
            self._line.append(place)
        try:
            yield place
        finally:
            with self._lock:
                self._line.remove(place)
                if self._line:
                    self._line[0].called.set()


class Place:
    """A place in a line.

    Attributes:
        called: set when those in front have left.
    """

    POLL_S = 0.01  # of whoever is next, for a row whose turn is over
    LATER_S = 0.1  # of the others

    def __init__(self, line: deque[Place]) -> None:
        self._line = line
        self.called = threading.Event()

    def is_next(self) -> bool:
        """True where nobody stands in front."""
        return self._line[0] is self

    def wait(self) -> None:
        """Waits a moment, no longer than until one is next."""
        if self.is_next():
            time.sleep(self.POLL_S)
        else:
            self.called.wait(self.LATER_S)
