"""Summaries of what left a window, made in the background as one more key to its turns."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import Connection

from memstream.memory import keys
from memstream.memory.chunker import window_text
from memstream.memory.summarizer import Summarizer, invented, summarise
from memstream.memory.worker import Worker
from memstream.report import SummaryCounts
from memstream.stores import rows
from memstream.stores.base import storable_text
from memstream.stores.rows import Turn
from memstream.stores.sql import SqlStore

_log = logging.getLogger(__name__)
_CATCH_UP_TURNS = 2000  # the newest so many turns outside the window are looked at when a conversation is opened


def _said(connection: Connection, conversation_id: int, turn_ids: Collection[int]) -> list[Turn]:
    """Those of the turns that are live and were said by somebody: what tools returned is nobody's words."""
    live = rows.live_turns(connection, conversation_id, turn_ids)
    return [turn for turn in live if turn.role not in rows.TOOL_ROLES]


class Summaries:
    """One background thread, which makes a summary of each exchange that left a window, from its turns alone.

    Args:
        store: read and written in short transactions, never across a call of the summariser.
        summarizer: gets the turns in order; None is the extractive one, and so is, for these turns, one that returns
            an empty text or raises.
        believed: False checks that it names nothing that its turns do not, see ``summarizer.invented``.
        stored: called after each summary.
    """

    def __init__(
        self, store: SqlStore, summarizer: Summarizer | None, *, believed: bool, stored: Callable[[], None]
    ) -> None:
        self._store = store
        self._chosen = summarizer
        self._believed = believed
        self._stored = stored
        self._hurried = False
        self._worker = Worker("summarising")
        self.counts = SummaryCounts()

    def add(self, conversation_id: int, turn_ids: tuple[int, ...]) -> None:
        """Has turns of a conversation summarised, unless they are already."""
        self._worker.submit(lambda: self._summarise(conversation_id, turn_ids))

    def catch_up(self, conversation_id: int, before: int) -> None:
        """Has the exchanges before a sequence summarised that a process killed too early did not."""
        self._worker.submit(lambda: self._catch_up(conversation_id, before))

    def _catch_up(self, conversation_id: int, before: int) -> None:
        with self._store.read() as connection:
            left = keys.left_exchanges(connection, conversation_id, before, _CATCH_UP_TURNS)
        for turn_ids in left:
            self._summarise(conversation_id, turn_ids, again=True)

    def _summarise(self, conversation_id: int, turn_ids: tuple[int, ...], *, again: bool = False) -> None:
        with self._store.read() as connection:
            turns = _said(connection, conversation_id, turn_ids)
            if not turns or keys.is_summarised(connection, turns):
                return
            copied = self._chosen is None and keys.is_held_whole(connection, turns)
        if copied:
            if not again:
                self._count("copies")
            return
        text = self._ask(turns)
        kind = "chosen" if text else "extractive"
        text = text or summarise([turn.text for turn in turns])
        if not text:
            return
        with self._store.write() as connection:
            unchanged = _said(connection, conversation_id, turn_ids) == turns
            if unchanged:
                keys.add_summary(connection, conversation_id, turns, text)
        if unchanged:
            self._count(kind)
            self._stored()
        else:  # one was forgotten or undone meanwhile, and with it what was made from it
            self.add(conversation_id, turn_ids)

    def _ask(self, turns: Sequence[Turn]) -> str:
        """The chosen summariser's text; empty where there is none, or none that can be used."""
        if self._chosen is None or self._hurried:
            return ""
        try:
            text = window_text([storable_text(self._chosen(turns))])
        except Exception as error:  # noqa: BLE001 (it is the caller's, and its turns must not stay without a key)
            _log.warning("the summariser failed, sentences are taken instead: %s: %s", type(error).__name__, error)
            self._count("failed")
            return ""
        if not self._believed:
            names = invented(text, [part for turn in turns for part in (turn.text, turn.role)])
            if names:
                _log.info("a summary named %d things that its turns do not; sentences are taken instead", len(names))
                _log.debug("it named %s: %s", ", ".join(names), text)
                self._count("rejected")
                return ""
        return text

    def _count(self, what: str) -> None:
        self.counts = dataclasses.replace(self.counts, **{what: getattr(self.counts, what) + 1})

    def flush(self) -> None:
        """Waits until everything that left a window is summarised.

        Raises:
            MemstreamError: the first of what went wrong since the last flush.
        """
        self._worker.flush()

    def hurry(self) -> None:
        """Asks the chosen summariser no more: what still waits gets the extractive one."""
        self._hurried = True

    def shutdown(self) -> None:
        """Takes no more work and ends the thread."""
        self._worker.shutdown()
