"""Damage of every kind, done on purpose: found, repaired from the turns, and found no more."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from memstream.errors import StoreCorruptError
from memstream.memory import Memory
from memstream.stores import fulltext
from tests.stores.conftest import MakeMemory
from tests.stores.filled import MONDAY, fill, tables
from tests.stores.test_transfer import exported
from tests.stores.tiny import TinyEmbedder

ROOT = Path(__file__).resolve().parents[2]
UNIT = TinyEmbedder(8).embed(["a"])[0].astype("<f2").tobytes()  # a vector of another dimension


@pytest.fixture
def path(tmp_path: Path, make_memory: MakeMemory) -> Path:
    memory = make_memory(tmp_path / "a.db")
    fill(memory)
    memory.close()
    return tmp_path / "a.db"


def sql(path: Path, *statements: str) -> None:
    """Changes the file behind the store's back: no foreign keys, no events."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def check_repaired(path: Path, make_memory: MakeMemory, wrong: str, whole: bytes) -> Memory:
    without = make_memory(path, embedder=None, enabled=False)  # with one, what has no vector would get it meanwhile
    (problem,) = [problem for problem in without.verify().problems if wrong in problem]
    report = without.repair()
    assert any(line.startswith(problem + ": ") for line in report.done)
    assert report.after.problems == ()
    without.close()
    memory = make_memory(path)
    memory.flush()
    assert memory.verify().problems == ()
    assert memory.verify().pending == 0
    assert exported(memory) == whole
    assert memory.repair().done == ()
    return memory


@pytest.fixture
def whole(path: Path, make_memory: MakeMemory) -> bytes:
    memory = make_memory(path)
    data = exported(memory)
    memory.close()
    return data


def test_a_healthy_store_is_not_changed(path: Path, make_memory: MakeMemory) -> None:
    before = tables(path)
    memory = make_memory(path)
    report = memory.repair()
    assert report.done == report.after.problems == ()
    assert tables(path) == before
    memory.close()
    assert tables(path) == before


DAMAGES = [
    ("DELETE FROM turn_words WHERE rowid = 1", "turn:1 has no full-text row"),
    ("DELETE FROM fact_words WHERE rowid = 1", "fact:1 has no full-text row"),
    ("UPDATE turn_words SET scope = 'o2 c4' WHERE rowid = 1", "turn:1 has the full-text row of another"),
    ("UPDATE turn_words SET text = 'velvet' WHERE rowid = 1", "turn:1 has the full-text row of another"),
    ("INSERT INTO turn_words (rowid, scope, text) VALUES (99, 'o1 c1', 'velvet')", "a full-text row of turn:99"),
    ("DELETE FROM turn_words_data WHERE id > 100", "a full-text index differs"),
    ("UPDATE sizes SET n = n + 1 WHERE scope = 'o1'", "another number of full-text rows than is noted"),
    ("DELETE FROM sizes", "another number of full-text rows than is noted"),
    ("DELETE FROM chunks WHERE first_sequence = 2 AND conversation_id = 2", "a row of embeddings points"),
    ("UPDATE chunks SET text = 'velvet' WHERE id = (SELECT min(id) FROM chunks)", "says something else than its turns"),
    ("UPDATE chunks SET owner_id = 3 WHERE id = (SELECT min(id) FROM chunks)", "belongs to another owner"),
    ("UPDATE chunks SET last_sequence = 99 WHERE kind = 'window' AND conversation_id = 3", "a turn that is not live"),
    (
        "DELETE FROM embeddings WHERE chunk_id IN (SELECT id FROM chunks WHERE fact_id = 1); "
        "DELETE FROM chunks WHERE fact_id = 1",
        "fact:1 has no key",
    ),
    ("UPDATE chunks SET text = 'velvet' WHERE fact_id = 1", "says something else than fact:1"),
    ("DELETE FROM embeddings WHERE chunk_id = (SELECT max(chunk_id) FROM embeddings)", "the events tell of"),
    ("UPDATE embeddings SET space_id = 7 WHERE chunk_id = 1", "a row of embeddings points to a row of spaces"),
    (f"UPDATE embeddings SET vector = x'{UNIT.hex()}' WHERE chunk_id = 1", "1 vectors in embeddings have the wrong"),
    ("UPDATE turn_embeddings SET vector = zeroblob(32) WHERE turn_id = 1", "vector 1 in turn_embeddings is not of"),
    ("INSERT INTO turn_embeddings SELECT 4, space_id, vector FROM turn_embeddings LIMIT 1", "superseded turns still"),
    ("INSERT INTO events (action, chunk_id) VALUES ('add', 999)", "the events tell of"),
    ("INSERT INTO embeddings SELECT 999, 1, scope, vector FROM embeddings LIMIT 1", "a row of embeddings points"),
    ("DELETE FROM events", "the events tell of 0"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "wrong"), DAMAGES, ids=[f"{i}-{wrong}" for i, (_, wrong) in enumerate(DAMAGES)])
def test_damage_is_repaired(path: Path, make_memory: MakeMemory, whole: bytes, damage: str, wrong: str) -> None:
    sql(path, *damage.split("; "))
    memory = check_repaired(path, make_memory, wrong, whole)
    assert memory.search(MONDAY, "order number", limit=1)[0].text == "My order number is 48213."
    assert "velvet" not in str(tables(path)["chunks"]) + str(tables(path)["turn_words_content"])


