"""How ``memstream replay`` says things to people."""

from __future__ import annotations

from datetime import datetime

from memstream.replay import Alert, Answer, Found, Note, Summary
from memstream.report import shown
from memstream.stores.lines import StoredLine


def alert_in_words(alert: Alert) -> str:
    """Two or three lines: where and what, why, and what it is like."""
    what = " ".join(filter(None, (_time(alert.time), alert.level)))
    lines = [f"{shown(alert.stream)}:{alert.line}: {what + ': ' if what else ''}{shown(alert.message)}"]
    if alert.reason == "score":
        parts = f"novelty {alert.novelty:.2f}, meaning {alert.meaning:+.2f}"
        surprise = "" if alert.surprise is None else f", surprise {alert.surprise:.2f}"
        why = f"score {alert.score:.2f} above {alert.threshold:.2f} ({parts}{surprise})"
    else:
        why = {"rate": "comes far more often than it did", "silence": "has stopped coming"}[alert.reason]
    lines.append(f"    {why}, incident {alert.incident}, {alert.mode}")
    if alert.past:
        before = ", ".join(f"{p.incident} at line {p.line} ({p.similarity:.0%} alike)" for p in alert.past)
        lines.append(f"    before: incident {before}")
    return "\n".join(lines)


def note_in_words(note: Note) -> str:
    """One line."""
    return f"{note.kind}: {shown(note.text)}"


def summary_in_words(summary: Summary) -> str:
    """What became of every line."""
    parts = [
        f"{summary.scored} read by the model",
        f"{summary.counted} of known templates counted",
        f"{summary.joined} joined to the line before",
        f"{summary.empty} empty",
    ]
    if summary.unfinished:
        parts.append(f"{summary.unfinished} not judged")
    lines = [
        f"{summary.lines} lines in {summary.seconds:.1f} s ({summary.mode}): {', '.join(parts)}; "
        f"{summary.truncated} truncated, {summary.decode_errors} bytes not decoded",
        f"{summary.alerts} alerts, {summary.held_back} held back ({summary.limited} by the limit of alerts per hour), "
        f"{summary.repeats} repeats of open incidents; {summary.templates} templates",
        f"{summary.tokens} tokens; cache {summary.cache_bytes_start} bytes at the start, "
        f"{summary.cache_bytes_end} at the end",
    ]
    if summary.store:
        lines.append(f"{summary.stored} lines stored in {summary.store}")
    lines += [
        f"incident {incident.incident} ({shown(incident.stream)}:{incident.line}) came {incident.repeats} times more: "
        f"{shown(incident.template[:100])}"
        for incident in summary.incidents
        if incident.repeats
    ]
    return "\n".join(lines)


def answer_in_words(answer: Answer) -> str:
    """What was found, grouped by template."""
    if not answer.found:
        return f"nothing found in {answer.searched} lines"
    return "\n".join(line for found in answer.found for line in _found(found))


def _found(found: Found) -> list[str]:
    first = f"    first {_place(found.first)}, last {_place(found.last)}"
    return [f"{found.count} x {shown(found.template)}", first] + [
        f"    {_place(line)}: {shown(line.text)}" for line in found.lines
    ]


def _place(line: StoredLine) -> str:
    at_byte = "" if line.offset is None else f"byte {line.offset}"
    return " ".join(filter(None, (f"{shown(line.stream)}:{line.line}", at_byte, _time(line.time))))


def _time(when: datetime | None) -> str:
    return "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}Z"
