"""The file of ``--scores``: one JSON line per event read, cut back to the last checkpoint when a run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from memstream.errors import ReplayError
from memstream.replay.events import Record
from memstream.report import as_json


class RecordFile:
    """Appends records to a file.

    Args:
        path: of the file.
        n_bytes: how much of it an earlier run is sure of; None: begin anew.

    Raises:
        ReplayError: the file cannot be written, or is shorter than it should be.
    """

    def __init__(self, path: Path, n_bytes: int | None) -> None:
        self._path = path
        try:
            self._file = path.open("r+b" if n_bytes is not None else "wb")
            if self._file.seek(0, os.SEEK_END) < (n_bytes or 0):
                raise ReplayError(f"{path} is shorter than the saved state says; give the file of the earlier run")
            self._file.truncate(n_bytes or 0)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise ReplayError(f"cannot write {path}: {error.strerror}") from error

    def write(self, record: Record) -> None:
        """Appends a record."""
        try:
            self._file.write(json.dumps(as_json(record), ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        except OSError as error:
            raise ReplayError(f"cannot write {self._path}: {error.strerror}") from error

    def flush(self) -> int:
        """Makes sure that all records are on the disk; returns the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