def test_a_summary_of_a_turn_that_is_gone_is_removed(path: Path, make_memory: MakeMemory) -> None:
    sql(path, "UPDATE derived SET sources = '[1, 999]'")
    memory = make_memory(path)
    assert len([p for p in memory.verify().problems if "was made from a turn that is gone" in p]) == 2  # made twice
    assert len(memory.repair().done) >= 2
    assert memory.verify().problems == ()
    assert tables(path)["derived"] == []
    assert b'"kind":"summary"' not in exported(memory)


def test_leftover_snapshots_are_removed_but_those_being_written(
    path: Path, make_memory: MakeMemory, whole: bytes
) -> None:
    folder = Path(f"{path}-snapshots")
    memory = make_memory(path)
    with memory.open_conversation(MONDAY) as handle:
        assert handle.snapshot_path == folder / "1.snapshot"
        handle.snapshot_path.write_bytes(b"good")
        handle.record_snapshot("f", 8, handle.n_forgotten())
        (folder / "99.snapshot").write_bytes(b"x")
        (folder / "1.snapshot.12.tmp").write_bytes(b"x")
        (folder / "notes.txt").write_bytes(b"not ours")
        report = memory.repair()
        assert any(line == "snapshot file 99.snapshot belongs to no conversation: removed it" for line in report.done)
        assert sorted(p.name for p in folder.iterdir()) == ["1.snapshot", "1.snapshot.12.tmp", "notes.txt"]
    memory.repair()
    assert sorted(p.name for p in folder.iterdir()) == ["1.snapshot", "notes.txt"]
    assert memory.verify().problems == ("snapshot file notes.txt belongs to no conversation",)


def test_a_damaged_index_file_is_built_anew(path: Path, make_memory: MakeMemory, whole: bytes) -> None:
    index = Path(f"{path}-index")
    good = index.read_bytes()
    index.write_bytes(good[:-40] + b"\x00" * 40)
    memory = make_memory(path, embedder=None, enabled=False)
    assert memory.repair().done == ("the index file a.db-index is damaged: its checksum is wrong: built it anew",)
    assert memory.verify().problems == ()
    assert memory.repair().done == ()
    assert len(index.read_bytes()) == len(good)
    assert exported(memory) == whole


def test_a_missing_index_of_sqlite_is_built_anew(path: Path, make_memory: MakeMemory, whole: bytes) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA writable_schema = ON")
    statement = "SELECT rootpage FROM sqlite_master WHERE name = ?"
    one, two = (connection.execute(statement, (name,)).fetchone()[0] for name in ("chunks_by_fact", "facts_by_owner"))
    change = "UPDATE sqlite_master SET rootpage = ? WHERE name = ?"
    connection.execute(change, (two, "chunks_by_fact"))
    connection.execute(change, (one, "facts_by_owner"))
    connection.close()
    memory = make_memory(path, embedder=None)
    assert any("facts_by_owner" in problem for problem in memory.verify().problems)
    memory.repair()
    assert memory.verify().problems == ()
    assert exported(memory) == whole


def test_damaged_pages_are_told_and_left(path: Path, make_memory: MakeMemory) -> None:
    data = bytearray(path.read_bytes())
    root = sqlite3.connect(path)
    page = root.execute("SELECT rootpage FROM sqlite_master WHERE name = 'chunks'").fetchone()[0]
    root.close()
    data[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    path.write_bytes(data)
    memory = make_memory(path, embedder=None, enabled=False)
    with pytest.raises(StoreCorruptError, match="restore a backup"):
        memory.repair()
    assert path.read_bytes()[4096 * (page - 1) : 4096 * page] == b"\xff" * 4096


def test_repair_beside_a_writing_process(path: Path, make_memory: MakeMemory) -> None:
    sql(path, "DELETE FROM turn_words WHERE rowid < 5", "DELETE FROM events", "DELETE FROM embeddings")
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.writer", str(path), "8", "exact"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    try:
        memory = make_memory(path, embedder=None, enabled=False)
        n_done = 0
        for _ in range(3):
            for _ in range(40):
                assert writer.stdout.readline()
            n_done += len(memory.repair().done)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert n_done > 3
    again = make_memory(path)
    again.flush()
    assert again.verify().problems == ()


@pytest.fixture
def worn(path: Path) -> Path:
    """A store whose full-text index was merged so often that older releases of SQLite call it malformed."""
    connection = sqlite3.connect(path, isolation_level=None)
    with suppress(sqlite3.DatabaseError):  # newer ones stop adding levels
        for i in range(2100):
            connection.execute("INSERT INTO fact_words (rowid, scope, text) VALUES (?, 'o1', 'amber')", (10_000 + i,))
            connection.execute("INSERT INTO fact_words (fact_words) VALUES ('optimize')")
        connection.execute("DELETE FROM fact_words WHERE rowid >= 10000")
    connection.close()
    return path


def test_a_worn_full_text_index_is_built_anew(worn: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(worn, embedder=None, enabled=False)
    memory.repair()
    assert memory.verify().problems == ()
    number = memory.remember(MONDAY, "The gate code is heliotrope.")
    assert memory.search(MONDAY, "heliotrope", limit=1)[0].id == number


def test_purging_does_not_wear_a_full_text_index_out(path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(path, embedder=None, enabled=False)
    for i in range(2100):
        with memory.store.write() as connection:
            fulltext.add_fact(connection, 10_000 + i, 1, None, f"amber word{i}")
            fulltext.optimize(connection)
    with memory.store.write() as connection:
        assert fulltext.drop_facts(connection, range(10_000, 12_100)) == 2100
        fulltext.optimize(connection)
    assert memory.verify().problems == ()
    assert not any(b"word2099" in bytes(str(row), "utf-8") for row in tables(path)["fact_words_data"])
