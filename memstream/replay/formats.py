"""How log lines begin: takes time, level, host and message out of a line, format by format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from memstream.replay.config import LogFormat


@dataclass(frozen=True, slots=True)
class Header:
    """A line, split: time (UTC; times without a zone are taken for UTC), level and host where it tells them."""

    message: str
    time: datetime | None = None
    level: str | None = None
    host: str | None = None


# OpenTelemetry severity numbers (logs data model, SeverityNumber) of the words that logs use.
_SEVERITY = {
    1: ("TRACE", "FINEST"),
    5: ("DEBUG", "FINE", "FINER", "VERBOSE"),
    9: ("INFO", "INFORMATION", "INFORMATIONAL", "I"),
    10: ("NOTICE",),
    13: ("WARN", "WARNING", "W"),
    17: ("ERROR", "ERR", "SEVERE", "FAILURE", "E"),
    18: ("CRIT", "CRITICAL"),
    19: ("ALERT",),
    21: ("FATAL", "EMERG", "EMERGENCY", "PANIC", "F"),
}
_NUMBER = {word: number for number, words in _SEVERITY.items() for word in words}
_SYSLOG_LEVELS = ("EMERG", "ALERT", "CRIT", "ERR", "WARNING", "NOTICE", "INFO", "DEBUG")
_LEVEL = "|".join(sorted((word for word in _NUMBER if len(word) > 1), key=len, reverse=True))

# Without its label: epoch second, date, node, local time with microseconds, node, type, component, level, message.
_BGL = re.compile(
    r"(?P<epoch>\d{9,10}) \d{4}\.\d\d\.\d\d (?P<host>\S+) \d{4}-\d\d-\d\d-\d\d\.\d\d\.\d\d\.(?P<micro>\d{6}) \S+ "
    r"\S+ \S+ (?P<level>[A-Z]+)(?: (?P<message>.*))?"
)
_SYSLOG_NEW = re.compile(
    r"<(?P<pri>\d{1,3})>1 (?P<time>\S+) (?P<host>\S+) \S+ \S+ \S+ (?:-|(?:\[[^\]]*\])+)(?: (?P<message>.*))?"
)
_SYSLOG = re.compile(
    r"(?:<(?P<pri>\d{1,3})>)?(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?P<host>\S+) "
    r"(?:[\w./()@-]+(?:\[\d+\])?(?: \([^)]*\))?: )?(?P<message>.*)"
)
_ISO = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|[+-]\d\d:?\d\d))?"
_SHORT = r"\d\d[-/]?\d\d[-/]?\d\d[ T]\d\d:?\d\d:?\d\d"  # 081109 203530, 17/06/09 20:10:40
_SHORT_TIME, _PAIR_OF_DIGITS = re.compile(_SHORT, re.ASCII), re.compile(r"\d\d", re.ASCII)
_ASCTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? \d{4}"
# A time, perhaps in brackets; perhaps a process number; a level; perhaps a thread or logger that a colon or dash ends.
_PLAIN = re.compile(
    rf"\[?(?P<time>{_ISO}|{_SHORT}|{_ASCTIME})\]?(?: -)?(?: +\[?\d+\]?)?"
    rf"(?: +\[?(?P<level>{_LEVEL})\b\]?:?)?(?: +\[(?:[^\[\]]|\[[^\]]*\])*\])?(?: -(?= ))?(?: +[a-z_][\w.$-]*:(?= |$))?"
    r" *(?P<message>.*)",
    re.IGNORECASE,
)
_PAIR = re.compile(r'(?P<key>[\w.@-]+)=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>\S*))')
_MESSAGE_KEYS = ("message", "msg", "log", "event", "text", "body")
_LEVEL_KEYS = ("level", "severity", "lvl", "loglevel", "log.level", "levelname", "severity_text")
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp", "datetime", "date")
_HOST_KEYS = ("host", "hostname", "host.name", "node")


def severity(level: str | None) -> int | None:
    """The OpenTelemetry severity number of a level as written; None for a word that is none."""
    return _NUMBER.get(level.upper()) if level else None


def _read_short(text: str) -> datetime:
    """Six pairs of digits: a year within 1969 to 2068, month, day, hour, minute, second."""
    if not _SHORT_TIME.fullmatch(text):
        raise ValueError
    year, month, day, hour, minute, second = map(int, _PAIR_OF_DIGITS.findall(text))
    return datetime(year + (2000 if year < 69 else 1900), month, day, hour, minute, second)


_TIMES: tuple[Callable[[str], datetime], ...] = (
    datetime.fromisoformat,
    _read_short,
    lambda text: datetime.strptime(text, "%a %b %d %H:%M:%S %Y"),
    lambda text: datetime.strptime(text, "%a %b %d %H:%M:%S.%f %Y"),
)


@lru_cache(maxsize=1024)  # lines that follow each other often have the same second
def read_time(text: str) -> datetime | None:
    """The time that a timestamp of a header tells, in UTC; None where it is none or leaves the year out."""
    plain = text.strip().replace(",", ".").replace("/", "-")
    for read in _TIMES:
        try:
            found = read(plain)
        except ValueError:
            continue
        try:
            return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        except OverflowError:
            return None
    return None


def read_bgl(text: str) -> Header | None:
    """A line of Blue Gene/L's log, its label already taken off."""
    head = _BGL.fullmatch(text)
    if head is None:
        return None
    time = datetime.fromtimestamp(int(head["epoch"]), UTC).replace(microsecond=int(head["micro"]))
    return Header((head["message"] or "").strip(), time, head["level"], head["host"])


