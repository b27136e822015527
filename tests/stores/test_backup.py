"""Backups of a store in use, and putting one back."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from memstream.errors import StoreCorruptError, StoreError, StoreVersionError
from memstream.memory import Memory, Scope, SqlStore
from memstream.stores.backup import restore
from tests.stores.conftest import MakeMemory
from tests.stores.filled import MONDAY, fill
from tests.stores.test_memory_disk import run
from tests.stores.test_transfer import exported
from tests.stores.tiny import say

ROOT = Path(__file__).resolve().parents[2]
SCOPE = Scope("n", "u", "c")


@pytest.fixture
def memory(tmp_path: Path, make_memory: MakeMemory) -> Memory:
    memory = make_memory(tmp_path / "a.db")
    fill(memory)
    return memory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_backup_holds_everything(tmp_path: Path, memory: Memory, make_memory: MakeMemory) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    with memory.open_conversation(MONDAY) as handle:
        assert handle.snapshot_path is not None
        handle.snapshot_path.write_bytes(b"x")
        handle.record_snapshot("f", 8, handle.n_forgotten())
    memory._index.checkpoint()
    seen: list[tuple[int, int]] = []
    memory.backup(folder / "b.db", progress=lambda done, whole: seen.append((done, whole)))
    assert names(folder) == ["b.db"]
    assert stat.S_IMODE((folder / "b.db").stat().st_mode) == 0o600
    assert seen[-1][0] == seen[-1][1] > 10
    copy = make_memory(folder / "b.db")
    assert copy.verify().problems == ()
    assert copy.verify().counts == {**memory.verify().counts, "snapshots": 0}
    assert exported(copy, vectors=True) == exported(memory, vectors=True)
    assert copy.search(MONDAY, "order number", limit=1)[0].text == "My order number is 48213."


def test_a_backup_replaces_nothing_unless_told(tmp_path: Path, memory: Memory) -> None:
    target = tmp_path / "b.db"
    target.write_bytes(b"mine")
    with pytest.raises(StoreError, match="--force"):
        memory.backup(target)
    assert target.read_bytes() == b"mine"
    memory.backup(target, force=True)
    assert target.read_bytes().startswith(b"SQLite format 3")
    with pytest.raises(StoreError, match="the store itself"):
        memory.backup(tmp_path / "a.db", force=True)
    with pytest.raises(StoreError, match="does not exist"):
        memory.backup(tmp_path / "nowhere" / "b.db")
    with pytest.raises(StoreError, match="is a folder"):
        memory.backup(tmp_path)


def test_a_store_in_memory_is_not_backed_up(tmp_path: Path, make_memory: MakeMemory) -> None:
    with pytest.raises(StoreError, match="export it"):
        make_memory().backup(tmp_path / "b.db")


FULL = """
import resource, sys
from memstream.config import RecallConfig
from memstream.errors import StoreError
from memstream.memory import Memory, SqlStore
memory = Memory(SqlStore.open(sys.argv[1]), None, RecallConfig(enabled=False))
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    memory.backup(sys.argv[2], force=True)
except StoreError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, memory: Memory) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / "b.db").write_bytes(b"the backup of yesterday")
    (told,) = run(FULL, str(tmp_path / "a.db"), str(folder / "b.db"))
    assert "the disk is full" in told
    assert "no backup was written" in told
    assert names(folder) == ["b.db"]
    assert (folder / "b.db").read_bytes() == b"the backup of yesterday"


def test_backups_beside_a_writing_process(tmp_path: Path, make_memory: MakeMemory) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.writer", str(tmp_path / "a.db"), "7", "exact"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"ready\n"
        reader = make_memory(tmp_path / "a.db", embedder=None, enabled=False)
        promised = 0
        for i in range(4):
            for _ in range(30):
                promised += writer.stdout.readline().startswith(b"finished")
            reader.backup(tmp_path / f"b{i}.db")
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    sizes = []
    for i in range(4):
        copy = make_memory(tmp_path / f"b{i}.db")
        copy.flush()
        report = copy.verify()
        assert report.problems == ()
        sizes.append(report.counts["turns"])
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]
    assert promised > 10


