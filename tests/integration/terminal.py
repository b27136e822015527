"""``memstream chat`` in a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

RUN = [sys.executable, "-c", "import sys; from memstream.cli import main; sys.argv[0] = 'memstream'; main()"]
PATIENCE_S = 120.0


class Terminal:
    """A chat in a terminal of its own.

    Attributes:
        seen: what was shown and not waited for yet.
    """

    def __init__(self, *arguments: Any) -> None:
        self._fd, theirs = pty.openpty()
        command = [*RUN, "chat", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def read(self, enough: Callable[[], bool]) -> None:
        """Waits until enough was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more after {self.seen!r}"
            self.seen += os.read(self._fd, 65536).decode(errors="replace")

    def until(self, words: str) -> str:
        """Waits until something was shown; returns what was before it, and takes both away."""
        self.read(lambda: words in self.seen)
        before, _, self.seen = self.seen.partition(words)
        return before

    def say(self, text: str) -> None:
        """Types."""
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.kill(self.process.pid, signal.SIGINT)

    def settle(self) -> None:
        """Waits until it waits for a key: a signal in the moment before readline does so is seen with the next key."""
        process, spent = psutil.Process(self.process.pid), -1.0
        while spent != (spent := sum(process.cpu_times()[:2])):
            time.sleep(0.5)

    def status(self) -> int:
        """Waits for its end."""
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
