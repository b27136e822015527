"""The replay: reader, normaliser, template miner, gate, scorer, decision; and beside it the memory of every line."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from memstream.config import CacheConfig, ReplayConfig
from memstream.errors import ConfigError, ReplayError
from memstream.memory.embedder import Embedder
from memstream.models import DEFAULT_MODEL
from memstream.replay.alerts import Decision, Incident
from memstream.replay.events import Alert, Answer, Event, IncidentCount, Summary
from memstream.replay.lines import LineMemory
from memstream.replay.normalise import Line, Normaliser
from memstream.replay.reader import check_readable, open_stream, read_lines
from memstream.replay.templates import Template, TemplateMiner
from memstream.stores.sql import SqlStore

if TYPE_CHECKING:  # torch is imported when the first line is scored, so that a wrong file name is told at once
    from memstream.models import LoadedModel
    from memstream.replay.scorer import Scorer

BATCH_LINES = 512  # most lines worked off, and stored in one transaction, at once

Source = str | os.PathLike[str]


@dataclass(slots=True)
class _Pending:
    """A line that was read and not judged yet; without a template where it has no message."""

    line: Line
    template: Template | None
    new: bool
    gated_in: bool
    stored: bool = False


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    scored: int = 0
    counted: int = 0
    empty: int = 0
    truncated: int = 0
    decode_errors: int = 0
    stored: int = 0


class Replay:
    """Reads a log once, in constant memory; iterating gives each ``Alert`` when it is due, at the end a ``Summary``.

    Args:
        source: a file, ``-`` for standard input, or several of them; gzip files are unpacked.
        model: an alias, a folder, a hub id, a ``.gguf`` file, or a model already loaded. It is loaded when the first
            line is to be scored.
        store: where every line is kept, for ``ask``: a file or ``sqlite:///FILE``; ``temporary``: a file that is
            removed by ``close``; None keeps none.
        config: how the log is read, scored and judged.
        cache: size of the key/value cache; None: the preset ``logs``.
        device: where the model runs.
        embedder: turns templates and questions into vectors; None takes the default one, if it is installed.
        on_progress: called after each batch with this object, whose ``summary()`` tells how far it is.

    Raises:
        ReplayError: a source is a folder, is missing, or may not be read.
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
        embedder: Embedder | None = None,
        on_progress: Callable[[Replay], None] | None = None,
    ) -> None:
        self._sources = [os.fspath(s) for s in ([source] if isinstance(source, (str, os.PathLike)) else source)]
        if not self._sources:
            raise ReplayError("no log was given; name a file, or - for standard input")
        for name in self._sources:
            check_readable(name)
        self.config = config or ReplayConfig()
        self._cache = cache or CacheConfig.preset("logs")
        self.config.pinned_line_tokens(self._cache)
        self._model, self._device = model, device
        self._on_progress = on_progress
        self._miner = TemplateMiner(self.config.max_templates)
        self._decision = Decision(
            share=self.config.quantile,
            burn_in_lines=self.config.burn_in_lines,
            incident_lines=self.config.incident_lines,
        )
        self._scorer: Scorer | None = None
        self._pending: list[_Pending] = []
        self._n_gated_in = 0  # of the pending lines
        self._counts = _Counts()
        self._cache_bytes_start = 0
        self._began: float | None = None
        self._loading_s = 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store = self._open_store(store)
        self._memory = None if self._store is None else LineMemory(self._store, embedder)

    def _open_store(self, store: str | os.PathLike[str] | None) -> SqlStore | None:
        if store is None:
            return None
        if os.fspath(store) == "temporary":
            self._folder = tempfile.TemporaryDirectory(prefix="memstream-")
            store = Path(self._folder.name) / "replay.db"
        return SqlStore.open(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the store, and removes a temporary one."""
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

    def summary(self) -> Summary:
        """Accounts for every line read so far."""
        counts, decision, scorer = self._counts, self._decision, self._scorer
        return Summary(
            lines=counts.lines,
            scored=counts.scored,
            counted=counts.counted,
            empty=counts.empty,
            unfinished=counts.lines - counts.scored - counts.counted - counts.empty,
            truncated=counts.truncated,
            decode_errors=counts.decode_errors,
            templates=len(self._miner),
            alerts=decision.n_alerts,
            held_back=decision.n_held_back,
            repeats=decision.n_repeats,
            stored=counts.stored,
            store=None if self._store is None or self._folder is not None else str(self._store.path or "memory"),
            mode=self.config.score,
            tokens=0 if scorer is None else scorer.n_tokens,
            evicted=0 if scorer is None else scorer.n_evicted,
            cache_bytes_start=self._cache_bytes_start,
            cache_bytes_end=0 if scorer is None else scorer.cache_bytes,
            seconds=0.0 if self._began is None else time.monotonic() - self._began - self._loading_s,
            incidents=tuple(_count(incident) for incident in decision.most_repeated()),
        )

    def _events(self) -> Iterator[Event]:
        try:
            for name in self._sources:
                normalise = Normaliser(self.config.format)
                with open_stream(name) as stream:
                    for raw in read_lines(stream, name, max_line_bytes=self.config.max_line_bytes):
                        if raw is not None:
                            self._take(normalise(raw))
                        if self._is_due(idle=raw is None):
                            yield from self._work_off()
            yield from self._work_off()
            yield self.summary()
        finally:
            self._keep()  # what was read before an interruption can be asked for, too

    def _take(self, line: Line) -> None:
        """Counts a line and finds its template."""
        self._counts.lines += 1
        self._counts.truncated += line.truncated
        self._counts.decode_errors += line.decode_errors
        if not line.message:
            self._pending.append(_Pending(line, None, False, False))
            return
        template, new = self._miner.add(line.message)
        gated_in = new or self.config.score == "all"
        self._n_gated_in += gated_in
        self._pending.append(_Pending(line, template, new, gated_in))

    def _is_due(self, *, idle: bool) -> bool:
        """True where the pending lines should be worked off: there are enough, or nothing more comes for now.

        The first lines to be pinned must come together.
        """
        if len(self._pending) >= BATCH_LINES:
            return True
        if self._scorer is None and self._n_gated_in < self.config.sinks:
            return False
        return self._n_gated_in >= self.config.piece_lines or (idle and bool(self._pending))

    def _work_off(self) -> Iterator[Event]:
        """Stores, scores and judges the pending lines, in order."""
        self._keep()
        messages = [pending.line.message for pending in self._pending if pending.gated_in]
        scores = self._find_scorer().score(messages) if messages else iter(())
        done, self._pending, self._n_gated_in = self._pending, [], 0
        for pending in done:
            score = next(scores) if pending.gated_in else None
            if pending.template is None:
                self._counts.empty += 1
                continue
            if pending.gated_in:
                self._counts.scored += 1
            else:
                self._counts.counted += 1
            threshold = self._decision.threshold
            verdict, incident = self._decision.judge(pending.line, pending.template, score, new=pending.new)
            if verdict == "alert":
                assert incident is not None
                yield self._alert(incident, threshold)
        if done and self._on_progress:
            self._on_progress(self)

    def _keep(self) -> None:
        """Stores the pending lines that are not stored yet."""
        lines = [pending for pending in self._pending if not pending.stored]
        if self._memory is None or not lines:
            return
        self._memory.add([(pending.line, pending.template) for pending in lines])
        self._counts.stored += len(lines)
        for pending in lines:
            pending.stored = True

    def _find_scorer(self) -> Scorer:
        if self._scorer is None:
            from memstream.models import load_model
            from memstream.replay.scorer import Scorer

            began = time.monotonic()
            loaded = load_model(self._model, device=self._device) if isinstance(self._model, str) else self._model
            self._scorer = Scorer(loaded, self.config, self._cache)
            self._cache_bytes_start = self._scorer.cache_bytes
            self._loading_s = time.monotonic() - began
        return self._scorer

    def _alert(self, incident: Incident, threshold: float) -> Alert:
        line = incident.line
        return Alert(
            incident=incident.id,
            stream=line.stream,
            line=line.number,
            time=line.time,
            level=line.level,
            score=round(incident.score, 4),
            threshold=threshold,
            mode=self.config.score,
            template=incident.template,
            message=line.message,
            text=line.text,
        )


def _count(incident: Incident) -> IncidentCount:
    return IncidentCount(
        incident=incident.id,
        template=incident.template,
        stream=incident.line.stream,
        line=incident.line.number,
        repeats=incident.n_repeats,
    )