def test_restore_puts_back_what_was(tmp_path: Path, memory: Memory, make_memory: MakeMemory) -> None:
    memory.backup(tmp_path / "b.db")
    then = exported(memory)
    with memory.open_conversation(MONDAY) as handle:
        say(handle, "said later", "velvet")
        assert handle.snapshot_path is not None
        handle.snapshot_path.write_bytes(b"keys of what was said later")
        handle.record_snapshot("f", 10, handle.n_forgotten())
    memory.flush()
    memory._index.checkpoint()
    with pytest.raises(StoreError, match="open in another process"):
        restore(tmp_path / "b.db", tmp_path / "a.db")
    assert memory.search(MONDAY, "velvet")[0].text == "velvet"
    memory.close()
    restore(tmp_path / "b.db", tmp_path / "a.db")
    assert not (tmp_path / "a.db-index").exists()
    assert names(tmp_path / "a.db-snapshots") == []
    assert stat.S_IMODE((tmp_path / "a.db").stat().st_mode) == 0o600
    again = make_memory(tmp_path / "a.db")
    assert exported(again) == then
    assert again.verify().problems == ()
    assert "velvet" not in {hit.text for hit in again.search(MONDAY, "velvet", limit=100)}
    with again.open_conversation(MONDAY) as handle:
        assert handle.find_snapshot("f", 10) is None


def test_restore_where_there_is_no_store_and_over_a_damaged_one(
    tmp_path: Path, memory: Memory, make_memory: MakeMemory
) -> None:
    memory.backup(tmp_path / "b.db")
    then = exported(memory)
    restore(tmp_path / "b.db", tmp_path / "new.db")
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"SQLite format 3\x00" + b"\xff" * 8000)
    Path(f"{damaged}-wal").write_bytes(b"left over")
    with pytest.raises(StoreCorruptError):
        SqlStore.open(damaged)
    restore(tmp_path / "b.db", damaged)
    for path in (tmp_path / "new.db", damaged):
        assert exported(make_memory(path)) == then


def test_restore_refuses_what_is_no_backup(tmp_path: Path, memory: Memory) -> None:
    memory.backup(tmp_path / "b.db")
    memory.close()
    before = (tmp_path / "a.db").read_bytes()
    (tmp_path / "text").write_bytes(b"hello " * 100)
    with pytest.raises(StoreCorruptError, match="not a memstream store"):
        restore(tmp_path / "text", tmp_path / "a.db")
    with pytest.raises(StoreError, match="there is no store"):
        restore(tmp_path / "missing", tmp_path / "a.db")
    with pytest.raises(StoreError, match="the store itself"):
        restore(tmp_path / "a.db", tmp_path / "a.db")
    data = bytearray((tmp_path / "b.db").read_bytes())
    data[4096 * 3 : 4096 * 6] = b"\xff" * 4096 * 3
    (tmp_path / "broken.db").write_bytes(data)
    with pytest.raises(StoreCorruptError, match="is as it was"):
        restore(tmp_path / "broken.db", tmp_path / "a.db")
    newer = sqlite3.connect(tmp_path / "b.db")
    newer.execute("INSERT INTO migrations VALUES ('9999-future', '2030-01-01')")
    newer.commit()
    newer.close()
    with pytest.raises(StoreVersionError, match="newer memstream"):
        restore(tmp_path / "b.db", tmp_path / "a.db")
    assert (tmp_path / "a.db").read_bytes() == before


def test_restore_refuses_beside_another_program(tmp_path: Path, memory: Memory) -> None:
    memory.backup(tmp_path / "b.db")
    memory.close()
    before = (tmp_path / "a.db").read_bytes()
    shell = sqlite3.connect(tmp_path / "a.db")  # such as sqlite3's own shell, which knows nothing of our locks
    shell.execute("SELECT count(*) FROM turns").fetchone()
    with pytest.raises(StoreError, match="open in another program"):
        restore(tmp_path / "b.db", tmp_path / "a.db")
    shell.close()
    assert (tmp_path / "a.db").read_bytes() == before


def test_nobody_opens_a_store_that_is_being_restored(tmp_path: Path, memory: Memory) -> None:
    memory.backup(tmp_path / "b.db")
    memory.close()

    def meanwhile(_done: int, _whole: int) -> None:
        with pytest.raises(StoreError, match="being restored"):
            SqlStore.open(tmp_path / "a.db")
        tried.append(True)

    tried: list[bool] = []
    restore(tmp_path / "b.db", tmp_path / "a.db", progress=meanwhile)
    assert tried
    SqlStore.open(tmp_path / "a.db").close()
