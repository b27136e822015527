"""Opening: where a store may be, and everything that is not one."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from memstream.errors import ConfigError, StoreCorruptError, StoreError, StoreVersionError
from memstream.memory import Scope, SqlStore
from memstream.stores import migrations, sqlite
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import say


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memory", None),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("sqlite:////srv/a.db", Path("/srv/a.db")),
        ("/srv/a b.db", Path("/srv/a b.db")),
    ],
)
def test_names_of_stores(name: str, expected: Path | None) -> None:
    assert sqlite.locate(name) == expected


def test_relative_names_are_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite.locate("sqlite:///a.db") == sqlite.locate("a.db") == tmp_path / "a.db"


@pytest.mark.parametrize("name", ["mysql://h/db", "", "sqlite://host/a.db", "a\x00b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        SqlStore.open(name)


def test_every_file_is_private(tmp_path: Path, make_memory: MakeMemory) -> None:
    old = os.umask(0)
    try:
        memory = make_memory(tmp_path / "a.db")
        with memory.open_conversation(Scope("n", "u", "c")) as handle:
            say(handle, "amber")
            path = handle.snapshot_path
            assert path is not None
            path.write_bytes(b"x")
            handle.record_snapshot("f", 1, 0)
            memory.flush()
            memory._index.checkpoint()
            seen = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    finally:
        os.umask(old)
    assert {"a.db", "a.db-wal", "a.db-shm", "a.db-index", "a.db-snapshots", "a.db-locks"} <= set(seen)
    folders = {"a.db-snapshots", "a.db-locks"}
    assert {name: mode for name, mode in seen.items() if mode != (0o700 if name in folders else 0o600)} == {}


def test_connections_have_the_pragmas(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path / "a.db")
    with store.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "secure_delete", "auto_vacuum", "busy_timeout")
        }
    store.close()
    assert pragmas == {
        "journal_mode": "wal", "foreign_keys": 1, "secure_delete": 1, "auto_vacuum": 2, "busy_timeout": 15000,
    }  # fmt: skip


def test_a_folder_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder"):
        SqlStore.open(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        SqlStore.open(tmp_path / "no" / "a.db")
    with pytest.raises(StoreError, match="no store at"):
        SqlStore.open(tmp_path / "a.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Dear diary, " * 100)
    (tmp_path / "short").write_bytes(b"SQLite format 3\x00")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE turns (id INTEGER)")
    other.execute("PRAGMA user_version = 7")
    other.commit()
    other.close()
    (tmp_path / "marked.db").write_bytes((tmp_path / "other.db").read_bytes())
    marked = sqlite3.connect(tmp_path / "marked.db")
    marked.execute("PRAGMA application_id = 42")
    marked.commit()
    marked.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(StoreCorruptError, match="nothing was changed"):
            SqlStore.open(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_emptied_store_is_not_taken_for_a_new_one(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    with memory.open_conversation(Scope("n", "u", "c")) as handle:
        say(handle, "amber")
    memory.close()
    os.truncate(tmp_path / "a.db", 0)
    with pytest.raises(StoreCorruptError, match="damaged"):
        SqlStore.open(tmp_path / "a.db")
    assert (tmp_path / "a.db").stat().st_size == 0


def test_a_damaged_store_says_so(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    with memory.open_conversation(Scope("n", "u", "c")) as handle:
        for _ in range(50):
            say(handle, "amber basil cedar")
    memory.close()
    data = bytearray((tmp_path / "a.db").read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    (tmp_path / "a.db").write_bytes(data)
    (tmp_path / "a.db-index").unlink()
    with pytest.raises(StoreCorruptError, match="damaged"):
        make_memory(tmp_path / "a.db").verify()


def test_a_creation_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    assert (tmp_path / "a.db").stat().st_size > 0
    store = SqlStore.open(tmp_path / "a.db")
    with store.read() as read:
        assert read.exec_driver_sql("SELECT count(*) FROM migrations").scalar() == len(migrations.MIGRATIONS)
    store.close()


def test_a_newer_store_is_refused_and_not_touched(tmp_path: Path) -> None:
    SqlStore.open(tmp_path / "a.db").close()
    newer = sqlite3.connect(tmp_path / "a.db")
    newer.execute("INSERT INTO migrations VALUES ('9999-future', '2030-01-01 00:00:00')")
    newer.commit()
    newer.close()
    before = (tmp_path / "a.db").read_bytes()
    with pytest.raises(StoreVersionError, match="9999-future"):
        SqlStore.open(tmp_path / "a.db")
    assert (tmp_path / "a.db").read_bytes() == before
