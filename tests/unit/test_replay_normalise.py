"""Headers, labels and masks."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from memstream.replay.config import LogFormat
from memstream.replay.normalise import BINARY, Line, Normaliser, mask
from memstream.replay.reader import RawLine

HEADER = "1117838570 2005.06.03 R02-M1-N0-C:J12-U11 2005-06-03-15.42.50.675872 R02-M1-N0-C:J12-U11 RAS KERNEL INFO"
MESSAGE = "instruction cache parity error corrected"


def split(*texts: str, format: LogFormat = "auto") -> list[Line]:
    normalise = Normaliser(format)
    return [normalise(RawLine("x", i, text.encode())) for i, text in enumerate(texts, 1)]


@pytest.mark.parametrize("format", ["auto", "bgl"])
@pytest.mark.parametrize("label", ["-", "KERNDTLB", ""])
def test_a_bgl_line_is_split_and_its_label_dropped(format: LogFormat, label: str) -> None:
    line = split(f"{label} {HEADER} {MESSAGE}", format=format)[0]
    assert line.message == MESSAGE
    assert line.text == f"{HEADER} {MESSAGE}"
    assert (line.level, line.host) == ("INFO", "R02-M1-N0-C:J12-U11")
    assert line.time == datetime(2005, 6, 3, 22, 42, 50, 675872, UTC)  # date -u -d @1117838570


def test_damaged_lines_of_a_bgl_stream_lose_their_label_too() -> None:
    first, second, third = split(f"- {HEADER} {MESSAGE}", "KERNDTLB 1117838570 cut off", "APPSEV")
    assert first.level == "INFO"
    assert (second.message, second.text, second.level) == ("1117838570 cut off",) * 2 + (None,)
    assert (third.message, third.text) == ("", "")


def test_a_bgl_line_without_message() -> None:
    line = split(f"- {HEADER}")[0]
    assert (line.message, line.level) == ("", "INFO")


def test_raw_keeps_everything_in_the_message() -> None:
    text = f"- {HEADER} {MESSAGE}"
    line = split(text, format="raw")[0]
    assert (line.message, line.text, line.time, line.level) == (text, text, None, None)


def test_auto_leaves_other_lines_alone() -> None:
    assert [line.message for line in split("disk sda failed", " two  words ")] == ["disk sda failed", "two  words"]


def test_bad_bytes_are_counted() -> None:
    line = Normaliser("auto")(RawLine("x", 1, b"a\xff b", truncated=True))
    assert (line.message, line.decode_errors, line.truncated) == ("a\\xff b", 1, True)


@pytest.mark.parametrize(
    ("message", "masked"),
    [
        ("generating core.2275", "generating core.<*>"),
        ("socket to 172.16.96.116:33399, gone", "socket to <*>, gone"),
        ("at 0x0b85eee0, mask 0x05", "at <*>, mask <*>"),
        ("fpr29=0xffffffff ffffffff 00000000", "fpr<*>=<*> <*> <*>"),
        ("mac 00:0D:60:E9:1D:DC up", "mac <*> up"),
        ("took 1,234.5 ms", "took <*> ms"),
        ("defaced cabbage facade", "defaced cabbage facade"),
        ("no number", "no number"),
    ],
)
def test_mask(message: str, masked: str) -> None:
    assert mask(message) == masked


def test_lines_that_are_no_text_are_one_template() -> None:
    normalise = Normaliser("auto")
    assert normalise(RawLine("x", 1, b"caf\xe9 closed for today")).message == "caf\\xe9 closed for today"
    assert normalise(RawLine("x", 2, b"\xff\xfe\x80a\xff\xfe\x80a")).message == BINARY
    assert normalise(RawLine("x", 3, b"plain")).message == "plain"
    for i in range(20):
        normalise(RawLine("x", i, b"\xff\xfe\x80a\xff\xfe\x80a"))
    assert normalise.is_binary
    assert normalise(RawLine("x", 24, b"plain")).message == BINARY
    for i in range(20):
        normalise(RawLine("x", i, b"plain"))
    assert normalise(RawLine("x", 45, b"plain")).message == "plain"
