"""Conversations without a row: their states in memory, and beyond that in files, within a budget of bytes."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path
from typing import NamedTuple

from memstream.errors import StoreError
from memstream.machine import free_memory
from memstream.memory import ConversationHandle
from memstream.streaming import snapshot

log = logging.getLogger(__name__)

_SHARE = 10  # a tenth of what is free is taken without asking


class SwapRoom(NamedTuple):
    """How many bytes conversations without a row may take: in memory and in files together, and in memory."""

    total: int
    memory: int


def swap_room(asked: int | None, store: Path | None) -> SwapRoom:
    """The budget.

    Args:
        asked: bytes in all; None: a tenth of the memory that is available now, and of the disk space that is free
            beside the store, its snapshots left out of account.
        store: file that snapshots are kept beside; None: everything is kept in memory.
    """
    memory = free_memory().available // _SHARE
    if store is None:
        return SwapRoom(memory, memory) if asked is None else SwapRoom(asked, asked)
    if asked is None:
        asked = memory + (shutil.disk_usage(store.parent).free + file_bytes(store)) // _SHARE
    return SwapRoom(asked, min(memory, asked))


def file_bytes(store: Path | None) -> int:
    """Bytes of all snapshots beside a store."""
    folder = None if store is None else Path(f"{store}-snapshots")
    if folder is None or not folder.is_dir():
        return 0
    n_bytes = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            n_bytes += file.stat().st_size
    return n_bytes


class Swapped:
    """The state of one conversation without a row: in memory, or in its snapshot's file.

    It is given back only under the name it was kept under, which says what it fits and how often something was
    forgotten before.

    Args:
        handle: of the conversation.

    Attributes:
        memory_bytes: taken in memory.
    """

    def __init__(self, handle: ConversationHandle) -> None:
        self._handle = handle
        self._kept: tuple[str, snapshot.State] | None = None
        self.memory_bytes = 0

    def keep(self, name: str, state: snapshot.State) -> None:
        """Keeps a state in memory."""
        self._kept, self.memory_bytes = (name, state), snapshot.n_bytes(state)

    def drop(self) -> None:
        """Keeps nothing in memory."""
        self._kept, self.memory_bytes = None, 0

    def find(self, name: str) -> snapshot.State | None:
        """The state of the conversation as it is stored now, from memory or from the file; None where there is none."""
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        path = self._handle.find_snapshot(name, self._handle.next_sequence() - 1)
        return None if path is None else snapshot.load(path, fingerprint=name)

    def write(self, n_forgotten: int, room_bytes: int) -> None:
        """Moves the state from memory into the file. Where there is no place for files, the disk refuses, or the state
        alone is larger than the room, it is dropped.

        Args:
            n_forgotten: see ``ConversationHandle.record_snapshot``.
            room_bytes: what all snapshots of the store may take; the oldest make room.
        """
        kept, n_bytes = self._kept, self.memory_bytes
        self.drop()
        if kept is None:
            return
        name, state = kept
        try:
            path = self._handle.snapshot_path
            if path is not None and self._handle.make_room(n_bytes, room_bytes):
                snapshot.save(path, *state, fingerprint=name)
                self._handle.record_snapshot(name, self._handle.next_sequence() - 1, n_forgotten)
        except (StoreError, MemoryError) as error:
            log.warning("%s; the conversation will be rebuilt from its stored turns", error)
