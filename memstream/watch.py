"""Looks after memory while an agent lives: tells of it in the log, and makes do with less where it is short."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from pathlib import Path

from memstream.engine import Engine
from memstream.machine import free_memory, is_low, out_of_memory, process_bytes
from memstream.memory import Regularly
from memstream.report import EngineState
from memstream.residents import Residents
from memstream.swap import file_bytes

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_LINE_S = 60.0  # between two lines in the log
_APART_S = 10.0  # between two measures against too little memory, so that one can show what it brought
_QUIET_S = 60.0  # without pressure, after which another row is used again
_REPEATED = 3  # times that memory was short within a minute: the cache itself becomes smaller
_MIB = 2**20


class Watch:
    """Looks once a second, in a thread of its own, and whenever a forward found no memory.

    Args:
        residents: the conversations.
        engine: their rows.
        store: file that snapshots are kept beside, or None.
    """

    def __init__(self, residents: Residents, engine: Engine, store: Path | None) -> None:
        self._residents, self._engine, self._store = residents, engine, store
        self._most_rows = engine.rows
        self._relieving = threading.Lock()
        self._short: deque[float] = deque(maxlen=_REPEATED)  # when memory was short, of late
        self._changed = -math.inf  # when the rows that may be used last became fewer or more
        self._told, self._told_at = self.state(), time.monotonic()
        engine.relieve = self.relieve
        self._thread = Regularly("watch", self.look, every_s=_LOOK_S)

    def stop(self) -> None:
        """Looks no more."""
        self._thread.stop()

    def state(self) -> EngineState:
        """How things are."""
        engine, opened = self._engine, self._residents.opened()
        return EngineState(
            rows=engine.rows,
            rows_allowed=min(engine.rows_allowed, engine.rows),
            open=len(opened),
            resident=sum(conversation.row is not None for conversation in opened),
            running=sum(conversation.row is not None and conversation.queue.is_taken() for conversation in opened),
            waiting=self._residents.waiting.n,
            process_bytes=process_bytes(),
            cache_bytes=engine.cache_bytes,
            swap_bytes=sum(conversation.swapped.memory_bytes for conversation in opened),
            swap_file_bytes=file_bytes(self._store),
            **engine.counts.as_dict(),
        )

    def look(self) -> None:
        """Gives memory back where little is left, takes rows back into use where there was enough for long, and writes
        a line from time to time while turns run."""
        now = time.monotonic()
        try:
            if is_low(free := free_memory()):
                if now - self._changed >= _APART_S:
                    log.warning("%d of %d MiB of memory are left", free.available // _MIB, free.total // _MIB)
                    self.relieve()
            elif now - self._changed >= _QUIET_S and self._engine.rows_allowed < self._most_rows:
                self._recover()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("no memory for another cache: %s", error)
        if now - self._told_at >= _LINE_S:
            self._tell(now)

    def relieve(self) -> None:
        """Makes do with less memory; never at the cost of a turn that runs.

        One row fewer than are taken may be used from now on, and half of what conversations without a row take in
        memory goes into files. Where that was not enough for the third time within a minute, the cache is made anew
        with so few rows.

        Raises:
            Exception: there is no memory for that either.
        """
        with self._relieving:
            engine, now = self._engine, time.monotonic()
            engine.counts.add(pressure_events=1)
            self._short.append(now)
            self._changed = now
            engine.rows_allowed = max(1, min(engine.rows_allowed, engine.n_taken) - 1)
            while engine.n_taken > engine.rows_allowed and self._residents.free_row():
                pass
            self._residents.spill(sum(c.swapped.memory_bytes for c in self._residents.opened()) // 2)
            log.warning("memory is short: %d of %d rows are used from now on", engine.rows_allowed, self._most_rows)
            if len(self._short) == _REPEATED and now - self._short[0] < _QUIET_S:
                self._short.clear()
                engine.resize(engine.rows_allowed)
                log.warning("the cache was made anew with %d rows, %d MiB", engine.rows, engine.cache_bytes // _MIB)

    def _recover(self) -> None:
        """Uses one row more."""
        with self._relieving:
            engine, self._changed = self._engine, time.monotonic()
            if engine.rows_allowed >= engine.rows:
                engine.resize(engine.rows + 1)
            engine.rows_allowed += 1
            log.info("%d of %d rows are used again", engine.rows_allowed, self._most_rows)

    def _tell(self, at: float) -> None:
        """Writes the line, where tokens were decoded since the last one."""
        before, now, seconds = self._told, self.state(), at - self._told_at
        self._told, self._told_at = now, at
        if now.steps == before.steps:
            return
        log.info(
            "%d of %d rows taken, %d conversations open, %d turns run, %d wait; %.1f steps and %.1f tokens a second; "
            "process %d MiB, cache %d MiB, swap %d MiB in memory and %d MiB in files",
            now.resident,
            now.rows_allowed,
            now.open,
            now.running,
            now.waiting,
            (now.steps - before.steps) / seconds,
            (now.tokens - before.tokens) / seconds,
            now.process_bytes // _MIB,
            now.cache_bytes // _MIB,
            now.swap_bytes // _MIB,
            now.swap_file_bytes // _MIB,
        )
