"""Checking that the store is whole and that everything in it agrees, and mending what can be made from the turns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection, func, select

from memstream.errors import ConversationBusyError, StoreCorruptError, StoreError
from memstream.memory import checks
from memstream.memory.checks import Problem
from memstream.memory.live_index import SearchIndex
from memstream.stores import index_file, vectors
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore

_MOST = 20  # problems that are listed
_PASSES = 4  # of mending: what one removes (a wrong window), the next makes again
_SNAPSHOT = re.compile(r"(\d{1,18})\.snapshot(\..*)?")
_TABLES = (
    "conversations", "turns", "facts", "documents", "passages", "chunks", "embeddings", "turn_embeddings", "snapshots",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a check of the whole store found.

    Attributes:
        problems: one sentence each; empty when all is well.
        pending: texts whose vectors are still to be made (not a problem).
        counts: number of rows by table.
    """

    problems: tuple[str, ...]
    pending: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair did.

    Attributes:
        done: what was wrong and what was done about it, one sentence each; empty where nothing was wrong.
        after: the check of the whole store afterwards; what it still finds cannot be repaired from the turns.
    """

    done: tuple[str, ...]
    after: VerifyReport


def verify(store: SqlStore, index: SearchIndex) -> VerifyReport:
    """Checks everything that can be checked without a model. Reads all of the store; changes nothing in it."""
    with store.write() as connection:
        words = list(checks.full_text(connection))
    with store.read() as connection:
        found = list(islice(checks.database(connection), _MOST)) + words
        if not found:
            found = list(islice(checks.contents(connection), _MOST))
        counts = {
            table: connection.scalar(select(func.count()).select_from(db.Base.metadata.tables[table])) or 0
            for table in _TABLES
        }
        pending = vectors.n_pending(connection)
    problems = [problem.what for problem in found]
    problems += [f"snapshot file {path.name} belongs to no conversation" for path in _orphans(store)[:_MOST]]
    problems += _index_file(store)
    if not problems:
        problems += index.problems()
    return VerifyReport(problems=tuple(problems), pending=pending, counts=counts)


def repair(store: SqlStore, index: SearchIndex) -> RepairReport:
    """Mends what can be made from the turns: full-text rows, windows, keys of facts, vectors, events, index, leftovers.

    What is removed of vectors is made again in the background. A store in which nothing is wrong is not written to.
    """
    before = verify(store, index)
    if not before.problems:
        return RepairReport(done=(), after=before)
    with store.write() as connection:
        done = _mend(connection)
    done += [f"snapshot file {path.name} belongs to no conversation: removed it" for path in _remove(store)]
    damaged = _index_file(store)
    if damaged or done or index.problems():
        index.rebuild()
        index.checkpoint()
        done += [f"{damaged[0] if damaged else 'the vector index may differ from the store'}: built it anew"]
        store.purge()
    return RepairReport(done=tuple(done), after=verify(store, index))


def _mend(connection: Connection) -> list[str]:
    """Mends everything in the tables, in one transaction. Returns what was wrong and what was done."""
    done: list[str] = []
    for _ in range(_PASSES):
        found = [*checks.database(connection), *checks.full_text(connection)]
        if all(problem.mend is not None for problem in found):
            found = found or list(checks.contents(connection))
        mended = [problem for problem in found if _mended(connection, problem)]
        done += [f"{problem.what}: {problem.deed}" for problem in mended]
        if not mended:
            break
    return done


def _mended(connection: Connection, problem: Problem) -> bool:
    if problem.mend is not None:
        problem.mend(connection)
    return problem.mend is not None


def _orphans(store: SqlStore) -> list[Path]:
    """Files among the snapshots that no conversation knows."""
    folder = store.snapshot_path("")
    if folder is None:
        return []
    there = sorted(folder.iterdir())
    with store.read() as connection:
        known = set(connection.scalars(select(db.Snapshot.file)))
    return [path for path in there if path.name not in known]


def _remove(store: SqlStore) -> list[Path]:
    """Removes snapshot files that no conversation knows, but for one that is being written. Returns which."""
    removed = []
    for path in _orphans(store):
        named = _SNAPSHOT.fullmatch(path.name)
        if named is None:
            continue
        try:
            release = store.lock_conversation(int(named[1]), name=named[1], wait_s=0.0)
        except ConversationBusyError:
            continue
        try:
            if path in _orphans(store):
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError as error:
            raise StoreError(f"cannot remove {path}: {error.strerror}") from error
        finally:
            release()
    return removed


def _index_file(store: SqlStore) -> list[str]:
    """Says so where the bytes of the index file are not those that were written."""
    path = store.index_path
    if path is None or not path.exists():
        return []
    try:
        index_file.read_header(path)
    except StoreCorruptError as error:
        return [f"the index file {path.name} is damaged: {error}"]
    return []
