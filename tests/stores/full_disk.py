"""Steps of a store on a disk with room for 0, 1, 2, ... pages, until each passes.

Run as ``python -m tests.stores.full_disk HOW WHICH FOLDER``. HOW is ``size``, where no file may grow beyond the room (a
write fails with EFBIG), or ``space``, where FOLDER is a small file system of its own (ENOSPC). WHICH is ``every``
number of pages, or ``some``.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memstream.config import RecallConfig
from memstream.errors import InputError, StoreError
from memstream.memory import ConversationHandle, Memory, Scope, SqlStore
from memstream.stores import leftovers, migrations
from tests.stores.test_migrations import OLD_ROWS
from tests.stores.tiny import TinyEmbedder, say

PAGE = 4096
SCOPE, OTHER = Scope("n", "u", "c"), Scope("n", "u", "d")
LONG = "amber basil cedar " * 500  # takes pages of its own
TABLES = {
    "conversations": "id, name", "turns": "id, sequence, role, text, state, superseded", "facts": "id, text",
    "pins": "fact_id", "chunks": "id, kind, first_sequence, last_sequence, text", "derived": "id, text, sources",
    "turn_words": "rowid, scope, text", "fact_words": "rowid, text", "embeddings": "chunk_id, vector",
    "turn_embeddings": "turn_id, vector", "events": "action, chunk_id",
}  # fmt: skip


class GatedEmbedder(TinyEmbedder):
    """Waits, in the background, for leave to begin."""

    def __init__(self, *, closed: bool) -> None:
        super().__init__()
        self.go = threading.Event()
        if not closed:
            self.go.set()

    def embed(self, texts: list[str]) -> Any:
        self.go.wait()
        return super().embed(texts)


class Stage:
    """A store as it was prepared, opened, with what a step needs."""

    def __init__(self, path: Path, step: str) -> None:
        self.path, self.step = path, step
        self.embedder = GatedEmbedder(closed=step == "embed")
        embeds = step in ("embed", "checkpoint")
        self.memory = Memory(
            SqlStore.open(path),
            self.embedder if embeds else None,
            RecallConfig(),
            index="exact",
            summarizer=lambda turns: f"{len(turns)} turns about fjords",
        )
        if step != "embed":
            self.memory.flush()
        self.handle: ConversationHandle | None = None
        self.open_turn = 0
        if step in ("begin", "finish", "evict", "supersede", "snapshot"):
            self.handle = self.memory.open_conversation(SCOPE)
        if step == "finish":
            assert self.handle is not None
            self.open_turn = self.handle.begin_turn("assistant", "", 0)
        if step in ("purge", "checkpoint"):
            with self.memory.store.write() as connection:
                self.memory.store.owe_purge(connection)
                connection.exec_driver_sql("DELETE FROM embeddings WHERE chunk_id = 1")
                connection.exec_driver_sql("INSERT INTO events (action, chunk_id) VALUES ('delete', 1)")
        if step == "purge":
            leftovers.found = lambda *_: True  # so that all pages are written anew

    def act(self) -> bool:
        """Takes the step; False where it is done but the files are not wiped yet."""
        memory, handle, store = self.memory, self.handle, self.memory.store
        done = True
        if handle is not None:
            self.act_in(handle)
        elif self.step == "open":
            memory.open_conversation(Scope("n", "new", "c")).close()
        elif self.step == "remember":
            memory.remember(SCOPE, LONG)
        elif self.step == "forget turn":
            done = memory.forget(SCOPE, "turn:3").verified
        elif self.step == "forget fact":
            done = memory.forget(SCOPE, "fact:1").verified
        elif self.step == "rename":
            memory.rename_conversation(SCOPE, "renamed" * 20)
        elif self.step == "delete":
            memory.delete_conversation(OTHER)
            done = not store.owes_purge
        elif self.step == "embed":
            self.embedder.go.set()
            memory._indexer.wake()
            memory.flush()
        elif self.step == "checkpoint":
            memory._index.checkpoint()
        elif self.step == "purge":
            done = store.purge()
        else:
            raise ValueError(self.step)
        return done

    def act_in(self, handle: ConversationHandle) -> None:
        if self.step == "begin":
            handle.begin_turn("user", LONG, 1)
        elif self.step == "finish":
            handle.finish_turn(self.open_turn, LONG, 1, "complete")
        elif self.step == "evict":
            handle.evicted([1, 2, 3, 4])
            self.memory.flush()
        elif self.step == "supersede":
            handle.supersede([4])
        elif self.step == "snapshot":
            import torch

            from memstream.streaming import snapshot

            assert handle.snapshot_path is not None
            snapshot.save(handle.snapshot_path, {"keys": torch.ones(5000)}, {"a": 1}, fingerprint="f")
            handle.record_snapshot("f", 5, handle.n_forgotten())
            assert handle.find_snapshot("f", 5)

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        with self.memory.store.read() as connection:
            return {
                table: [tuple(row) for row in connection.exec_driver_sql(f"SELECT {columns} FROM {table} ORDER BY 1")]
                for table, columns in TABLES.items()
            }

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.memory.close()


class Creation:
    """No store yet; the step makes one."""

    def __init__(self, path: Path, step: str) -> None:
        self.path, self.step = path, step

    def act(self) -> bool:
        memory = Memory(SqlStore.open(self.path), TinyEmbedder(), RecallConfig(), index="exact")
        try:
            memory.flush()
            assert memory.verify().problems == ()
        finally:
            memory.close()
        return True

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        return {}

    def close(self) -> None:
        pass


class Upgrade(Creation):
    """A store of the first version; the step brings it up to date."""

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        import sqlite3
        from contextlib import closing

        with closing(sqlite3.connect(self.path)) as connection:
            return {t: connection.execute(f"SELECT * FROM {t}").fetchall() for t in ("conversations", "turns")}


STAGES: dict[str, Callable[[Path, str], Stage | Creation]] = {"create": Creation, "upgrade": Upgrade}
STEPS = (
    "begin", "finish", "evict", "embed", "supersede", "snapshot", "open", "remember", "forget turn", "forget fact",
    "rename", "delete", "checkpoint", "purge", "create", "upgrade",
)  # fmt: skip


def prepare(path: Path, step: str) -> None:
    if step == "create":
        return
    if step == "upgrade":
        known, migrations.MIGRATIONS = migrations.MIGRATIONS, migrations.MIGRATIONS[:1]
        store = SqlStore.open(path)
        migrations.MIGRATIONS = known
        with store.write() as connection:
            for statement in OLD_ROWS.split(";\n"):
                connection.exec_driver_sql(statement)
        store.close()
        return
    if step == "embed":  # what a process without an embedder said
        prepare(path, "")
        memory = Memory(SqlStore.open(path), None, RecallConfig(), index="exact")
        with memory.open_conversation(SCOPE) as handle:
            for i in range(8):
                say(handle, f"delta {i}")
        memory.close()
        return
    memory = Memory(SqlStore.open(path), TinyEmbedder(), RecallConfig(), index="exact")
    for scope in (SCOPE, OTHER):
        with memory.open_conversation(scope) as handle:
            for i in range(3):
                say(handle, f"zanzibarium {scope.conversation} {i} ember fjord", f"quixotolite {i} grove heron")
            if handle.snapshot_path is not None:
                handle.snapshot_path.write_bytes(b"zanzibarium" * 500)
                handle.record_snapshot("f", 5, 0)
    memory.remember(SCOPE, "likes xylophone")
    memory.flush()
    memory.close()


class Disk:
    """With room for some pages more, or for as much as one likes."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.filler = how, folder / "filler"

    @contextmanager
    def room_for(self, n_pages: int) -> Iterator[None]:
        if self.how == "size":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (n_pages * PAGE, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        else:
            free = os.statvfs(self.filler.parent).f_bavail
            with self.filler.open("wb") as file:
                file.write(b"x" * PAGE * (free - n_pages))
            try:
                yield
            finally:
                self.filler.unlink()


def bytes_of(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def try_with(n_pages: int, prepared: Path, disk: Disk, step: str, expected: Any) -> tuple[str | None, Any]:
    """Takes the step with so much room. Returns what was told, and the state it ended in where it passed."""
    folder = prepared.parent / "now"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder)
    stage = STAGES.get(step, Stage)(folder / "a.db", step)
    before = stage.state()
    told: str | None = None
    done = False
    with disk.room_for(n_pages):
        try:
            done = stage.act()
        except StoreError as error:
            told = str(error)
    after = stage.state()
    if told is not None:
        assert after == before, f"with {n_pages} pages the state changed: {told}"
        assert stage.act()
        after = stage.state()
    elif not done:
        told = "done, the files are to be wiped later"
        assert isinstance(stage, Stage)
        assert stage.memory.store.owes_purge
        if step.startswith("forget"):
            with suppress(InputError):  # it is gone
                stage.act()
                raise AssertionError("what was forgotten is there")
    if expected is not None:
        assert after == expected, f"with {n_pages} pages the step ended otherwise"
    if isinstance(stage, Stage):
        assert [p for p in stage.memory.verify().problems if "events tell of" not in p] == []
    stage.close()
    memory = Memory(SqlStore.open(folder / "a.db"), TinyEmbedder(), RecallConfig(), index="exact")
    memory.flush()
    report = memory.verify()
    assert report.problems == (), report.problems
    assert report.pending == 0
    assert not memory.store.owes_purge
    memory.close()
    gone = {"forget turn": b"zanzibarium c 1", "forget fact": b"xylophone", "delete": b"zanzibarium d"}.get(step)
    assert gone is None or gone not in bytes_of(folder)
    assert not list(folder.rglob("*.tmp")) + list(folder.rglob("*.partial"))
    return told, after if told is None else None


def main() -> None:
    how, which, where = sys.argv[1:]
    disk, found = Disk(how, Path(where)), {}
    for step in STEPS:
        folder = Path(where) / step
        (folder / "prepared").mkdir(parents=True)
        prepare(folder / "prepared" / "a.db", step)
        _, expected = try_with(1500, folder / "prepared", disk, step, None)
        assert expected is not None, f"{step} failed with all the room it may need"
        told: dict[int, str | None] = {}
        for n_pages in itertools.count() if which == "every" else (0, 8, 30, 1500):
            told[n_pages], passed = try_with(n_pages, folder / "prepared", disk, step, expected)
            if passed is not None:
                break
        found[step] = told
        shutil.rmtree(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
