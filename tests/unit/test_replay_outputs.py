"""What a replay writes: webhook, metrics, report, schema, live view."""

from __future__ import annotations

import io
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memstream.cli._live import LiveView, sparkline
from memstream.errors import ConfigError, ReplayError
from memstream.replay import Alert, Note, PastIncident, Record, Summary
from memstream.replay.history import MOST_BUCKETS, History
from memstream.replay.incidents import PastIncidents
from memstream.replay.metrics import MetricsServer
from memstream.replay.rates import BUCKET_LINES, Rates
from memstream.replay.report import page
from memstream.replay.schema import schema
from memstream.replay.webhook import Webhook
from memstream.report import as_json

ROOT = Path(__file__).parents[2]
WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
EVIL = "<script>alert(1)</script> \x1b[31m"


def alert(**changed: Any) -> Alert:
    values: dict[str, Any] = {"incident": 1, "reason": "score", "stream": "a.log", "line": 7, "offset": 90}
    values |= {"time": WHEN, "level": "FATAL", "severity": 21, "score": 9.0, "threshold": 5.0, "surprise": None}
    values |= {"novelty": 4.0, "meaning": 0.5, "mode": "novel", "template": EVIL, "message": EVIL, "text": EVIL}
    past = PastIncident(incident=1, similarity=0.5, message=EVIL, stream="a.log", line=1, time=None)
    return Alert(**{**values, "past": (past,), **changed})


def record(line: int, **changed: Any) -> Record:
    values: dict[str, Any] = {"stream": "a.log", "line": line, "lines": 1, "offset": 0, "time": WHEN, "severity": 9}
    values |= {"template": line % 7, "surprise": None, "novelty": 1.0, "meaning": 0.1, "score": float(line % 10)}
    values |= {"threshold": 5.0, "verdict": "quiet", "incident": None, "mode": "novel"}
    return Record(**{**values, "truncated": False, "length": 9, "digest": "", "partial": False, **changed})


def summary() -> Summary:
    counts = dict.fromkeys(
        ("lines", "scored", "counted", "joined", "empty", "unfinished", "truncated", "decode_errors", "templates",
         "alerts", "held_back", "limited", "repeats", "stored", "tokens", "evicted", "cache_bytes_start",
         "cache_bytes_end", "lag_bytes"), 3,
    )  # fmt: skip
    return Summary(**counts, store=None, mode="novel", seconds=1.0, incidents=())  # type: ignore[arg-type]


# Webhook


