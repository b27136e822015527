"""What an operator does with a whole store: check, repair, expire, reindex, export, back up. A part of ``Memory``."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from memstream.errors import StoreError
from memstream.memory import exporting, importing, retention
from memstream.memory.embedder import Embedder, Embedders
from memstream.memory.exporting import ExportReport, Part
from memstream.memory.importing import ImportReport
from memstream.memory.indexer import Indexer
from memstream.memory.live_index import SearchIndex
from memstream.memory.reindex import Progress as Told
from memstream.memory.reindex import Reindexed, reindex
from memstream.memory.summaries import Summaries
from memstream.memory.verify import RepairReport, VerifyReport, repair, verify
from memstream.report import ExpireReceipt
from memstream.stores.backup import Progress, backup
from memstream.stores.sql import SqlStore

_log = logging.getLogger(__name__)


class Upkeep:
    """The operations on a whole store; its parts are set by ``Memory``."""

    store: SqlStore
    _embedders: Embedders
    _index: SearchIndex
    _indexer: Indexer
    _summaries: Summaries

    def _purge(self, texts: Collection[str] | None = None) -> bool:
        """Takes deleted vectors out of the index and its file, and deleted words out of SQLite's files.

        Where that cannot be done now the store remembers it, and whoever deletes, closes or opens it next tries again.
        """
        try:
            self._index.refresh()
            self._index.checkpoint()
            wiped = self.store.purge(texts)
        except StoreError as error:
            _log.warning("what was deleted is still in the files, to be wiped later: %s", error)
            return False
        if not wiped:
            _log.warning("what was deleted is still in the files, to be wiped later: another process reads them")
        return wiped

    def expire(
        self, before: datetime, part: Part | None = None, *, pinned: bool = False, dry_run: bool = False
    ) -> ExpireReceipt:
        """Forgets everything said before a time as completely as ``forget``, and the facts told before it.

        Args:
            before: a time in the past, with its zone.
            part: of the store; None is everything. Log lines of a replay are left as they are.
            pinned: pinned facts go too; ``remember`` pins every fact.
            dry_run: only counts.

        Raises:
            InputError: a time without a zone, or one that is still to come.
            StoreError: the disk refused; what was forgotten until then is gone.
        """
        part = part or Part()
        retention.check_before(before)
        with self.store.read() as connection:
            old = retention.count(connection, before, part, pinned=pinned)
        if dry_run:
            return ExpireReceipt(before=before, removed=dict(old))
        done = retention.expire(self.store, before, part, pinned=pinned)
        wiped = self._purge() if self.store.owes_purge else True
        for conversation_id, sources in done.summaries:
            self._summaries.add(conversation_id, sources)
        self._indexer.wake()
        with self.store.read() as connection:
            left = retention.count(connection, before, part, pinned=pinned)
        return ExpireReceipt(
            before=before,
            removed=dict(done.removed),
            snapshots=done.n_snapshots,
            kept=done.kept,
            verified=wiped and left.total() == done.kept,
        )

    def verify(self) -> VerifyReport:
        """Checks that the store is whole and that everything in it agrees; see ``VerifyReport.problems``."""
        return verify(self.store, self._index)

    def repair(self) -> RepairReport:
        """Mends what ``verify`` finds, where it can be made from the turns; says what it did and what is left."""
        try:
            return repair(self.store, self._index)
        finally:
            self._indexer.wake(anew=True)

    def reindex(self, embedder: Embedder, progress: Told | None = None) -> Reindexed:
        """Makes all vectors anew with another embedder, while the old ones go on being searched; see ``reindex``.

        Other processes that have the store open with the embedder of before must open it again afterwards: until then
        they raise DimensionMismatchError where they would recall.

        Args:
            embedder: of the new vectors; used for everything from then on.
            progress: called with the number of texts done and of all texts.
        """
        self._embedders.add(embedder)
        done = reindex(self.store, embedder, progress)
        self._index.follow()
        self._embedders.keep(embedder)
        self._indexer.wake()
        return done

    def export_to(self, file: BinaryIO, part: Part | None = None, *, vectors: bool = False) -> ExportReport:
        """Writes memories as lines of JSON, in one order, from one consistent view; others may write meanwhile.

        Args:
            file: opened for writing bytes.
            part: which; None is everything. Log lines of a replay are never part of an export.
            vectors: writes the vectors too, so that an import need not make them again.

        Raises:
            InputError: a text takes more than 64 MiB as a line.
        """
        return exporting.export(self.store, file, part or Part(), with_vectors=vectors)

    def import_from(self, file: BinaryIO, *, name: str | None = None) -> ImportReport:
        """Stores what an export holds: each conversation as a whole or not at all, nothing twice.

        The file is checked as a whole before anything is stored. A conversation that is there with the same turns is
        left as it is, or continued by the turns that follow. Vectors are taken where the store's embedder made them.

        Args:
            file: opened for reading bytes, from a place that can be read twice.
            name: for the conversation, of an export of a single one.

        Raises:
            InputError: no export, damaged or cut off; or a conversation of that name is there with other turns.
            ConversationBusyError: a conversation that would be continued is open.
        """
        try:
            return importing.load(self.store, file, name=name)
        finally:
            self._index.follow()
            self._indexer.wake()

    def backup(self, path: str | os.PathLike[str], *, force: bool = False, progress: Progress | None = None) -> None:
        """Copies the store to a file (mode 0600) from one consistent view; others may write meanwhile.

        Args:
            path: of the copy; ``memstream memory restore`` puts it back.
            force: replaces a file that is there.
            progress: called now and then with pages done and pages in all.

        Raises:
            StoreError: a store in memory, a file that is there, or a disk that is full; nothing is left behind.
            StoreCorruptError: the store is damaged.
        """
        if self.store.path is None:
            raise StoreError(f"{self.store} has no file to back up; export it, or use the server's own tools")
        backup(self.store.path, Path(path), force=force, progress=progress)
