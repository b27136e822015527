"""What a replay tells: plain data. ``type`` tells the records apart in JSON Lines (docs/replay.md)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from memstream.config import ScoreMode
from memstream.stores.lines import StoredLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A line worth looking at.

    Attributes:
        incident: its number, from 1; later lines of the same template are counted there.
        stream: path as given, or ``-``.
        line: number of the line, from 1, within its stream.
        time: UTC, where the line tells it.
        level: severity as written, where the line tells it.
        score: mean negative log-likelihood of its tokens, nats.
        threshold: what the score exceeded.
        mode: which lines were scored.
        template: what the line has in common with others.
        message: the part that was scored, without the header.
        text: the whole line, cleaned, without a label.
    """

    type: Literal["alert"] = "alert"
    incident: int
    stream: str
    line: int
    time: datetime | None
    level: str | None
    score: float
    threshold: float
    mode: ScoreMode
    template: str
    message: str
    text: str


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
    """What became of every line: ``lines = scored + counted + empty + unfinished``.

    Attributes:
        lines: lines read.
        scored: lines the model scored.
        counted: lines of known templates, which the mode ``novel`` does not score.
        empty: lines without a message.
        unfinished: lines read but not judged, because the replay was interrupted or failed.
        truncated: lines longer than the cap, scored by their beginning; part of the above.
        decode_errors: bytes that are not UTF-8, written as ``\\xNN``.
        templates: templates known at the end.
        alerts: alerts given.
        held_back: lines above the threshold that did not alert, because they belong to an open incident or follow
            right upon another line above it.
        repeats: lines counted into open incidents, whatever their score.
        stored: lines written to the store.
        store: where they were written; None: nowhere.
        mode: which lines were scored.
        tokens: tokens computed.
        evicted: lines that have left the window.
        cache_bytes_start: bytes of the key/value cache at the beginning; 0 where no line was scored.
        cache_bytes_end: the same at the end.
        seconds: from opening the source to now, the time to load the model left out.
        incidents: the ten with the most repeats.
    """

    type: Literal["summary"] = "summary"
    lines: int
    scored: int
    counted: int
    empty: int
    unfinished: int
    truncated: int
    decode_errors: int
    templates: int
    alerts: int
    held_back: int
    repeats: int
    stored: int
    store: str | None
    mode: ScoreMode
    tokens: int
    evicted: int
    cache_bytes_start: int
    cache_bytes_end: int
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


Event = Alert | Summary
