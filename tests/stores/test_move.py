"""A store copied into another kind of database is the same store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import func, select

from memstream.errors import InputError, StoreError
from memstream.memory import Memory, Scope, SqlStore
from memstream.stores import lines, move
from memstream.stores import schema as db
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import TinyEmbedder, say

SCOPE, OTHER, ALONE = Scope("n", "u", "c"), Scope("m", "u", "c"), Scope("n", None, "c")


def fill(memory: Memory) -> None:
    with memory.open_conversation(SCOPE) as handle:
        first = say(handle, "amber running dogs 東京", "basil\u2028łódź")
        second = say(handle, "cedar", "delta")
        say(handle, "ember", "fjord")
        handle.evicted(first + second)
        memory.flush()
        handle.supersede([second[1]])
        last = say(handle, "zephyr", "")
    for scope in (OTHER, ALONE):
        with memory.open_conversation(scope) as handle:
            say(handle, "grove amber", "heron")
    memory.remember(SCOPE, "my cat is Tom")
    memory.flush()
    memory.forget(SCOPE, f"turn:{last[1]}")
    gone = memory.remember(SCOPE, "a fact that goes")
    memory.flush()
    memory.forget(SCOPE, gone)
    with memory.store.write() as connection:
        stream = lines.add_stream(connection, "app.log")
        template = lines.ensure_template(connection, "disk full on")
        new = [
            lines.NewLine(
                stream_id=stream,
                number=i,
                offset=12 * (i - 1),
                template_id=template,
                time=None,
                level=None,
                text=f"disk full {i}",
            )
            for i in (1, 2)
        ]
        lines.add_lines(connection, new)
    memory.flush()


def contents(memory: Memory) -> dict[str, list[tuple[object, ...]]]:
    with memory.store.read() as connection:
        found = {}
        for name in ("turns", "facts", "pins", "chunks", "derived", "embeddings", "turn_embeddings", "events", "lines"):
            table = db.Base.metadata.tables[name]
            found[name] = [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
        return found


def searches(memory: Memory) -> list[object]:
    found: list[object] = []
    for scope in (SCOPE, OTHER, ALONE):
        for query in ("amber", "dogs", "東京", "Łódź", "cat", "delta"):
            found.append([(hit.id, hit.text, hit.why.score) for hit in memory.search(scope, query)])
    with memory.store.read() as connection:
        found.append(lines.lines_of(connection, 1, ["disk", "2"], 10))
        found.append(lines.templates_with(connection, "full"))
    return found


def next_ids(memory: Memory) -> tuple[int, str]:
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, "jolly", "kayak")
    return asked, memory.remember(SCOPE, "another fact")


def test_there_and_back_again(tmp_path: Path, new_database: Callable[[], str], make_memory: MakeMemory) -> None:
    first = make_memory(tmp_path / "a.db")
    fill(first)
    url, back = new_database(), tmp_path / "b.db"
    for source_url, target_url in ((tmp_path / "a.db", url), (url, back)):
        source, target = SqlStore.open(source_url), SqlStore.open(target_url)
        copied = move.move(source, target)
        assert copied["turns"] == 11
        assert copied["lines"] == 2
        source.close()
        target.close()
    moved, returned = make_memory(url, index="pgvector"), make_memory(back)
    assert contents(first) == contents(moved) == contents(returned)
    assert searches(first) == searches(moved) == searches(returned)
    for memory in (moved, returned):
        assert memory.verify().problems == ()
        assert memory.verify().pending == 0
    assert TinyEmbedder().n_texts == 0
    assert next_ids(first) == next_ids(moved) == next_ids(returned)  # what was forgotten is not numbered again


def test_a_store_that_has_something_is_not_written_to(tmp_path: Path, make_memory: MakeMemory) -> None:
    one, two = make_memory(tmp_path / "a.db"), make_memory(tmp_path / "b.db", embedder=None)
    one.remember(SCOPE, "amber")
    two.remember(SCOPE, "basil")
    with pytest.raises(InputError, match=r"is not empty \(it has owners"):
        move.move(one.store, two.store)
    assert [item.text for item in two.memories(SCOPE)] == ["basil"]


def test_all_arrives_or_nothing(tmp_path: Path, make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_memory(tmp_path / "a.db")
    fill(one)
    target = SqlStore.open(tmp_path / "b.db")

    def fail(table: str, _: int) -> None:
        if table == "embeddings":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        move.move(one.store, target, fail)
    real = move._digest
    with monkeypatch.context() as other:  # what is read back differs from what was sent
        seen: list[int] = []
        other.setattr(move, "_digest", lambda digest, rows: real(digest, rows[len(seen) and 1 :]) or seen.append(1))
        with pytest.raises(StoreError, match="did not arrive as it was sent"):
            move.move(one.store, target)
    with target.read() as connection:
        for table in db.Base.metadata.sorted_tables:
            if table.name != "migrations":
                assert connection.scalar(select(func.count()).select_from(table)) == 0
    move.move(one.store, target)
    target.close()
    assert make_memory(tmp_path / "b.db").verify().problems == ()
