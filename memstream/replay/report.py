"""Draws a replay as one HTML page that needs no network and no script: inline SVG, every text of the log escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from memstream.errors import ReplayError
from memstream.replay.events import Alert, Summary
from memstream.replay.history import MOST_ALERTS, Bucket, History
from memstream.report import shown

_W, _H = 1000, 180
_LEFT, _BOTTOM = 56, 22
_CARDS = 60
_ROWS = 15
# Severity number from which on, name, colour.
_LEVELS = ((0, "not stated", "#c8ccd4"), (1, "debug", "#b7d3e8"), (9, "info", "#7fb0d6"), (13, "warning", "#e8b84a"),
           (17, "error", "#d9703c"), (21, "fatal", "#a8201a"))  # fmt: skip

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2330; background: #f6f7f9; margin: 0 }
main { max-width: 1080px; margin: 0 auto; padding: 24px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 17px; margin: 28px 0 6px }
p.note { color: #566; margin: 0 0 8px }
section.plot, .card, .facts { background: #fff; border: 1px solid #e1e4ea; border-radius: 8px; padding: 12px 14px }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 10px; margin-top: 14px }
.facts b { display: block; font-size: 20px } .facts span { color: #566; font-size: 13px }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: #566 }
.card { margin: 8px 0 } .card pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0; font-size: 13px;
max-height: 10em; overflow: auto; background: #f6f7f9; padding: 8px; border-radius: 6px }
.card .why { color: #566; font-size: 13px } .tag { display: inline-block; border-radius: 4px; padding: 0 6px;
font-size: 12px; color: #fff; background: #7a8494 } .key i { display: inline-block; width: 10px; height: 10px;
border-radius: 2px; margin: 0 4px 0 12px } table { border-collapse: collapse; font-size: 13px; width: 100% }
td, th { text-align: left; padding: 3px 8px; border-bottom: 1px solid #eceef2; vertical-align: top;
overflow-wrap: anywhere }
"""


def write_report(path: Path, history: History, names: Mapping[int, str], title: str) -> None:
    """Writes the page.

    Args:
        path: of the file, written anew.
        history: what happened; its summary must be there.
        names: texts of templates by number.
        title: what was read.

    Raises:
        ReplayError: the file cannot be written.
    """
    try:
        path.write_text(page(history, names, title), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReplayError(f"cannot write the report {path}: {error.strerror}") from error


def page(history: History, names: Mapping[int, str], title: str) -> str:
    """The whole page."""
    summary, buckets = history.summary, history.buckets
    assert summary is not None
    plots = [
        ("What stood out", "The highest score of each stretch of the log, the threshold it was compared with (dashed), "
         "and alerts (red). A score is how rare lines like this have been or how severe they say they are, shifted by "
         "how much they read like a failure; in nats.", _scores(buckets)),
        ("Lines by level", _key(), _levels(buckets)),
        ("Templates over time", "The most frequent kinds of lines; darker means more lines in that stretch.",
         _heat(buckets, names)),
        ("Memory", f"Resident memory of the process. The model's cache has {summary.cache_bytes_end / 2**20:.1f} MiB "
         f"{'from beginning to end' if summary.cache_bytes_start == summary.cache_bytes_end else ''}.",
         _memory(buckets)),
    ]  # fmt: skip
    drawn = "".join(
        f'<h2>{name}</h2><p class="note">{note}</p><section class="plot">{svg}</section>' for name, note, svg in plots
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
        f"<h1>{_text(title)}</h1>{_lead(history, summary)}{_facts(summary)}{drawn}"
        f"{_cards(history, summary)}{_notes(history)}</main></body></html>"
    )


def _text(text: str) -> str:
    return escape(shown(text))


def _lead(history: History, summary: Summary) -> str:
    times = [bucket.first_time for bucket in history.buckets if bucket.first_time]
    span = f", from {_time(min(times))} to {_time(max(times))}" if times else ""
    quiet = "Nothing stood out." if not history.n_alerts else f"{history.n_alerts} alerts."
    return f'<p class="note">{summary.lines:,} lines{span}. {quiet}</p>'


def _facts(summary: Summary) -> str:
    facts = [
        (f"{summary.lines:,}", "lines"),
        (f"{summary.templates:,}", "kinds of lines (templates)"),
        (f"{summary.alerts:,}", "alerts"),
        (f"{summary.repeats:,}", "repeats counted into incidents"),
        (f"{summary.held_back:,}", "held back"),
        (f"{summary.lines / summary.seconds if summary.seconds else 0:,.0f}", "lines per second"),
        (_text(summary.mode), "lines that the model reads"),
        (f"{summary.truncated:,} / {summary.decode_errors:,}", "lines cut / bytes not decoded"),
    ]
    return (
        '<div class="facts">'
        + "".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in facts)
        + "</div>"
    )


