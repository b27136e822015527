"""Adding documents to a scope, changing only what changed, and removing what is gone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from sqlalchemy import Connection

from memstream.errors import ConfigError, InputError
from memstream.memory import forgetting
from memstream.memory.passages import cut
from memstream.memory.sources import SUFFIXES, Document, Paths, find_files, read, read_file
from memstream.report import AddedDocuments
from memstream.stores import documents as table
from memstream.stores import rows
from memstream.stores.base import Scope
from memstream.stores.documents import NewPassage
from memstream.stores.sql import SqlStore

_AT_ONCE = 64  # records of a file in one transaction

Told = Callable[[str], None]


class Adding:
    """One call of ``Memory.add_documents``.

    Args:
        store: where they go.
        scope: of a user, or the shared knowledge of a namespace.
        told: of the name of each document that is done.

    Raises:
        ConfigError: the scope is neither.
    """

    def __init__(self, store: SqlStore, scope: Scope, told: Told | None) -> None:
        if scope.user is None and not scope.knowledge:
            raise ConfigError(
                "documents belong to a user, or to what all may read: Scope(namespace, user) or "
                "Scope(namespace, knowledge=True)"
            )
        self._store, self._scope, self._told = store, scope, told
        self._added: list[str] = []
        self._changed: list[str] = []
        self._removed: list[str] = []
        self._n_unchanged = self._n_kept = self._n_new = 0
        self._n_lost = 0  # passages that are gone

    def run(self, documents: Paths | Document | Iterable[Paths | Document], *, sync: bool) -> AddedDocuments:
        """Adds everything that was given; see ``Memory.add_documents``."""
        given = read(documents)
        folders = [item for item in given if not isinstance(item, Document) and os.path.isdir(item)]
        if sync and not folders:
            raise InputError("sync removes what is gone from a folder; give a folder")
        for item in given:
            if isinstance(item, Document):
                self._put(item.path, [item])
                continue
            files = find_files(item)
            if not files and not sync:
                raise InputError(f"there is nothing to read under {os.fspath(item)}; it takes {', '.join(SUFFIXES)}")
            for file in files:
                self._add_file(str(file), read_file(file))
        if sync:
            self._remove_missing([os.path.join(os.path.abspath(os.fspath(folder)), "") for folder in folders])
        return AddedDocuments(
            added=tuple(self._added),
            changed=tuple(self._changed),
            removed=tuple(self._removed),
            n_unchanged=self._n_unchanged,
            n_passages_kept=self._n_kept,
            n_passages_new=self._n_new,
        )

    def _add_file(self, path: str, documents: Iterator[Document]) -> None:
        """Adds a file's documents, and removes those that it held before and holds no more."""
        seen: set[str] = set()
        while part := list(islice(documents, _AT_ONCE)):
            seen.update(document.name for document in part)
            self._put(path, part)
        with self._store.read() as connection:
            owner_id = rows.find_owner(connection, self._scope)
            known = {} if owner_id is None else table.names(connection, owner_id, path)
        self._remove([number for name, number in known.items() if name not in seen])

    def _put(self, path: str, documents: list[Document]) -> None:
        """Writes those of the documents that are new or changed, in one transaction."""
        with self._store.read() as connection:
            owner_id = rows.find_owner(connection, self._scope)
            names = [item.name for item in documents]
            known = {} if owner_id is None else table.checksums(connection, owner_id, path, names)
        fresh = [item for item in documents if known.get(item.name) != item.checksum]
        self._n_unchanged += len(documents) - len(fresh)
        made = [(item, *cut(item.text, markdown=item.markdown)) for item in fresh]
        if made:
            with self._store.write() as connection:
                owner_id = rows.ensure_owner(connection, self._scope)
                for item, title, passages in made:
                    self._write(connection, owner_id, item, item.title or title, passages)
        for item in documents:
            if self._told is not None:
                self._told(item.name)

    def _write(
        self, connection: Connection, owner_id: int, item: Document, title: str, passages: list[NewPassage]
    ) -> None:
        if item.line is not None:
            passages = [_on_line(passage, item.line) for passage in passages]
        there = table.find(connection, owner_id, item.path, item.name)
        number, change = table.put(
            connection,
            owner_id,
            path=item.path,
            name=item.name,
            title=title,
            checksum=item.checksum,
            new=passages,
        )
        (self._added if there is None else self._changed).append(f"document:{number}")
        self._n_kept += change.n_kept
        self._n_new += change.n_new
        self._lose(connection, owner_id, change)

    def _lose(self, connection: Connection, owner_id: int, change: table.Change) -> None:
        """Sees to it that no cache goes on with a passage that is gone."""
        n = change.removed["passages"]
        if n:
            self._store.owe_purge(connection)
        if n and not self._n_lost:
            forgetting.drop_snapshots(self._store, connection, owner_id)
        elif n:
            forgetting.count_on(connection, owner_id)
        self._n_lost += n

    def finish(self) -> bool:
        """Deletes the snapshots that were saved meanwhile; returns whether anything is gone that has to be wiped."""
        if not self._n_lost:
            return False
        with self._store.write() as connection:
            owner_id = rows.find_owner(connection, self._scope)
            assert owner_id is not None
            forgetting.drop_snapshots(self._store, connection, owner_id)
        return True

    def _remove_missing(self, folders: list[str]) -> None:
        with self._store.read() as connection:
            owner_id = rows.find_owner(connection, self._scope)
            known = {} if owner_id is None else table.paths(connection, owner_id)
        under = {number: path for number, path in known.items() if path.startswith(tuple(folders))}
        self._remove([number for number, path in under.items() if not os.path.exists(path)])

    def _remove(self, numbers: Collection[int]) -> None:
        for part in rows.batches(numbers, _AT_ONCE):
            with self._store.write() as connection:
                owner_id = rows.find_owner(connection, self._scope)
                assert owner_id is not None
                self._lose(connection, owner_id, table.remove(connection, part))
            self._removed.extend(f"document:{number}" for number in part)


def _on_line(passage: NewPassage, line: int) -> NewPassage:
    """A passage of a record, which is on one line of its file however many its text has."""
    return dataclasses.replace(passage, first_line=line, last_line=line)
