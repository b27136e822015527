"""Takes the header off a line, and masks what varies, so that alike lines become one template.

The label in front of a BGL line (whether someone later found it to be part of a failure) is dropped here, before
anything else sees the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from memstream.replay.config import LogFormat
from memstream.replay.formats import Header, read_bgl, readers, severity
from memstream.replay.reader import RawLine, clean

MASK = "<*>"
BINARY = "(binary data)"  # the message of every line that is no text
_BAD_BYTES, _BAD_SHARE = 4, 0.1  # undecodable bytes of a line, beyond which and a share of all it is no text
_KEEP = 0.95  # share of the latest lines that were no text: how much an older line weighs

_VARIABLE = re.compile(
    r"""(?=[\da-fA-F])(?:                                           # other characters are passed by quickly
        (?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])         # IPv4 address, with a port
      | \b(?:
            0[xX][0-9a-fA-F]+                                       # hexadecimal, marked
          | (?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b                  # MAC address
          | [0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b  # UUID
          | (?=[0-9]*[a-fA-F])(?:[0-9a-f]{8,}|[0-9A-F]{8,})\b       # hexadecimal, long
        )
      | \d+(?:[.,]\d+)*                                            # number, also inside a word
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, split; or several that belong together, such as a stack trace.

    Attributes:
        stream: where it came from.
        number: from 1, within its stream; of the first line.
        text: the whole line, cleaned, without a label; of several, joined by newlines.
        message: the part that is scored: the text without its header.
        time: UTC, where the header tells it.
        level: severity as written, where the header tells it.
        severity: its OpenTelemetry number, where it is a known word.
        host: what wrote it, where the header tells it.
        header: True where the line began with a header.
        offset: of its first byte in the stream, unpacked.
        n_lines: how many lines it is; 0 for the rest of a line whose beginning was taken before its end was there.
        truncated: True where a line was longer than the cap.
        length: of the first line in bytes, those beyond the cap included.
        digest: of a truncated line, a hash of all its bytes; else empty.
        partial: True where the end of the line was not there yet.
        decode_errors: how many of its bytes could not be decoded.
    """

    stream: str
    number: int
    text: str
    message: str
    time: datetime | None = None
    level: str | None = None
    severity: int | None = None
    host: str | None = None
    header: bool = False
    offset: int = 0
    n_lines: int = 1
    truncated: bool = False
    length: int = 0
    digest: str = ""
    partial: bool = False
    decode_errors: int = 0


class Normaliser:
    """Splits the lines of one stream.

    In the format ``auto``, the first line with a whole BGL header makes the stream a BGL one, in which every line
    begins with a label.

    Args:
        format: how lines begin.
        encoding: of the bytes.
    """

    def __init__(self, format: LogFormat, encoding: str = "utf-8") -> None:
        self._bgl = format == "bgl"
        self._detect = format == "auto"
        self._readers = readers(format)
        self._encoding = encoding
        self._no_text = 0.0

    @property
    def is_binary(self) -> bool:
        """True while most of the latest lines were no text; then none is taken for text."""
        return self._no_text > 0.5

    def __call__(self, raw: RawLine) -> Line:
        text, n_bad = clean(raw.data, encoding=self._encoding, truncated=raw.truncated)
        bad = n_bad > _BAD_BYTES + _BAD_SHARE * len(raw.data)
        self._no_text = _KEEP * self._no_text + (1 - _KEEP) * bad
        no_text = bad or self.is_binary
        text, head = (text, None) if no_text else self._split(text)
        message = head.message if head else text.strip()
        return Line(
            stream=raw.stream,
            number=raw.number,
            text=text,
            message=BINARY if message and no_text else message,
            time=head.time if head else None,
            level=head.level if head else None,
            severity=severity(head.level) if head else None,
            host=head.host if head else None,
            header=head is not None,
            offset=raw.offset,
            n_lines=0 if raw.rest else 1,
            truncated=raw.truncated,
            length=raw.length,
            digest=raw.digest,
            partial=raw.partial,
            decode_errors=n_bad,
        )

    def _split(self, text: str) -> tuple[str, Header | None]:
        """The line without a label, and its header."""
        if self._bgl or self._detect:
            _, _, rest = text.partition(" ")
            head = read_bgl(rest)
            if head:
                self._bgl, self._detect = True, False
            if self._bgl:
                return rest, head
        for read in self._readers:
            head = read(text)
            if head:
                return text, head
        return text, None


def mask(message: str) -> str:
    """Replaces addresses, hexadecimal and decimal numbers by ``<*>``."""
    return _VARIABLE.sub(MASK, message)
