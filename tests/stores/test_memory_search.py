"""What a search reads: never a scope as a whole, and of a large one what it reads of a small one."""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from memstream.memory import Document, Memory, Scope, reach
from memstream.stores import fulltext, vectors
from memstream.stores.base import Vectors
from memstream.stores.sql import SqlStore
from tests.stores.conftest import MakeMemory, Place
from tests.stores.filled import MONDAY, fill
from tests.stores.tiny import WORDS, TinyEmbedder, count_words, say, sentence

USER = Scope("n", "u", "c")
_TABLES = r"(?:turns|chunks|facts|embeddings|turn_embeddings|passages)"
_WHOLE = re.compile(rf"SCAN {_TABLES}\b|SEARCH {_TABLES} USING .*\((?:owner_id|conversation_id|fact_id)=\?\)")


def statements(memory: Memory, question: str, window_from: int | None = None) -> list[tuple[str, Any]]:
    """Those of one recall, with their values."""
    seen: list[tuple[str, Any]] = []

    def note(_c: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        seen.append((statement, values))

    event.listen(memory.store._engine, "before_cursor_execute", note)
    memory.recall(USER, [question], window_from=window_from, budget_tokens=50, count_tokens=count_words)
    event.remove(memory.store._engine, "before_cursor_execute", note)
    return seen


@pytest.mark.parametrize("question", ["amber basil", "What about amber in May?"])
def test_no_statement_reads_all_that_somebody_has(tmp_path: Path, make_memory: MakeMemory, question: str) -> None:
    memory = make_memory(tmp_path / "a.db")
    with memory.open_conversation(USER) as handle:
        for i in range(8):
            say(handle, f"I love amber river {i}. My sister moved to Oslo in 2019.", "basil")
    memory.remember(USER, "cedar amber")
    memory.add_documents(Scope("n", "u"), Document(name="kb", text="amber basil"))
    memory.flush()
    statements(memory, question)  # makes the gate and opens the index
    seen = [(s, v) for s, v in statements(memory, question, 10) if s.startswith("SELECT")]
    assert len(seen) > 10
    connection = sqlite3.connect(tmp_path / "a.db")
    for statement, values in seen:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
        if "JOIN pins" not in statement:  # read newest first, as many as there is room for
            assert not [step for step in plan if _WHOLE.search(step)], (statement, plan)
    connection.close()


def sizes(memory: Memory) -> Counter[tuple[str, str]]:
    """What the store has noted, without scopes of which nothing is left."""
    with memory.store.read() as connection:
        return +Counter({(row[0], row[1]): row[2] for row in connection.execute(text("SELECT * FROM sizes"))})


def test_how_much_a_scope_has_is_noted(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    fill(memory)  # forgets and supersedes, too
    memory.add_documents(Scope("acme", knowledge=True), Document(name="kb", text="amber basil"))
    with memory.store.read() as connection:
        counted = fulltext.count(connection)
        n_turns = connection.scalar(text("SELECT count(*) FROM turn_words"))
    assert sizes(memory) == counted
    assert counted["turn_words", fulltext.ALL] == n_turns
    assert counted["passage_words", fulltext.ALL] == 1
    memory.delete_conversation(MONDAY)
    with memory.store.read() as connection:
        assert sizes(memory) == fulltext.count(connection) != counted
    assert memory.verify().problems == ()


def test_what_the_window_holds_is_not_counted(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(USER) as handle:
        for _ in range(6):
            _, undone = say(handle, "amber", "basil")
        handle.supersede([undone])
        handle.begin_turn("assistant", "", 0)
    memory.remember(USER, "amber")
    memory.flush()
    for window_from, n in ((None, 12), (8, 9), (0, 1)):
        found = memory.recall(USER, ["amber"], window_from=window_from, budget_tokens=50, count_tokens=count_words)
        assert found.n_considered == n


@pytest.mark.parametrize("user", ["u", None])
def test_a_scope_with_most_of_the_store_finds_the_same(
    make_memory: MakeMemory, place: Place, monkeypatch: pytest.MonkeyPatch, user: str | None
) -> None:
    memory, rng = make_memory(place), random.Random(3)
    for scope in (Scope("n", user, "c"), Scope("n", "other", "c"), Scope("m", user, "c")):
        with memory.open_conversation(scope) as handle:
            for _ in range(12):
                say(handle, sentence(rng), sentence(rng))
        for _ in range(12):
            memory.remember(scope, sentence(rng))
        if scope.user is not None:
            memory.add_documents(Scope(scope.namespace, scope.user), Document(name="kb", text=sentence(rng)))
    memory.flush()
    asking = Scope("n", user, "c")
    ordinary = [memory.search(asking, word, limit=99) for word in WORDS]
    monkeypatch.setattr(reach, "_MANY", 1)
    monkeypatch.setattr(reach, "_MOST_PART", 100)
    assert [memory.search(asking, word, limit=99) for word in WORDS] == ordinary
    assert sum(map(len, ordinary)) > 100


def test_of_a_word_that_is_everywhere_the_newest_are_looked_at(
    make_memory: MakeMemory, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_POSTINGS", 6)
    monkeypatch.setattr(reach, "_LEAST_POSTINGS", 2)
    memory = make_memory(place, embedder=None)
    facts = [memory.remember(USER, f"amber {word}") for word in ("basil", "cedar", "delta", "ember", "fjord", "basil")]
    assert {hit.id for hit in memory.search(USER, "amber")} == set(facts)
    assert {hit.id for hit in memory.search(USER, "amber zephyr velvet")} == set(facts[-2:])
    found = memory.search(USER, "amber basil velvet")
    assert [hit.id for hit in found] == [facts[5], facts[0], facts[4]]
    assert [hit.why.terms for hit in found] == [("amber", "basil"), ("basil",), ("amber",)]


def test_a_window_larger_than_what_is_looked_at_hides_nothing(
    make_memory: MakeMemory, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_POSTINGS", 2)
    monkeypatch.setattr(reach, "_LEAST_POSTINGS", 2)
    memory = make_memory(place, embedder=None)
    with memory.open_conversation(USER) as handle:
        first, _ = say(handle, "amber basil", "cedar")
        for _ in range(5):
            say(handle, "amber", "amber")
    found = memory.recall(USER, ["amber"], window_from=2, budget_tokens=50, count_tokens=count_words)
    assert [note.id for note in found.notes] == [f"turn:{first}"]


def test_of_many_pinned_facts_as_many_are_read_as_there_is_room_for(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, embedder=None)
    for word in WORDS[:20]:
        memory.remember(USER, word)
    for budget, n in ((-5, 0), (0, 0), (9, 3), (300, 20)):
        found = memory.recall(USER, ["zephyr"], window_from=None, budget_tokens=budget, count_tokens=lambda _: 1)
        assert [note.text for note in found.notes] == WORDS[:20][::-1][:n]


def test_dates_are_looked_up_in_the_scope_alone(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    for user in ("u", "v"):
        with memory.open_conversation(Scope("n", user, "c")) as handle:
            for day in (1, 15, 28):
                turn = handle.begin_turn("user", f"basil {user} {day}", 3, datetime(2026, 5, day, tzinfo=UTC))
                handle.finish_turn(handle.begin_turn("assistant", "", 0), f"noted {turn}", 2, "complete")
    memory.flush()
    ranked = memory._retriever.rank(
        USER, ["What was on 15 May?"], window_from=None, gate=lambda: -1.0, today=date(2026, 11, 30)
    )
    dated = [hit for hit in ranked.hits if "date" in hit.boosts]
    assert dated[0].text == "basil u 15"
    assert not [hit for hit in ranked.hits if hit.text.startswith("basil v")]


def test_sizes_of_an_older_store_are_counted(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    fill(memory)
    noted = sizes(memory)
    memory.close()
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.executescript(
        "DROP TABLE sizes; DROP INDEX turns_by_time; DELETE FROM migrations WHERE name = '0007-search'"
    )
    connection.close()
    SqlStore.open(tmp_path / "a.db").close()
    assert sizes(make_memory(tmp_path / "a.db")) == noted


def test_storing_a_vector_reads_as_little_in_a_large_store(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")

    def steps() -> int:
        """Of SQLite's machine, tens of them, when the newest fact's vector is looked after."""
        memory.flush()
        with memory.store.read() as connection:
            space = vectors.find_space(connection)
            newest = connection.scalar(text("SELECT max(id) FROM chunks"))
            assert space is not None
            n, raw = [0], connection.connection.driver_connection
            assert isinstance(raw, sqlite3.Connection)
            raw.set_progress_handler(lambda: n.append(n.pop() + 1), 10)
            for kind in ("chunk", "turn"):
                assert vectors.pending_of(connection, space, [vectors.Pending(kind, newest, "")]) == []  # type: ignore[arg-type]
            raw.set_progress_handler(None, 0)
        return n[0]

    for i in range(20):
        memory.remember(USER, f"amber {i}")
    few = steps()
    for i in range(600):
        memory.remember(USER, f"basil {i}")
    assert steps() <= few + 2


class WaitedFor(TinyEmbedder):
    """Takes note of whether somebody waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = False

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.waited |= threading.current_thread() is threading.main_thread()
        return super().embed(texts)


def test_nobody_waits_for_the_embedder_where_there_is_nothing_to_search(
    tmp_path: Path, make_memory: MakeMemory
) -> None:
    embedder = WaitedFor()
    memory = make_memory(tmp_path / "a.db", embedder=embedder)
    asked: dict[str, Any] = {"budget_tokens": 50, "count_tokens": count_words}
    with memory.open_conversation(USER) as handle:
        say(handle, "amber", "basil")
        told = memory.recall(USER, ["amber"], window_from=0, **asked)
        assert (told.n_considered, told.notes) == (0, ())
        assert not embedder.waited
        assert memory.recall(USER, ["amber"], window_from=1, **asked).n_considered == 1
        assert embedder.waited
