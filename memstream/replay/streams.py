"""The sources of a replay: files, pipes and packed files, each with its own splitting of lines, in turn."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memstream.errors import ReplayError
from memstream.replay.assemble import Assembler
from memstream.replay.config import ReplayConfig
from memstream.replay.follow import FollowedFile, Position, StreamNote, beginning
from memstream.replay.normalise import Line, Normaliser
from memstream.replay.reader import RawLine, is_plain, is_wide, open_stream, read_lines


class Stream:
    """One source, as events: lines, or several lines that belong together.

    Args:
        name: path, or ``-``.
        config: how it is read.
        start: where an earlier run stopped.
        stop: asked at the end of a followed file; True ends following.
    """

    def __init__(
        self, name: str, config: ReplayConfig, *, start: Position | None = None, stop: Callable[[], bool]
    ) -> None:
        self.name = name
        self.n_lines = 0  # read, since this run began
        self._config, self._start, self._stop = config, start, stop
        self._normalise = Normaliser(config.format, "utf-8" if is_wide(config.encoding) else config.encoding)
        self._assembler = Assembler(max_lines=config.max_event_lines, max_bytes=config.max_line_bytes)
        self._held: Line | None = None  # the first line of the event that is being put together
        self._file: FollowedFile | None = None
        self._told_binary = False
        self._last = (start.offset, start.number) if start else (0, 0)  # after the last line: offset, number

    def events(self) -> Iterator[Line | StreamNote | None]:
        """Yields events and notes in order, and None where there is nothing to read for now."""
        for raw in self._raw():
            if raw is None or isinstance(raw, StreamNote):
                yield from self._flush()
                if raw is not None:
                    self._last = 0, self._last[1]  # of another file, or of the same one from its beginning
                yield raw
                continue
            if raw.rest and not raw.data:
                continue  # the end of a line that was taken without it
            self.n_lines += not raw.rest
            self._last = raw.end, raw.number
            line = self._normalise(raw)
            done = self._assembler.add(line)
            if done is not None or self._held is None:
                self._held = line
            if done is not None:
                yield done
            if self._normalise.is_binary and not self._told_binary:
                self._told_binary = True
                text = (
                    f"{self.name} holds binary data from about line {raw.number} on; such lines are taken for one "
                    "template. If it is text, name its --encoding"
                )
                yield StreamNote("stream.binary", self.name, text)
        yield from self._flush()

    def _flush(self) -> Iterator[Line]:
        if (done := self.flush()) is not None:
            yield done

    def flush(self) -> Line | None:
        """The event that is being put together, as it is; ``position`` is behind it from then on."""
        self._held = None
        return self._assembler.flush()

    def _raw(self) -> Iterator[RawLine | StreamNote | None]:
        config = self._config
        if self._is_followed():
            self._file = FollowedFile(
                self.name,
                max_line_bytes=config.max_line_bytes,
                follow=config.follow,
                idle_s=config.idle_s,
                start=self._start,
                stop=self._stop,
            )
            for raw in self._file.read():
                if isinstance(raw, RawLine) and raw.offset == 0 and raw.data.startswith(codecs.BOM_UTF8):
                    raw = replace(raw, data=raw.data.removeprefix(codecs.BOM_UTF8))
                yield raw
            return
        if config.follow and self.name != "-" and Path(self.name).is_file():
            raise ReplayError(f"{self.name} cannot be followed: it is packed, or its characters are wider than a byte")
        skip = self._start.number if self._start and self.name != "-" else 0
        with open_stream(self.name) as stream:
            for line in read_lines(stream, self.name, max_line_bytes=config.max_line_bytes, encoding=config.encoding):
                if line is None or line.number > skip:
                    yield line

    def _is_followed(self) -> bool:
        """True for a file in which offsets are those of its lines."""
        return self.name != "-" and not is_wide(self._config.encoding) and is_plain(self.name)

    def position(self) -> Position:
        """Where the next run should go on: after the last event that was yielded."""
        offset, number = self._last
        if self._held is not None:
            offset, number = self._held.offset, self._held.number - 1
        if self._file is None:
            if number == 0 and self._is_followed():
                return beginning(self.name)
            return self._start or Position(self.name, 0, 0, "", 0, offset, number)
        return replace(self._file.position(), offset=offset, number=number)

    @property
    def lag_bytes(self) -> int:
        """Bytes of a file that were not read yet."""
        return self._file.lag_bytes if self._file else 0


def events(streams: Sequence[Stream], *, follow: bool) -> Iterator[tuple[Stream, Line | StreamNote | None]]:
    """All events: of one stream after the other, or, where they are followed, of whichever has some."""
    if not follow:
        for stream in streams:
            for event in stream.events():
                yield stream, event
        return
    running: Mapping[Stream, Iterator[Line | StreamNote | None]] = {stream: stream.events() for stream in streams}
    while running:
        ended = []
        for stream, waiting in running.items():
            for event in waiting:
                yield stream, event
                if event is None:
                    break
            else:
                ended.append(stream)
        running = {stream: waiting for stream, waiting in running.items() if stream not in ended}
