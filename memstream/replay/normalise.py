"""Takes the header off a line, and masks what varies, so that alike lines become one template.

The label in front of a BGL line (whether someone later found it to be part of a failure) is dropped here, before
anything else sees the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from memstream.config import LogFormat
from memstream.replay.reader import RawLine, clean

MASK = "<*>"

# Without its label: epoch second, date, node, local time with microseconds, node, type, component, level, message.
_BGL = re.compile(
    r"(?P<epoch>\d{9,10}) \d{4}\.\d\d\.\d\d (?P<host>\S+) \d{4}-\d\d-\d\d-\d\d\.\d\d\.\d\d\.(?P<micro>\d{6}) \S+ "
    r"\S+ \S+ (?P<level>[A-Z]+)(?: (?P<message>.*))?"
)
_VARIABLE = re.compile(
    r"""(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])     # IPv4 address, with a port
    | \b0[xX][0-9a-fA-F]+                                       # hexadecimal, marked
    | \b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b                  # MAC address
    | \b(?=[0-9]*[a-fA-F])(?:[0-9a-f]{8,}|[0-9A-F]{8,})\b       # hexadecimal, long
    | \d+(?:[.,]\d+)*                                           # number, also inside a word
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, split.

    Attributes:
        stream: where it came from.
        number: from 1, within its stream.
        text: the whole line, cleaned, without a label.
        message: the part that is scored: the text without its header.
        time: UTC, where the header tells it.
        level: severity as written, where the header tells it.
        host: what wrote it, where the header tells it.
        truncated: True where the line was longer than the cap.
        decode_errors: how many of its bytes are not UTF-8.
    """

    stream: str
    number: int
    text: str
    message: str
    time: datetime | None = None
    level: str | None = None
    host: str | None = None
    truncated: bool = False
    decode_errors: int = 0


class Normaliser:
    """Splits the lines of one stream.

    In the format ``auto``, the first line with a whole BGL header makes the stream a BGL one, in which every line
    begins with a label.
    """

    def __init__(self, format: LogFormat) -> None:
        self._bgl = format == "bgl"
        self._detect = format == "auto"

    def __call__(self, raw: RawLine) -> Line:
        text, n_bad = clean(raw.data, truncated=raw.truncated)
        head = None
        if self._bgl or self._detect:
            _, _, rest = text.partition(" ")
            head = _BGL.fullmatch(rest)
            if head:
                self._bgl, self._detect = True, False
            if self._bgl:
                text = rest
        return Line(
            stream=raw.stream,
            number=raw.number,
            text=text,
            message=(head["message"] or "" if head else text).strip(),
            time=datetime.fromtimestamp(int(head["epoch"]), UTC).replace(microsecond=int(head["micro"]))
            if head
            else None,
            level=head["level"] if head else None,
            host=head["host"] if head else None,
            truncated=raw.truncated,
            decode_errors=n_bad,
        )


def mask(message: str) -> str:
    """Replaces addresses, hexadecimal and decimal numbers by ``<*>``."""
    return _VARIABLE.sub(MASK, message)
