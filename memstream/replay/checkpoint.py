"""Saves where a replay stands, so that a run that was killed goes on as if it had not been."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memstream.errors import ReplayError
from memstream.replay.follow import Position

VERSION = 1
_NAME, _PREVIOUS = "checkpoint.json", "checkpoint.previous.json"


class Checkpoint:
    """A folder that holds the state of one replay.

    A state is written beside the old one, flushed to the disk and put in its place; the old one is kept as
    ``checkpoint.previous.json``. The cache has a file of its own, named in the state.

    Args:
        folder: made if it is not there.

    Raises:
        ReplayError: the folder cannot be made, or its state cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ReplayError(f"cannot make the state folder {folder}: {error.strerror}") from error
        self.state = self._read()

    def _read(self) -> dict[str, Any] | None:
        way_out = f"put {_PREVIOUS} in its place to go back one step, or give another --state folder to start anew"
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if (self._folder / _PREVIOUS).exists():
                raise ReplayError(f"{self._path} is missing; {way_out}") from None
            return None
        except (OSError, ValueError) as error:
            raise ReplayError(f"{self._path} cannot be read ({error}); {way_out}") from error
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise ReplayError(f"{self._path} was not written by this version of memstream; {way_out}")
        return state

    def check(self, settings: dict[str, Any]) -> None:
        """Compares the settings of this run with those of the state.

        Raises:
            ReplayError: they differ, so going on would not give what one run gives.
        """
        if self.state is None:
            return
        before = self.state["settings"]
        different = sorted(name for name in before.keys() | settings.keys() if before.get(name) != settings.get(name))
        if different:
            name = different[0]
            raise ReplayError(
                f"the state in {self._folder} was made with {name} {before.get(name)!r}, not {settings.get(name)!r}; "
                "give the same settings, or another --state folder to start anew"
            )

    def positions(self) -> dict[str, Position]:
        """Where reading of each file stands."""
        if self.state is None:
            return {}
        return {plain["path"]: Position(**plain) for plain in self.state["positions"]}

    def cache_path(self, name: str) -> Path:
        """Where the file of a cache lies."""
        return self._folder / name

    def write(self, state: dict[str, Any], positions: list[Position]) -> None:
        """Replaces the state, whole or not at all.

        Raises:
            ReplayError: the disk refused.
        """
        whole = {"version": VERSION, **state, "positions": [asdict(position) for position in positions]}
        partial = self._path.with_suffix(".partial")
        try:
            with open(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(whole, file)
                file.flush()
                os.fsync(file.fileno())
            if self._path.exists():
                previous = self._folder / _PREVIOUS
                previous.unlink(missing_ok=True)
                os.link(self._path, previous)
            os.replace(partial, self._path)
            self._sync_folder()
        except OSError as error:
            raise ReplayError(f"cannot write the state {self._path}: {error.strerror}") from error
        before, self.state = self.state, whole
        used = {kept["cache"] for kept in (before, whole) if kept is not None}
        for path in self._folder.glob("cache-*.safetensors"):
            if path.name not in used:
                path.unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