def read_syslog(text: str) -> Header | None:
    """A syslog line, RFC 5424 or RFC 3164; times of the latter have no year, so they are not told."""
    head = _SYSLOG_NEW.fullmatch(text) or _SYSLOG.fullmatch(text)
    if head is None:
        return None
    level = _SYSLOG_LEVELS[int(head["pri"]) % 8] if head["pri"] else None
    return Header((head["message"] or "").strip(), read_time(head["time"]), level, head["host"])


def read_plain(text: str) -> Header | None:
    """A line that begins with a time, and perhaps a level."""
    head = _PLAIN.fullmatch(text) if text[:1] in "[0123456789" else None
    if head is None:
        return None
    return Header(head["message"].strip(), read_time(head["time"]), head["level"])


def read_json(text: str) -> Header | None:
    """A line that is one JSON object; without a message of its own, the whole line is the message."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _from_fields(record, text) if isinstance(record, dict) else None


def read_logfmt(text: str) -> Header | None:
    """A line of ``key=value`` pairs that has a message or a level among them."""
    if "=" not in text:
        return None
    fields = {
        match["key"]: match["bare"] if match["quoted"] is None else match["quoted"].replace('\\"', '"')
        for match in _PAIR.finditer(text)
    }
    if not any(key in fields for key in (*_MESSAGE_KEYS[:2], *_LEVEL_KEYS[:3])):
        return None
    return _from_fields(fields, text)


def _from_fields(fields: Mapping[str, Any], text: str) -> Header:
    told = {str(key).lower(): value for key, value in fields.items()}

    def first(keys: tuple[str, ...]) -> str | None:
        return next((str(told[key]) for key in keys if isinstance(told.get(key), (str, int, float))), None)

    time = first(_TIME_KEYS)
    return Header(
        (first(_MESSAGE_KEYS) or text).strip(),
        (time and _any_time(time)) or None,
        first(_LEVEL_KEYS),
        first(_HOST_KEYS),
    )


def _any_time(text: str) -> datetime | None:
    """A timestamp, or a number of seconds, milliseconds or nanoseconds since 1970."""
    try:
        seconds = float(text)
    except ValueError:
        return read_time(text)
    while seconds > 1e11:
        seconds /= 1000
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def readers(format: LogFormat) -> tuple[Callable[[str], Header | None], ...]:
    """What is tried on a line, in order; BGL is apart, because its label has to go first."""
    by_name: dict[str, tuple[Callable[[str], Header | None], ...]] = {
        "raw": (),
        "bgl": (),
        "json": (read_json,),
        "logfmt": (read_logfmt,),
        "syslog": (read_syslog,),
        "auto": (read_json, read_plain, read_syslog, read_logfmt),
    }
    return by_name[format]
