"""Migrations: an older store is brought up to date with what is in it, and ends at the typed schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import insert, inspect

from memstream.errors import StoreError
from memstream.memory import Scope, SqlStore
from memstream.stores import lines, migrations, schema, sqlite, vectors
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import TinyEmbedder

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


BEFORE_DOCUMENTS = """
INSERT INTO facts VALUES (7, 1, NULL, 'likes cedar', '2026-01-02 03:04:05.000000');
INSERT INTO fact_words (rowid, scope, text) VALUES (7, 'o1', 'likes cedar');
INSERT INTO chunks VALUES (20, 1, 1, NULL, 'summary', 0, 1, 'amber basil');
INSERT INTO chunks VALUES (21, 1, NULL, 7, 'fact', NULL, NULL, 'likes cedar');
INSERT INTO chunks VALUES (40, 1, NULL, 7, 'fact', NULL, NULL, 'gone');
DELETE FROM chunks WHERE id = 40;
INSERT INTO derived VALUES (5, 20, 'summary', 'amber basil', '[1, 2]');
INSERT INTO derived VALUES (9, 20, 'summary', 'gone', '[1, 2]');
DELETE FROM derived WHERE id = 9
"""


def test_chunks_are_rebuilt_for_documents_with_all_that_points_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_memory: MakeMemory
) -> None:
    path, embedder = tmp_path / "a.db", TinyEmbedder()
    with monkeypatch.context() as older:
        older.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:4])
        store = SqlStore.open(path)
        with store.write() as connection:
            for statement in (OLD_ROWS + ";\n" + BEFORE_DOCUMENTS).split(";\n"):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(
                "INSERT INTO spaces (id, name, fingerprint, dimension, normalised) VALUES (1, ?, ?, ?, 1)",
                (embedder.name, embedder.fingerprint, embedder.dimension),
            )
            texts = ["amber basil\nnoted", "amber basil", "likes cedar"]
            for chunk_id, vector in zip((1, 20, 21), embedder.embed(texts), strict=True):
                connection.exec_driver_sql(
                    "INSERT INTO embeddings (chunk_id, space_id, vector) VALUES (?, 1, ?)",
                    (chunk_id, vectors.pack(vector)),
                )
                connection.execute(insert(schema.Event).values(action="add", chunk_id=chunk_id))
        store.close()
    n_texts = embedder.n_texts
    memory = make_memory(path, embedder=embedder)
    memory.flush()
    assert embedder.n_texts == n_texts + 2  # the turns by themselves; the chunks have kept their vectors
    with memory.store.read() as connection:
        chunks = connection.exec_driver_sql("SELECT id, kind, fact_id, text FROM chunks ORDER BY id").all()
        derived = connection.exec_driver_sql("SELECT id, chunk_id, sources FROM derived").all()
        counted = dict(connection.exec_driver_sql("SELECT name, seq FROM sqlite_sequence").all())
    assert chunks == [
        (1, "window", None, "amber basil\nnoted"), (20, "summary", None, "amber basil"), (21, "fact", 7, "likes cedar"),
    ]  # fmt: skip
    assert derived == [(5, 20, "[1, 2]")]
    assert (counted["chunks"], counted["derived"]) == (40, 9)  # no id is used again
    assert not any(name.startswith("new_") for name in counted)
    fact = memory.remember(Scope("n", "u"), "delta")
    memory.flush()
    with memory.store.read() as connection:
        assert connection.exec_driver_sql("SELECT max(id) FROM chunks").scalar() == 41
    assert memory.forget(Scope("n", "u"), fact).verified
    assert memory.forget(Scope("n", "u"), "turn:1").removed["derived"] == 1  # what points to a chunk goes with it
    memory.flush()
    assert memory.verify().problems == ()


def test_chunks_are_of_the_kinds_that_are_used_and_point_to_what_is_there(tmp_path: Path) -> None:
    store = SqlStore.open(tmp_path / "a.db")
    bad = ("kind, text) VALUES (1, 'document', '')", "kind, passage_id, text) VALUES (1, 'passage', 9, '')")
    with store.write() as connection:
        connection.exec_driver_sql("INSERT INTO owners (id, namespace, user_key) VALUES (1, 'n', 'u')")
    for row, why in zip(bad, ("CHECK", "FOREIGN KEY"), strict=True):
        with pytest.raises(StoreError, match=why), store.write() as connection:
            connection.exec_driver_sql(f"INSERT INTO chunks (owner_id, {row}")
    with store.read() as connection:
        for table in ("derived", "embeddings"):
            keys = connection.exec_driver_sql(f"PRAGMA foreign_key_list({table})").mappings()
            assert ("chunks", "CASCADE") in {(key["table"], key["on_delete"]) for key in keys}
        assert {i["name"] for i in inspect(connection).get_indexes("chunks")} == {
            "chunks_by_owner", "chunks_by_range", "chunks_by_fact", "chunks_by_passage",
        }  # fmt: skip
    store.close()


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


def test_lines_of_an_older_store_have_no_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    with monkeypatch.context() as older:
        older.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:7])
        store = SqlStore.open(path)
        with store.write() as connection:
            for statement in (
                "INSERT INTO streams VALUES (1, 'app.log', '2026-01-02 03:04:05.000000')",
                "INSERT INTO templates (id, text) VALUES (1, 'disk full')",
                "INSERT INTO lines (id, stream_id, number, template_id, text) VALUES (1, 1, 1, 1, 'disk full')",
            ):
                connection.exec_driver_sql(statement)
        store.close()
    store = SqlStore.open(path)
    with store.write() as connection:
        lines.add_lines(
            connection,
            [
                lines.NewLine(
                    stream_id=1, number=2, offset=10, template_id=1, time=None, level=None, text="disk full again"
                )
            ],
        )
        found = lines.lines_of(connection, 1, [], 5)
    store.close()
    assert [(line.line, line.offset) for line in found] == [(1, None), (2, 10)]
