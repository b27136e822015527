"""Joins lines that belong to one event, such as a stack trace, source by source."""

from __future__ import annotations

import re
from dataclasses import replace

from memstream.replay.normalise import Line

_GOES_ON = re.compile(r"\s+\S|Caused by: |Suppressed: |\.\.\. \d+ more|During handling of the above")
_PYTHON_TRACE = re.compile(r"Traceback \(most recent call last\):")


class Assembler:
    """Joins the lines of one stream.

    A line goes on an event where it is indented or begins as parts of stack traces do; after a line with a header,
    any line without one does. What is scored is the first line, with the line that names the error behind it.

    Args:
        max_lines: most lines of one event.
        max_bytes: most characters of one event's text; longer ones are cut into several.
    """

    def __init__(self, *, max_lines: int, max_bytes: int) -> None:
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._lines: list[Line] = []
        self._size = 0
        self._in_python_trace = False

    def add(self, line: Line) -> Line | None:
        """Takes a line; returns the event before it, where this line begins a new one."""
        if self._belongs(line):
            self._lines.append(line)
            self._size += len(line.text) + 1
            return None
        done = self.flush()
        self._lines, self._size = [line], len(line.text)
        self._in_python_trace = bool(_PYTHON_TRACE.match(line.message))
        return done

    def flush(self) -> Line | None:
        """Returns the event that is being put together, if there is one."""
        lines, self._lines = self._lines, []
        if len(lines) <= 1:
            return lines[0] if lines else None
        first = lines[0]
        named = next((line.message for line in lines[1:] if not line.text[:1].isspace()), "")
        return replace(
            first,
            text="\n".join(line.text for line in lines),
            message=f"{first.message} {named}".strip(),
            n_lines=sum(line.n_lines for line in lines),
            truncated=any(line.truncated for line in lines),
            partial=lines[-1].partial,
            decode_errors=sum(line.decode_errors for line in lines),
        )

    def _belongs(self, line: Line) -> bool:
        if not self._lines or line.header or not line.message:
            return False
        if len(self._lines) >= self._max_lines or self._size + len(line.text) >= self._max_bytes:
            return False
        first = self._lines[0]
        if not first.message:
            return False
        if first.header or _GOES_ON.match(line.text):
            return True
        return self._in_python_trace and self._lines[-1].text[:1].isspace()  # the line that names the error
