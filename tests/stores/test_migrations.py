"""Migrations: an older store is brought up to date with what is in it, and ends at the typed schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import inspect

from memstream.errors import StoreError
from memstream.memory import Scope, SqlStore
from memstream.stores import migrations, schema, sqlite
from tests.stores.conftest import MakeMemory

OLD_ROWS = """
INSERT INTO owners (id, namespace, user_key) VALUES (1, 'n', 'u');
INSERT INTO conversations VALUES (1, 1, 'c', '2026-01-02 03:04:05.000000');
INSERT INTO turns VALUES (1, 1, 0, 'user', 'amber basil', 2, '2026-01-02 03:04:05.000000', 'complete', 0);
INSERT INTO turns VALUES (2, 1, 1, 'assistant', 'noted', 1, '2026-01-02 03:04:06.000000', 'complete', 0);
INSERT INTO chunks VALUES (1, 1, 1, NULL, 'window', 0, 1, 'amber basil' || char(10) || 'noted');
INSERT INTO turn_words (rowid, scope, text) VALUES (1, 'o1 c1', 'amber basil');
INSERT INTO turn_words (rowid, scope, text) VALUES (2, 'o1 c1', 'noted')
"""


def columns(path: Path) -> dict[str, set[tuple[str, str, bool]]]:
    engine = sqlite.connect(path)
    found = {
        table: {
            (c["name"], str(c["type"]).split("(")[0], bool(c["nullable"])) for c in inspect(engine).get_columns(table)
        }
        for table in schema.Base.metadata.tables
    }
    engine.dispose()
    return found


def test_an_older_store_is_upgraded_with_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_memory: MakeMemory
) -> None:
    path = tmp_path / "a.db"
    with monkeypatch.context() as older:
        older.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        store = SqlStore.open(path)
        with store.write() as connection:
            for statement in OLD_ROWS.split(";\n"):
                connection.exec_driver_sql(statement)
        store.close()
    assert not any("gate" in name for name, *_ in columns_of(path, "spaces"))
    memory = make_memory(path)
    memory.flush()
    assert [item.text for item in memory.search(Scope("n", "u"), "amber")][:1] == ["amber basil"]
    assert memory.verify().problems == ()
    assert memory.verify().counts["turn_embeddings"] == 2


def columns_of(path: Path, table: str) -> set[tuple[str, ...]]:
    engine = sqlite.connect(path)
    found = {(c["name"],) for c in inspect(engine).get_columns(table)}
    engine.dispose()
    return found


def test_migrations_end_at_the_typed_schema(tmp_path: Path) -> None:
    SqlStore.open(tmp_path / "a.db").close()
    found = columns(tmp_path / "a.db")
    for name, table in schema.Base.metadata.tables.items():
        keys = {column.name for column in table.primary_key}
        expected = {column.name: bool(column.nullable) for column in table.columns}
        assert {column for column, _, _ in found[name]} == set(expected), name
        assert {c: n for c, _, n in found[name] if c not in keys} == {
            c: n for c, n in expected.items() if c not in keys
        }, name


def test_a_migration_that_fails_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    SqlStore.open(path).close()
    before = columns(path)

    def fails(connection: object) -> None:
        connection.exec_driver_sql("CREATE TABLE half (id INTEGER)")  # type: ignore[attr-defined]
        connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")  # type: ignore[attr-defined]

    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, ("0099-fails", fails)])
    with pytest.raises(StoreError, match="nowhere"):
        SqlStore.open(path)
    monkeypatch.undo()
    assert columns(path) == before
    store = SqlStore.open(path)
    with store.read() as connection:
        assert not inspect(connection).has_table("half")
    store.close()
