"""What only PostgreSQL can do wrong: connections, locks that end with them, many writers, HNSW indexes, long texts."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psycopg
import pytest
from sqlalchemy import insert, inspect, select, text

from memstream.errors import ConfigError, ConversationBusyError, MissingExtraError, StoreError
from memstream.memory import Memory, Scope, SqlStore
from memstream.stores import lines, rows, schema, vectors
from memstream.stores import schema as db
from memstream.stores.pgvector_index import PgVectorIndex
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import say

SCOPE = Scope("n", "u", "c")
ROOT = Path(__file__).resolve().parents[2]
NewDatabase = Callable[[], str]


def end_connections(url: str, *, holding_locks: bool) -> None:
    """What a restart of the server does to those who hold advisory locks, or to all others."""
    held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            f"AND pid <> pg_backend_pid() AND pid {'IN' if holding_locks else 'NOT IN'} ({held})"
        )


def test_migrations_end_at_the_typed_schema(new_database: NewDatabase) -> None:
    store = SqlStore.open(new_database())
    tables = {**schema.Base.metadata.tables, lines.LineRow.__tablename__: lines.LineRow.__table__}
    with store.read() as connection:
        for name, table in tables.items():
            columns = text(
                "SELECT column_name, is_nullable FROM information_schema.columns "
                "WHERE table_schema = 'memstream' AND table_name = :name"
            )
            there = {row[0]: row[1] == "YES" for row in connection.execute(columns, {"name": name})}
            assert there == {column.name: bool(column.nullable) for column in table.columns}, name
            key = inspect(connection).get_pk_constraint(name)["constrained_columns"]
            assert key == [column.name for column in table.primary_key], name
    store.close()
    again = SqlStore.open(str(store.database._url.render_as_string(hide_password=False)), create=False)  # type: ignore[attr-defined]
    again.close()


def test_what_cannot_be_opened_says_why(new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_database()
    with pytest.raises(StoreError, match="there is no store in postgresql://"):
        SqlStore.open(url, create=False)
    with pytest.raises(StoreError, match="no such database"):
        SqlStore.open(url.replace("/test", "/nowhere"))
    with pytest.raises(StoreError, match=r"cannot be reached.*is it running") as refused:
        SqlStore.open("postgresql://someone:secret@127.0.0.1:1/db")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        SqlStore.open("postgresql://[")
    with monkeypatch.context() as without:
        real = importlib.util.find_spec
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "psycopg" else real(name))
        with pytest.raises(MissingExtraError, match=r"pip install 'memstream\[postgres\]'"):
            SqlStore.open(url)


def test_a_newer_store_is_refused(new_database: NewDatabase) -> None:
    url = new_database()
    store = SqlStore.open(url)
    with store.write() as connection:
        connection.execute(insert(db.Migration).values(name="9999-later", applied=db.now()))
    store.close()
    with pytest.raises(StoreError, match="newer memstream"):
        SqlStore.open(url)


def test_a_conversation_has_one_owner(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    one, two = make_memory(url), make_memory(url)
    handle = one.open_conversation(SCOPE)
    for memory in (one, two):
        with pytest.raises(ConversationBusyError):
            memory.open_conversation(SCOPE)
    with two.open_conversation(Scope("n", "u", "other")) as other:
        say(other, "amber")
    timer = threading.Timer(0.2, handle.close)
    timer.start()
    with two.open_conversation(SCOPE, wait_s=30.0) as mine:
        say(mine, "basil")
    timer.join()


def test_a_killed_process_leaves_no_lock(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    code = (
        "from memstream.memory import Memory, Scope, SqlStore\nfrom memstream.config import RecallConfig\n"
        f"m = Memory(SqlStore.open({url!r}), None, RecallConfig())\n"
        "h = m.open_conversation(Scope('n', 'u', 'c'))\nh.begin_turn('assistant', 'half', 1)\n"
        "print('open', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    memory = make_memory(url)
    with pytest.raises(ConversationBusyError):
        memory.open_conversation(SCOPE)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with memory.open_conversation(SCOPE, wait_s=30.0) as handle:
        assert [turn.state for turn in handle.turns()] == ["cut"]


def test_who_lost_the_lock_writes_no_more(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    one, two = make_memory(url, embedder=None), make_memory(url, embedder=None)
    handle = one.open_conversation(SCOPE)
    say(handle, "amber")
    end_connections(url, holding_locks=True)
    with two.open_conversation(SCOPE, wait_s=30.0) as mine:
        with pytest.raises(StoreError, match="connection that owned the conversation was lost"):
            handle.begin_turn("user", "basil", 1)
        say(mine, "cedar")
        assert [turn.text for turn in mine.turns()] == ["amber", "Noted.", "cedar", "Noted."]
    handle.close()
    with one.open_conversation(SCOPE) as handle:
        say(handle, "delta")


def test_a_lost_lock_stays_lost_when_others_are_taken(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    one, two = make_memory(url, embedder=None), make_memory(url, embedder=None)
    lost = one.open_conversation(SCOPE)
    reply = lost.begin_turn("assistant", "", 0)
    end_connections(url, holding_locks=True)
    with one.open_conversation(Scope("n", "u", "other")) as other:  # on a new connection
        say(other, "amber")
        for write in (lambda: lost.begin_turn("user", "basil", 1), lambda: lost.finish_turn(reply, "cut", 1, "cut")):
            with pytest.raises(StoreError, match="connection that owned the conversation was lost"):
                write()
        with two.open_conversation(SCOPE) as mine:
            lost.close()  # what is no longer its own it does not give back
            with pytest.raises(ConversationBusyError):
                one.open_conversation(SCOPE)
            assert [(turn.text, turn.state) for turn in mine.turns()] == [("", "cut")]


def test_an_owner_hears_who_asks(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    one, two = make_memory(url, embedder=None), make_memory(url, embedder=None)
    with one.open_conversation(SCOPE) as mine, one.open_conversation(Scope("n", "u", "other")):
        two.ask_for(Scope("n", "u", "nobody has it"))
        two.ask_for(SCOPE)
        assert one.store.asked_for() == {mine.id}
        assert one.store.asked_for() == set()  # it has heard it
        timer = threading.Timer(0.2, lambda: [mine.close() for _ in one.store.asked_for()])
        timer.start()
        with two.open_conversation(SCOPE, wait_s=30.0):  # asks by itself
            assert one.store.asked_for() == set()
        timer.join()
    assert two.store.asked_for() == set()


def test_what_was_lost_is_told_until_it_is_closed(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    memory = make_memory(url, embedder=None)
    handle = memory.open_conversation(SCOPE)
    end_connections(url, holding_locks=True)
    assert memory.store.asked_for() == {handle.id}
    assert memory.store.asked_for() == {handle.id}
    handle.close()
    assert memory.store.asked_for() == set()
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
    assert memory.store.asked_for() == set()


def test_who_writes_is_followed_by_the_next_owner(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    """The lock is lost while its owner's transaction is under way: who opens the conversation sees what it wrote."""
    url = new_database()
    one, two = make_memory(url, embedder=None), make_memory(url, embedder=None)
    handle = one.open_conversation(SCOPE)
    opened: list[list[str]] = []

    def open_it() -> None:
        with two.open_conversation(SCOPE, wait_s=30.0) as mine:
            opened.append([turn.text for turn in mine.turns()])

    with one.store.write() as connection:
        one.store.check_owner(connection, handle.id)
        rows.insert_turn(connection, handle.id, "user", "amber", 1, "complete")
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE objid = %s AND granted", [handle.id])
        thread = threading.Thread(target=open_it)
        thread.start()
        thread.join(0.5)
        assert not opened
    thread.join()
    assert opened == [["amber"]]
    handle.close()