@contextmanager
def receiver(statuses: Iterator[int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers with one status after the other, and what it was sent."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(next(statuses))
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_alert_is_posted_again_until_it_is_taken() -> None:
    with receiver(iter([500, 503, 200])) as (url, received):
        hook = Webhook(url, retry_s=0.01)
        hook(alert())
        hook(summary())
        hook.close()
    assert (len(received), hook.n_sent, hook.n_dropped) == (3, 1, 0)
    body = received[-1]
    assert (body["version"], body["status"]) == ("4", "firing")
    assert body["alerts"][0]["labels"] == {
        "alertname": "memstream.score",
        "stream": "a.log",
        "incident": "1",
        "severity": "fatal",
    }
    assert body["alerts"][0]["startsAt"] == "2026-03-04T05:06:07+00:00"


def test_a_dead_receiver_holds_nothing_up() -> None:
    hook = Webhook("http://127.0.0.1:9", waiting=2, retry_s=30)
    for i in range(50):
        hook(alert(incident=i))
    assert hook.n_dropped >= 47
    hook.close(wait_s=0.1)


def test_a_webhook_is_an_http_address() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        Webhook("file:///etc/passwd")


# Metrics


def test_metrics_are_numbers_without_text_of_the_log() -> None:
    with closing(MetricsServer(0, summary)) as server:
        server(alert())
        server(alert(reason="rate"))
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as response:
            text = response.read().decode()
        with pytest.raises(ReplayError, match="cannot serve metrics"):
            MetricsServer(server.port, summary)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples["memstream_replay_lines_total"] == "3"
    assert samples['memstream_replay_alerts_total{reason="score"}'] == "1"
    assert samples['memstream_replay_alerts_total{reason="silence"}'] == "0"
    assert "script" not in text


# Report


def history(n: int) -> History:
    kept = History()
    for line in range(1, n + 1):
        kept(record(line))
        if line % 1000 == 0:
            kept(alert(incident=line // 1000, line=line))
    kept(Note(kind="stream.rotated", stream="a.log", text=EVIL))
    kept(summary())
    return kept


def test_a_history_is_bounded_and_counts_every_line() -> None:
    kept = history(50_000)
    assert len(kept.buckets) <= MOST_BUCKETS
    assert sum(bucket.n_lines for bucket in kept.buckets) == 50_000
    assert sum(bucket.levels[9] for bucket in kept.buckets) == 50_000
    assert sum(bucket.templates.total() for bucket in kept.buckets) == 50_000
    assert sum(bucket.n_alerts for bucket in kept.buckets) == 50
    assert {bucket.highest for bucket in kept.buckets} == {9.0}


def test_a_report_needs_no_network_and_runs_nothing() -> None:
    text = page(history(3000), {1: EVIL}, EVIL)
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert "\x1b" not in text
    assert "http" not in text
    assert "src=" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_report_of_nothing() -> None:
    assert "Nothing stood out" in page(history(0), {}, "x")


# Schema


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads((ROOT / "docs" / "replay.schema.json").read_text()) == schema()


def fits(value: Any, rule: dict[str, Any]) -> bool:
    """What a validator does, for the few keywords that are used."""
    if "oneOf" in rule:
        return sum(fits(value, part) for part in rule["oneOf"]) == 1
    if "anyOf" in rule:
        return any(fits(value, part) for part in rule["anyOf"])
    if "enum" in rule:
        return value in rule["enum"]
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    if rule["type"] == "array":
        return isinstance(value, list) and all(fits(item, rule["items"]) for item in value)
    if rule["type"] == "object":
        return set(value) == set(rule["required"]) and all(fits(value[k], v) for k, v in rule["properties"].items())
    return isinstance(value, kinds[rule["type"]])


@pytest.mark.parametrize("event", [alert(), record(1), summary(), Note(kind="a", stream="b", text="c")])
def test_events_fit_the_schema(event: Any) -> None:
    told = json.loads(json.dumps(as_json(event)))
    assert fits(told, schema())
    assert not fits({**told, "more": 1}, schema())
    assert not fits({**told, "stream": 7, "store": 7}, schema())


# Live view


class Running:
    """A replay as the live view sees it."""

    n_lines = 12

    def summary(self) -> Summary:
        return summary()

    def frequent_templates(self, n: int) -> list[tuple[int, str, int]]:
        return [(1, EVIL, 12)]


def test_the_live_view_shows_no_escape_of_a_log() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    view = LiveView(console)
    view.sink(record(3))
    view.sink(alert())
    console.print(view.picture(Running()))  # type: ignore[arg-type]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a.log:7" in text
    assert "<script>" in text
    assert "\x1b[31m" not in text


def test_a_sparkline() -> None:
    from collections import deque

    assert sparkline(deque([0.0, 7.0, 3.5])) == "▁█▅"
    assert sparkline(deque([2.0, 2.0])) == "▁▁"
    assert sparkline(deque()) == ""


# Rates and past incidents


def test_a_template_that_comes_more_often_or_falls_silent() -> None:
    rates, found = Rates(), []
    for bucket in range(12):
        counts = {1: 900, 2: 100, 3: 0}
        if bucket == 8:
            counts = {1: 300, 2: 700, 3: 0}  # seven times as often
        if bucket == 10:
            counts = {1: 1000, 2: 0, 3: 0}
        assert sum(counts.values()) == BUCKET_LINES
        for template, n in counts.items():
            for _ in range(n):
                found += [(bucket, *change[:3], change.n_lines) for change in rates.add(template, f"t{template}")]
    assert found == [(8, 2, "t2", "rate", 700), (10, 2, "t2", "silence", 0)]


def test_rates_go_on_after_a_restart() -> None:
    whole, first = Rates(), Rates()
    lines = [i % 10 if i < 7000 else 1 for i in range(9000)]
    expected = [change for i in lines for change in whole.add(i, str(i))]
    found = [change for i in lines[:6500] for change in first.add(i, str(i))]
    second = Rates()
    second.restore(json.loads(json.dumps(first.state())))
    found += [change for i in lines[6500:] for change in second.add(i, str(i))]
    assert found == expected
    assert len(found) > 5


def test_past_incidents_are_found_by_the_words_they_share() -> None:
    past = PastIncidents(most=3)
    for i, text in enumerate(["gone", "disk sda1 failed on node 3", "link down", "disk sda is slow"], 1):
        past.add(i, text, stream="a", line=i * 10, time=WHEN)
    found = past.nearest("disk sdb2 failed on node 17")
    assert [(f.incident, f.similarity) for f in found] == [(2, round(4 / 6, 3))]  # of disk sda failed on node, and sdb
    assert past.nearest("gone") == ()  # the oldest has left
    again = PastIncidents(most=3)
    again.restore(json.loads(json.dumps(past.state())))
    assert again.nearest("link down") == past.nearest("link down")
    assert again.nearest("link down")[0].time == WHEN
