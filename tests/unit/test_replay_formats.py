"""How lines begin, and which lines belong together."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.replay.assemble import Assembler
from memstream.replay.config import LogFormat
from memstream.replay.formats import severity
from memstream.replay.normalise import Line, Normaliser
from memstream.replay.reader import RawLine

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def one(text: str, format: LogFormat = "auto") -> Line:
    return Normaliser(format)(RawLine("x", 1, text.encode()))


@pytest.mark.parametrize(
    ("text", "message", "level", "time"),
    [
        ("2026-03-04T05:06:07Z ERROR disk full", "disk full", "ERROR", WHEN),
        ("2026-03-04 05:06:07,000 - WARN  [main[x=1]/a:b@7] - disk full", "disk full", "WARN", WHEN),
        ("2026-03-04T07:06:07+02:00 [12] info db.pool: disk full", "disk full", "info", WHEN),
        ("26/03/04 05:06:07 INFO a.B$C: disk full: no", "disk full: no", "INFO", WHEN),
        ("260304 050607 148 WARN dfs.X: 10.0.0.1:50010:Got it", "10.0.0.1:50010:Got it", "WARN", WHEN),
        ("[Wed Mar 04 05:06:07 2026] [error] disk full", "disk full", "error", WHEN),
        ("2026-03-04 05:06:07 errors were found", "errors were found", None, WHEN),
        ("Mar  4 05:06:07 host sshd[12]: disk full", "disk full", None, None),
        ("<11>1 2026-03-04T05:06:07Z host app 12 - - disk full", "disk full", "ERR", WHEN),
        ("<11>Mar  4 05:06:07 host app: disk full", "disk full", "ERR", None),
        ('{"ts": 1772600767, "level": "error", "msg": "disk full"}', "disk full", "error", WHEN),
        ('{"time": "2026-03-04T05:06:07Z", "severity": "WARN", "message": "disk full"}', "disk full", "WARN", WHEN),
        ('{"a": 1}', '{"a": 1}', None, None),
        ("{no json", "{no json", None, None),
        ('time=2026-03-04T05:06:07Z level=warn msg="disk \\"a\\" full" n=3', 'disk "a" full', "warn", WHEN),
        ("a=b c=d", "a=b c=d", None, None),
        ("disk full", "disk full", None, None),
    ],
)
def test_auto(text: str, message: str, level: str | None, time: datetime | None) -> None:
    line = one(text)
    assert (line.message, line.level, line.time, line.text) == (message, level, time, text)


@pytest.mark.parametrize("format", ["json", "logfmt", "syslog", "raw"])
def test_a_named_format_tries_no_other(format: LogFormat) -> None:
    text = "2026-03-04T05:06:07Z ERROR disk full"
    assert one(text, format).message == text


@given(st.text(max_size=200), st.sampled_from(["auto", "json", "logfmt", "syslog", "bgl"]))
def test_no_text_is_too_strange(text: str, format: LogFormat) -> None:
    one(text.replace("\n", " "), format)


@pytest.mark.parametrize(
    ("level", "number"), [("INFO", 9), ("warn", 13), ("SEVERE", 17), ("FATAL", 21), ("purple", None), (None, None)]
)
def test_severity_numbers_are_opentelemetrys(level: str | None, number: int | None) -> None:
    assert severity(level) == number


def joined(*texts: str, max_lines: int = 50, max_bytes: int = 10_000) -> list[tuple[int, str, str]]:
    normalise, assembler = Normaliser("auto"), Assembler(max_lines=max_lines, max_bytes=max_bytes)
    found = [assembler.add(normalise(RawLine("x", i, text.encode()))) for i, text in enumerate(texts, 1)]
    return [(line.n_lines, line.message, line.text) for line in [*found, assembler.flush()] if line]


def test_a_java_trace_is_one_event() -> None:
    trace = [
        "2026-03-04 05:06:07 ERROR a.B: request failed",
        "java.io.IOException: reset",
        "    at a.B.c(B.java:1)",
        "Caused by: x.Y: gone",
        "    ... 3 more",
    ]
    (event, after) = joined(*trace, "2026-03-04 05:06:08 INFO a.B: ok")
    assert event == (5, "request failed java.io.IOException: reset", "\n".join(trace))
    assert after[:2] == (1, "ok")


def test_a_python_trace_is_one_event() -> None:
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()", "ValueError: no"]
    before, event, after = joined("start", *trace, "next line")
    assert event == (4, "Traceback (most recent call last): ValueError: no", "\n".join(trace))
    assert (before[1], after[1]) == ("start", "next line")


def test_lines_without_headers_stay_apart_unless_indented() -> None:
    assert [n for n, *_ in joined("a", "b", "  c", "d", "", "  e")] == [1, 2, 1, 1, 1]


def test_an_event_has_so_many_lines_and_bytes_at_most() -> None:
    assert [n for n, *_ in joined("a", *["  b"] * 9, max_lines=4)] == [4, 4, 2]
    assert [n for n, *_ in joined("a", *["  bbb"] * 5, max_bytes=14)] == [3, 2, 1]