def test_connections_that_were_cut_are_made_again(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    url = new_database()
    memory = make_memory(url)
    memory.remember(SCOPE, "amber basil")
    memory.flush()
    end_connections(url, holding_locks=False)
    assert memory.search(SCOPE, "amber")[0].text == "amber basil"


def test_writers_of_several_stores_keep_the_events_in_order(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    """One that follows the events never misses one that was numbered early and committed late."""
    url = new_database()
    make_memory(url).close()
    follower = make_memory(url, index="exact")
    writers = [make_memory(url) for _ in range(3)]

    def write(memory: Memory, which: int) -> None:
        with memory.open_conversation(Scope("n", f"u{which}", "c")) as handle:
            for i in range(12):
                say(handle, f"amber number{i} of{which}")
                memory.flush()

    threads = [threading.Thread(target=write, args=(memory, i)) for i, memory in enumerate(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        follower._index.refresh()
    for thread in threads:
        thread.join()
    assert follower.verify().problems == ()
    assert follower._index.count() == 3 * (1 + 11)  # a window over the first exchange, and one from each exchange on


def test_a_text_too_long_for_one_index_entry_is_found_by_its_beginning(
    new_database: NewDatabase, make_memory: MakeMemory
) -> None:
    memory = make_memory(new_database(), embedder=None)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber " + " ".join(f"word{i}" for i in range(200_000)))
        (turn, _) = handle.turns()
    assert [hit.id for hit in memory.search(SCOPE, "amber")][:1] == [f"turn:{turn.id}"]
    assert turn.text.endswith(" word199999")
    assert memory.verify().problems == ()


def clustered(seed: int, n: int, d: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((8, d))
    matrix = centres[rng.integers(0, 8, n)] + 0.4 * rng.standard_normal((n, d))
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix.astype(np.float16).astype(np.float32)


def fill(store: SqlStore, scope: Scope, matrix: np.ndarray) -> int:
    """Facts with these vectors; returns the number of their scope."""
    with store.write() as connection:
        space = vectors.ensure_space(connection, "made", "made-1", matrix.shape[1])
        owner = rows.ensure_owner(connection, scope)
        for vector in matrix:
            values = {"owner_id": owner, "text": "amber"}
            fact = connection.execute(
                insert(db.Fact).values(**values, created=db.now()).returning(db.Fact.id)
            ).scalar_one()
            chunk = insert(db.Chunk).values(**values, kind="fact", fact_id=fact).returning(db.Chunk.id)
            item = vectors.Pending("chunk", connection.execute(chunk).scalar_one(), "amber")
            vectors.store(connection, space, [item], vector[None])
    return owner


def test_a_large_scope_gets_an_index_of_its_own(new_database: NewDatabase) -> None:
    store = SqlStore.open(new_database())
    large, small = clustered(1, 400), clustered(2, 30)
    scope = fill(store, Scope("n", "large"), large)
    other = fill(store, Scope("n", "small"), small)
    index = PgVectorIndex(store, large=100)
    index.refresh()
    query = clustered(3, 1)[0]

    def nearest(matrix: np.ndarray, first: int, k: int) -> list[int]:
        return [first + int(i) for i in np.argsort(-(matrix @ query), kind="stable")[:k]]

    assert index.search(query, scope, 10, []) == nearest(large, 1, 10)
    index.improve()
    with store.read() as connection:
        names = connection.scalars(text("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%hnsw%'")).all()
        assert list(names) == [f"embeddings_1_u{scope}"]
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        connection.exec_driver_sql("SET LOCAL enable_sort = off")
        plan = connection.exec_driver_sql(
            f"EXPLAIN SELECT chunk_id FROM embeddings WHERE space_id = 1 AND scope = {scope} "
            "ORDER BY vector::halfvec(16) <#> '[" + ",".join(["1"] * 16) + "]' LIMIT 10"
        ).all()
        assert f"embeddings_1_u{scope}" in str(plan)
    assert index.search(query, scope, 10, []) == nearest(large, 1, 10)
    assert index.search(query, other, 30, []) == nearest(small, 401, 30)  # all that a small scope has
    without = nearest(large, 1, 380)
    assert index.search(query, scope, 10, without) == nearest(large, 1, 390)[380:]  # filters cost no hits
    store.close()


def test_an_index_whose_making_was_interrupted_is_made_again(new_database: NewDatabase) -> None:
    store = SqlStore.open(new_database())
    fill(store, Scope("n", "u"), clustered(1, 40))
    index = PgVectorIndex(store, large=10)
    index.refresh()
    index.improve()
    with store.write() as connection:
        connection.exec_driver_sql(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'embeddings_1_u1'::regclass"
        )
    assert PgVectorIndex(store).problems() == ["the index embeddings_1_u1 is not whole; it is built again"]
    again = PgVectorIndex(store, large=10)
    again.refresh()
    again.improve()
    assert again.problems() == []
    store.close()


def test_forgotten_words_are_in_no_table(new_database: NewDatabase, make_memory: MakeMemory) -> None:
    memory = make_memory(new_database())
    with memory.open_conversation(SCOPE) as handle:
        asked, replied = say(handle, "zanzibarium amber", "quixotolit basil")
        say(handle, "cedar", "delta")
        handle.evicted([asked, replied])
        memory.flush()
        assert memory.forget(SCOPE, f"turn:{asked}").verified
    memory.flush()
    with memory.store.read() as connection:
        found = []
        for table in inspect(connection).get_table_names():
            for row in connection.execute(select(text("*")).select_from(text(table))):
                found += [table] if "zanzibarium" in str(row) else []
        vacuumed = connection.scalar(text("SELECT vacuum_count FROM pg_stat_user_tables WHERE relname = 'turns'"))
    assert found == []
    assert vacuumed >= 1
