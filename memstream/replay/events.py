"""What a replay tells: plain data. ``type`` tells the records apart in JSON Lines (docs/replay.md, schema.json)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from memstream.stores.lines import StoredLine


@dataclass(frozen=True, slots=True, kw_only=True)
class PastIncident:
    """An earlier incident like a new one: its number, how much they share (0 to 1), and where it began."""

    incident: int
    similarity: float
    message: str
    stream: str
    line: int
    time: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A line worth looking at, or a template whose rate changed.

    Attributes:
        incident: its number, from 1; later lines of the same template are counted there.
        reason: ``score``: the line stands out; ``rate``: its template comes far more often than it did; ``silence``:
            lines of the template have stopped.
        stream: path as given, or ``-``.
        line: number of the line, from 1, within its stream.
        offset: of its first byte in the stream, unpacked.
        time: UTC, where the line tells it.
        level: severity as written, where the line tells it.
        severity: its OpenTelemetry severity number; None where the line states none.
        score: what is compared with the threshold; for ``rate`` and ``silence`` the lines that came in a bucket.
        threshold: what the score exceeded; for ``rate`` and ``silence`` the lines that were to be expected.
        surprise: nats per token; None for a line that the model did not read.
        novelty: nats; None for ``rate`` and ``silence``.
        meaning: how much its template reads like a failure.
        mode: which lines the model was reading at that time.
        template: what the line has in common with others.
        message: the part that was scored, without the header.
        text: the whole line, cleaned, without a label.
        past: the most similar incidents before.
    """

    type: Literal["alert"] = "alert"
    incident: int
    reason: Literal["score", "rate", "silence"]
    stream: str
    line: int
    offset: int
    time: datetime | None
    level: str | None
    severity: int | None
    score: float
    threshold: float
    surprise: float | None
    novelty: float | None
    meaning: float | None
    mode: str
    template: str
    message: str
    text: str
    past: tuple[PastIncident, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that happened to a stream.

    ``stream.truncated``, ``stream.rotated``, ``stream.lost``, ``stream.binary``, or ``mode.changed``, where the model
    reads fewer lines under load, or all again.
    """

    type: Literal["note"] = "note"
    kind: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was found out about one line, or about lines that belong together.

    Attributes:
        stream: where it came from.
        line: number of its first line.
        lines: how many lines it is; 0 for the rest of a line that was taken before its end was there.
        offset: of its first byte.
        time: UTC, where it tells it.
        severity: OpenTelemetry severity number, where it tells it.
        template: number of its template; None for a line without a message, which has no scores either.
        surprise: nats per token; None for a line that the model did not read.
        novelty: nats.
        meaning: how much its template reads like a failure.
        score: what decisions are made on.
        threshold: what it was compared with.
        verdict: ``quiet``, ``alert`` or ``held_back``.
        incident: number of the incident it belongs to.
        mode: which lines the model was reading.
        truncated: longer than the cap.
        length: of its first line in bytes, those beyond the cap included.
        digest: of a truncated line, a hash of all its bytes; else empty.
        partial: its end was not there yet.
    """

    type: Literal["record"] = "record"
    stream: str
    line: int
    lines: int
    offset: int
    time: datetime | None
    severity: int | None
    template: int | None
    surprise: float | None
    novelty: float | None
    meaning: float | None
    score: float | None
    threshold: float | None
    verdict: str
    incident: int | None
    mode: str
    truncated: bool
    length: int
    digest: str
    partial: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCount:
    """How often lines like one that alerted came again: the incident's number, template and first line."""

    incident: int
    template: str
    stream: str
    line: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of every line: ``lines = scored + counted + joined + empty + unfinished``.

    Attributes:
        lines: lines read.
        scored: events the model read.
        counted: events of known templates, which the model did not read.
        joined: lines that belong to the event before them.
        empty: lines without a message.
        unfinished: lines read but not judged, because the replay was interrupted or failed.
        truncated: lines longer than the cap, scored by their beginning; part of the above.
        decode_errors: bytes that could not be decoded, written as ``\\xNN``.
        templates: templates known at the end.
        alerts: alerts given.
        held_back: lines above the threshold that did not alert, because they belong to an open incident, or the hour
            has had its alerts.
        limited: of those, the ones that the limit of alerts per hour held back.
        repeats: lines counted into open incidents, whatever their score.
        stored: lines written to the store.
        store: where they were written; None: nowhere.
        mode: which lines the model reads.
        tokens: tokens computed.
        evicted: lines that have left the window.
        cache_bytes_start: bytes of the key/value cache at the beginning; 0 where no line was scored.
        cache_bytes_end: the same at the end.
        lag_bytes: of a followed file, bytes that were not read yet.
        seconds: from opening the source to now, the time to load the models left out.
        incidents: the ten with the most repeats.
    """

    type: Literal["summary"] = "summary"
    lines: int
    scored: int
    counted: int
    joined: int
    empty: int
    unfinished: int
    truncated: int
    decode_errors: int
    templates: int
    alerts: int
    held_back: int
    limited: int
    repeats: int
    stored: int
    store: str | None
    mode: str
    tokens: int
    evicted: int
    cache_bytes_start: int
    cache_bytes_end: int
    lag_bytes: int
    seconds: float
    incidents: tuple[IncidentCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Lines of one template that answer a question.

    Attributes:
        template: what they have in common.
        score: how well the template fits, 0 to 2: words plus meaning.
        count: how many lines.
        first: the first of them.
        last: the last of them.
        lines: the first few of them.
    """

    template: str
    score: float
    count: int
    first: StoredLine
    last: StoredLine
    lines: tuple[StoredLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the stored lines hold about a question: search results, never a sentence of the model's.

    Attributes:
        question: as asked.
        found: groups of lines, best first.
        required: words that every line found holds, because they tell lines of one template apart.
        ignored: words of the question that are in no line, or not together with the others.
        searched: how many stored lines were searched.
    """

    type: Literal["answer"] = "answer"
    question: str
    found: tuple[Found, ...]
    required: tuple[str, ...]
    ignored: tuple[str, ...]
    searched: int


Event = Alert | Note | Record | Summary