def _frame(low: float, high: float, unit: str, buckets: Sequence[Bucket], inner: str) -> str:
    """A plot with its axes: the value axis from low to high, the lines of the log below."""
    marks = []
    for i in range(5):
        value = low + (high - low) * i / 4
        y = _y(value, low, high)
        marks.append(f'<line x1="{_LEFT}" x2="{_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceef2"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    total = sum(bucket.n_lines for bucket in buckets)
    for i in range(6):
        x = _LEFT + (_W - _LEFT) * i / 5
        anchor = "end" if i == 5 else "start" if i == 0 else "middle"
        marks.append(f'<text x="{x:.0f}" y="{_H + 16}" text-anchor="{anchor}">line {total * i // 5:,}</text>')
    marks.append(f'<text x="{_LEFT + 4}" y="10">{unit}</text>')
    return f'<svg viewBox="0 0 {_W} {_H + _BOTTOM}" role="img">{"".join(marks)}{inner}</svg>'


def _y(value: float, low: float, high: float) -> float:
    return _H - (_H - 14) * (value - low) / ((high - low) or 1.0)


def _step(buckets: Sequence[Bucket]) -> float:
    return (_W - _LEFT) / len(buckets)


def _curve(buckets: Sequence[Bucket], low: float, high: float, value: Callable[[Bucket], float | None]) -> str:
    step = _step(buckets)
    points = [(i, found) for i, bucket in enumerate(buckets) if (found := value(bucket)) is not None]
    return " ".join(f"{_LEFT + (i + 0.5) * step:.1f},{_y(found, low, high):.1f}" for i, found in points)


def _scores(buckets: Sequence[Bucket]) -> str:
    known = [value for b in buckets for value in (b.highest, b.threshold) if value is not None]
    low, high = min([0.0, *known]), max([1.0, *known])
    step = _step(buckets)
    inner = [
        f'<polyline fill="none" stroke="#4a7fb5" points="{_curve(buckets, low, high, lambda b: b.highest)}"/>',
        '<polyline fill="none" stroke="#1c2330" stroke-dasharray="5 4" '
        f'points="{_curve(buckets, low, high, lambda b: b.threshold)}"/>',
    ]
    for i, bucket in enumerate(buckets):
        if bucket.n_alerts and bucket.highest is not None:
            x, y = _LEFT + (i + 0.5) * step, _y(bucket.highest, low, high)
            title = f"<title>{bucket.n_alerts} alerts</title>"
            inner.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#c22">{title}</circle>')
    return _frame(low, high, "nats", buckets, "".join(inner))


def _level(number: int) -> int:
    return max(i for i, (least, _, _) in enumerate(_LEVELS) if number >= least)


def _key() -> str:
    return '<span class="key">' + "".join(f'<i style="background:{c}"></i>{n}' for _, n, c in _LEVELS) + "</span>"


def _levels(buckets: Sequence[Bucket]) -> str:
    stacks = [Counter[int]() for _ in buckets]
    for stack, bucket in zip(stacks, buckets, strict=True):
        for number, n in bucket.levels.items():
            stack[_level(number)] += n
    high = max([1, *(stack.total() for stack in stacks)])
    step, inner = _step(buckets), []
    for i, stack in enumerate(stacks):
        below = 0
        for level in sorted(stack, reverse=True):
            top, bottom = _y(below + stack[level], 0, high), _y(below, 0, high)
            inner.append(
                f'<rect x="{_LEFT + i * step:.1f}" y="{top:.1f}" width="{max(0.8, step - 0.3):.1f}" '
                f'height="{bottom - top:.1f}" fill="{_LEVELS[level][2]}"/>'
            )
            below += stack[level]
    return _frame(0, high, "events", buckets, "".join(inner))


def _heat(buckets: Sequence[Bucket], names: Mapping[int, str]) -> str:
    total: Counter[int] = Counter()
    for bucket in buckets:
        total.update(bucket.templates)
    step, height, label = (_W - 380) / len(buckets), 18, 372
    inner = []
    for row, (template, n) in enumerate(total.most_common(_ROWS)):
        y = row * height
        name = names.get(template, f"template {template}")
        short = name if len(name) <= 52 else name[:51] + "…"
        inner.append(f'<text x="0" y="{y + 13}">{_text(short)}<title>{_text(name)}: {n} lines</title></text>')
        most = max(bucket.templates[template] for bucket in buckets)
        for i, bucket in enumerate(buckets):
            if share := bucket.templates[template] / most:
                inner.append(
                    f'<rect x="{label + i * step:.1f}" y="{y + 2}" width="{max(1.0, step):.1f}" height="{height - 4}" '
                    f'fill="#25557f" fill-opacity="{0.15 + 0.85 * share:.2f}"/>'
                )
    rows = max(1, min(_ROWS, len(total)))
    return f'<svg viewBox="0 0 {_W} {rows * height}" role="img">{"".join(inner)}</svg>'


def _memory(buckets: Sequence[Bucket]) -> str:
    known = [bucket.resident_bytes / 2**20 for bucket in buckets if bucket.resident_bytes]
    high = max([1.0, *known]) * 1.1
    curve = _curve(buckets, 0, high, lambda b: b.resident_bytes / 2**20 if b.resident_bytes else None)
    return _frame(0, high, "MiB", buckets, f'<polyline fill="none" stroke="#3b7d4f" points="{curve}"/>')


def _cards(history: History, summary: Summary) -> str:
    repeats = {incident.incident: incident.repeats for incident in summary.incidents}
    highest = sorted(history.alerts, key=lambda alert: -alert.score)[:_CARDS]
    parts = [f"<h2>Incidents, the highest scores first</h2>{_left_out(history, len(highest))}"]
    parts += [_card(alert, repeats.get(alert.incident)) for alert in highest]
    return "".join(parts) if history.alerts else "<h2>Incidents</h2><p>None.</p>"


def _left_out(history: History, n: int) -> str:
    if n == history.n_alerts:
        return ""
    kept = f"the first {MOST_ALERTS} of " if history.n_alerts > MOST_ALERTS else ""
    return f'<p class="note">{n} of {kept}{history.n_alerts} are shown.</p>'


def _card(alert: Alert, repeats: int | None) -> str:
    colour = _LEVELS[_level(alert.severity or 0)][2] if alert.severity else "#7a8494"
    level = f'<span class="tag" style="background:{colour}">{_text(alert.level)}</span> ' if alert.level else ""
    more = f", {repeats} more lines like it" if repeats else ""
    if alert.reason == "score":
        parts = [f"rare {alert.novelty:.1f}" if alert.novelty is not None else ""]
        parts.append(f"reads like a failure {alert.meaning:+.2f}" if alert.meaning is not None else "")
        parts.append(f"surprise {alert.surprise:.1f}" if alert.surprise is not None else "")
        why = f"score {alert.score:.1f} above {alert.threshold:.1f} ({', '.join(filter(None, parts))})"
    else:
        why = {"rate": "comes far more often than before", "silence": "has stopped coming"}[alert.reason]
    past = "; ".join(f"incident {p.incident}, line {p.line:,} ({p.similarity:.0%} alike)" for p in alert.past)
    before = f'<div class="why">Before: {past}</div>' if past else ""
    return (
        f'<div class="card">{level}<b>incident {alert.incident}</b> &middot; {_text(alert.stream)}:{alert.line:,} '
        f"{_time(alert.time) if alert.time else ''}{more}<pre>{_text(alert.text[:2000])}</pre>"
        f'<div class="why">{why}</div>{before}</div>'
    )


def _notes(history: History) -> str:
    if not history.notes:
        return ""
    rows = "".join(f"<tr><td>{_text(note.kind)}</td><td>{_text(note.text)}</td></tr>" for note in history.notes)
    return f"<h2>What happened to the streams</h2><table>{rows}</table>"


def _time(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S}Z"
