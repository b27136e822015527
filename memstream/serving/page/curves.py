"""Three curves of the whole server: tokens per second, bytes of the cache, use of the processor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from memstream.agent import Agent

SAMPLE_S = 1.0
N_SAMPLES = 180
WIDTH, HEIGHT = 180, 44  # of a drawing, in its own units
_CORES = psutil.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: tokens decoded per second since the one before, bytes of the cache, share of all cores in percent."""

    tokens_per_s: float
    cache_bytes: int
    processor: float


class Curves:
    """The last three minutes.

    Args:
        agent: is measured.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call has nothing to compare with
        self._last = (time.monotonic(), agent.state().tokens)
        self.samples: deque[Sample] = deque(maxlen=N_SAMPLES)
        self.version = 0

    def take(self) -> None:
        """Adds a sample."""
        now, state = time.monotonic(), self._agent.state()
        n = state.tokens
        (then, before), self._last = self._last, (now, n)
        self.samples.append(
            Sample(
                tokens_per_s=(n - before) / (now - then) if now > then else 0.0,
                cache_bytes=state.cache_bytes,
                processor=min(100.0, self._process.cpu_percent() / _CORES),
            )
        )
        self.version += 1

    async def run(self) -> None:
        """Takes one every second."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.to_thread(self.take)


def drawn(values: Sequence[float], top: float) -> str:
    """A curve as SVG, the newest value at the right edge.

    Args:
        values: one for each second, oldest first, from 0 up.
        top: the value that is drawn at the upper edge; at least 1 is taken.
    """
    top, step = max(top, 1.0), WIDTH / (N_SAMPLES - 1)
    points = [
        (WIDTH - (len(values) - 1 - i) * step, HEIGHT - 1 - min(max(value, 0.0), top) / top * (HEIGHT - 4))
        for i, value in enumerate(values)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = f"{points[0][0]:.1f},{HEIGHT} {line} {WIDTH},{HEIGHT}" if points else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polygon points="{area}"/><polyline points="{line}"/></svg>'
    )
