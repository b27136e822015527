"""The replay: streams, template miner, gate, scorer, decision; and beside it the memory of every line.

reader -> assembler -> normaliser -> template miner -> gate -> scorer -> decision -> outputs
                                          |
                                          +-> memory of every line -> --ask
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from memstream.config import CacheConfig, WeightsChoice
from memstream.errors import ConfigError, ReplayError
from memstream.memory.embedder import Embedder
from memstream.models import DEFAULT_MODEL
from memstream.replay.checkpoint import Checkpoint
from memstream.replay.config import ReplayConfig
from memstream.replay.events import Answer, Event, Note, Record, Summary
from memstream.replay.follow import StreamNote
from memstream.replay.judging import Judge, Pending
from memstream.replay.lines import LineMemory
from memstream.replay.normalise import Line
from memstream.replay.reader import check_readable
from memstream.replay.reading import Readers
from memstream.replay.records import RecordFile
from memstream.replay.scores import Scores, combined
from memstream.replay.streams import Stream, events
from memstream.stores.sql import SqlStore

if TYPE_CHECKING:  # torch is imported when the first line is scored
    from memstream.models import LoadedModel

BATCH_LINES = 512  # most lines worked off, and stored in one transaction, at once
STEP_DOWN_BYTES = 4 << 20  # so far behind the end of a file, the model reads lines of new templates only,
STEP_UP_BYTES = 64 << 10  # until it is this near again

Source = str | os.PathLike[str]


class Replay:
    """Reads logs in constant memory; iterating gives each ``Alert`` and ``Note`` when it is due, and a ``Summary``.

    Args:
        source: a file, ``-`` for standard input, or several of them; gzip files are unpacked.
        model: an alias, a folder, a hub id, a ``.gguf`` file, or a model already loaded. It is loaded when the first
            line is to be scored.
        store: where every line is kept, for ``ask``: a file or ``sqlite:///FILE``; ``temporary``: a file that is
            removed by ``close``; None keeps none.
        config: how the log is read, scored and judged.
        cache: size of the key/value cache; None: the preset ``logs``.
        device: where the model runs.
        weights: the form it holds its weights in; see ``load_model``. In another form than float32 ``surprise``, which
            no default decides on, depends a little on how many lines are computed at once.
        embedder: turns templates and questions into vectors; None takes the default one, if it is installed.
        state: a folder in which progress is saved; a replay that finds one there goes on with it.
        records: a file that gets one JSON line per event read.
        scorer: called with each line and its scores, returns the score that is decided on, in place of ``combined``.
        sinks: each is called with every event: ``Record``, ``Alert``, ``Note`` and ``Summary``.
        on_progress: called after each batch with this object, whose ``summary()`` tells how far it is.
        stop: asked at the end of followed files; True ends the replay.

    Raises:
        ReplayError: a source is a folder, is missing, or may not be read; or a state that cannot be gone on with.
        ConfigError: the cache cannot pin so many lines, or its memory is not ``after_sinks``.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
        *,
        model: str | LoadedModel = DEFAULT_MODEL,
        store: str | os.PathLike[str] | None = None,
        config: ReplayConfig | None = None,
        cache: CacheConfig | None = None,
        device: str = "auto",
        weights: WeightsChoice = "auto",
        embedder: Embedder | None = None,
        state: str | os.PathLike[str] | None = None,
        records: str | os.PathLike[str] | None = None,
        scorer: Callable[[Line, Scores], float] | None = None,
        sinks: Sequence[Callable[[Event], object]] = (),
        on_progress: Callable[[Replay], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        names = [os.fspath(s) for s in ([source] if isinstance(source, (str, os.PathLike)) else source)]
        if not names:
            raise ReplayError("no log was given; name a file, or - for standard input")
        if len(set(names)) < len(names):
            raise ReplayError("the same log was given twice")
        self.config = config or ReplayConfig()
        cache = cache or CacheConfig.preset("logs")
        self.config.pinned_line_tokens(cache)
        for name in names:
            check_readable(name)
        self._sinks = tuple(sinks)
        self._on_progress = on_progress
        self._readers = Readers(
            model, device=device, weights=weights, config=self.config, cache=cache, embedder=embedder
        )
        self._checkpoint = None if state is None else Checkpoint(Path(state))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store = self._open_store(store)
        self._memory = None if self._store is None else LineMemory(self._store, embedder)
        recall = self._memory.count_before if self._memory else lambda text: 0
        self._judge = Judge(self.config, recall, scorer or (lambda line, scores: combined(scores)))
        self._saved_model = model if isinstance(model, str) else model.fingerprint
        positions = self._checkpoint.positions() if self._checkpoint else {}
        self._streams = [Stream(name, self.config, start=positions.get(name), stop=stop) for name in names]
        self._records: RecordFile | None = None
        self._n_lines_before = self._n_stored = 0
        self._n_lines_saved = 0
        self._began: float | None = None
        self._pending: list[Pending] = []
        self._n_readings = 0  # of the pending lines
        self.mode = self.config.score
        self._resume(records)

    def _open_store(self, store: str | os.PathLike[str] | None) -> SqlStore | None:
        if store is None:
            return None
        if os.fspath(store) == "temporary":
            self._folder = tempfile.TemporaryDirectory(prefix="memstream-")
            store = Path(self._folder.name) / "replay.db"
        return SqlStore.open(store)

    def _resume(self, records: str | os.PathLike[str] | None) -> None:
        """Takes up the state of an earlier run, if there is one."""
        state = self._checkpoint.state if self._checkpoint else None
        if state is not None:
            assert self._checkpoint is not None
            self._checkpoint.check(self._settings())
            self._judge.restore(state["judge"])
            if state["cache"]:
                self._readers.restore(self._checkpoint.cache_path(state["cache"]))
            if self._memory is not None and state["memory"] is not None:
                self._memory.restore(state["memory"])
            self._n_lines_before, self._n_stored = state["n_lines"], state["n_stored"]
            self._n_lines_saved = self._n_lines_before
        if records is not None:
            self._records = RecordFile(Path(records), state["records_bytes"] if state else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes files and the store, and removes a temporary one."""
        if self._records is not None:
            self._records.close()
        if self._store is not None:
            self._store.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __iter__(self) -> Iterator[Event]:
        if self._began is not None:
            raise ReplayError("a log is replayed once; make another Replay to read it again")
        self._began = time.monotonic()
        return self._events()

    def ask(self, question: str, *, limit: int = 5) -> Answer:
        """Searches the stored lines, at most ``limit`` groups of alike ones.

        Raises:
            ConfigError: no store was given.
        """
        if self._memory is None:
            raise ConfigError("no lines were kept to search in; give a store, or store='temporary'")
        return self._memory.search(question, limit=limit)

    def frequent_templates(self, n: int) -> list[tuple[int, str, int]]:
        """Number, text and lines of the templates with the most lines."""
        return self._judge.frequent_templates(n)

    @property
    def n_lines(self) -> int:
        """Lines read, those of earlier runs on the same state included."""
        return self._n_lines_before + sum(stream.n_lines for stream in self._streams)

    def summary(self) -> Summary:
        """Accounts for every line read so far."""
        scorer = self._readers.scorer
        path = None if self._store is None or self._folder is not None else str(self._store.path or "memory")
        running_s = 0.0 if self._began is None else time.monotonic() - self._began - self._readers.loading_s
        counts: dict[str, Any] = self._judge.counts()
        return Summary(
            lines=self.n_lines,
            unfinished=self.n_lines - self._judge.n_lines,
            **counts,
            stored=self._n_stored,
            store=path,
            mode=self.mode,
            tokens=0 if scorer is None else scorer.n_tokens,
            evicted=0 if scorer is None else scorer.n_evicted,
            cache_bytes_start=self._readers.cache_bytes_start,
            cache_bytes_end=0 if scorer is None else scorer.cache_bytes,
            lag_bytes=sum(stream.lag_bytes for stream in self._streams),
            seconds=max(0.0, running_s),
            incidents=self._judge.most_repeated(),
        )

    def _events(self) -> Iterator[Event]:
        try:
            if self._checkpoint is not None and self._checkpoint.state is None:
                self._save(at_least=0)  # so that a file that is rotated before the first lines are judged is found
            for stream, event in events(self._streams, follow=self.config.follow):
                if isinstance(event, Line):
                    pending = self._judge.take(event, self.mode)
                    self._n_readings += pending.reading is not None
                    self._pending.append(pending)
                elif isinstance(event, StreamNote):
                    yield from self._work_off()
                    yield self._told(Note(kind=event.kind, stream=event.stream, text=event.text))
                if self._is_due(idle=event is None):
                    yield from self._work_off()
                    yield from self._change_mode(stream)
                    self._save(at_least=self.config.checkpoint_lines if event is not None else 1)
            yield from self._work_off()
            self._save(at_least=0)
            yield self._told(self.summary())
        finally:
            if not self._pending:
                self._save(at_least=1)
            self._take_rest()
            self._keep()  # what was read before an interruption can be asked for, too

    def _take_rest(self) -> None:
        """Takes events that were being put together when the replay was interrupted."""
        rest = [line for stream in self._streams if (line := stream.flush()) is not None]
        self._pending += [self._judge.take(line, self.mode) for line in rest]

    def _is_due(self, *, idle: bool) -> bool:
        """True where the pending lines should be worked off: there are enough, or nothing more comes for now.

        The first lines to be pinned must come together.
        """
        if len(self._pending) >= BATCH_LINES:
            return True
        if self._readers.scorer is None and self._n_readings < self.config.sinks:
            return False
        return self._n_readings >= self.config.piece_lines or (idle and bool(self._pending))

    def _change_mode(self, stream: Stream) -> Iterator[Event]:
        """Under load the model reads lines of new templates only."""
        if not self.config.follow or self.config.score == "novel":
            return
        behind = stream.lag_bytes
        if self.mode == self.config.score and behind > STEP_DOWN_BYTES:
            self.mode = "novel"
        elif self.mode == "novel" and behind < STEP_UP_BYTES:
            self.mode = self.config.score
        else:
            return
        text = f"{behind} bytes behind the end of {stream.name}; the model reads {self.mode} lines from here on"
        yield self._told(Note(kind="mode.changed", stream=stream.name, text=text))

    def _work_off(self) -> Iterator[Event]:
        """Stores, scores and judges the pending lines, in order."""
        self._keep()
        done, self._pending, self._n_readings = self._pending, [], 0
        self._readers.understand(self._judge.not_understood(done))
        surprises = iter(self._readers.score([pending.reading for pending in done if pending.reading is not None]))
        for pending in done:
            surprise = next(surprises) if pending.reading is not None else None
            record, alerts = self._judge.judge(pending, surprise)
            if self._records is not None or self._sinks:
                self._told(record())
            for alert in alerts:
                yield self._told(alert)
        if done and self._on_progress:
            self._on_progress(self)

    def _told(self, event: Event) -> Event:
        """Hands an event to the sinks, and a record to its file."""
        if self._records is not None and isinstance(event, Record):
            self._records.write(event)
        for sink in self._sinks:
            sink(event)
        return event

    def _keep(self) -> None:
        """Stores the pending lines that are not stored yet."""
        lines = [pending for pending in self._pending if not pending.stored]
        if self._memory is None or not lines:
            return
        self._memory.add([(pending.line, pending.template) for pending in lines])
        self._n_stored += sum(pending.line.n_lines for pending in lines)
        for pending in lines:
            pending.stored = True

    def _save(self, *, at_least: int) -> None:
        """Saves progress, if enough lines have come since the last time; no line may be pending."""
        if self._checkpoint is None or self._judge.n_lines - self._n_lines_saved < at_least:
            return
        scorer = self._readers.scorer
        name = "" if scorer is None or scorer.n_tokens == 0 else f"cache-{scorer.n_tokens}.safetensors"
        if name and not self._checkpoint.cache_path(name).exists():
            self._readers.save(self._checkpoint.cache_path(name))
        state = {
            "settings": self._settings(),
            "judge": self._judge.state(),
            "cache": name,
            "memory": None if self._memory is None else self._memory.state(),
            "records_bytes": None if self._records is None else self._records.flush(),
            "n_lines": self._judge.n_lines,
            "n_stored": self._n_stored,
        }
        known = self._checkpoint.positions()
        known.update({stream.name: stream.position() for stream in self._streams})
        self._checkpoint.write(state, list(known.values()))
        self._n_lines_saved = self._judge.n_lines

    def _settings(self) -> dict[str, object]:
        """What must be the same for a resumed run to give what one run gives."""
        config = self.config
        names = ("format", "encoding", "score", "threshold", "burn_in_lines", "incident_lines", "incident_s")
        more = ("max_alerts_per_hour", "rates", "ignore_level", "max_templates", "max_event_lines", "max_line_bytes")
        return {"model": self._saved_model, **{name: getattr(config, name) for name in names + more}}
