"""Forgetting is complete: rows, keys, vectors, words, snapshots, and the bytes in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream.errors import InputError
from memstream.memory import Memory, Scope
from tests.stores.conftest import MakeMemory, Place
from tests.stores.tiny import count_words, say

SCOPE = Scope("n", "u", "c")
SECRET = "zanzibarium quixotolite"
LONG = " ".join(f"Willow number {i} is by the river." for i in range(60))  # no window holds all of it


def files_with(folder: Path, word: str) -> list[str]:
    """Names of files that hold a word's bytes, in any case."""
    return [p.name for p in folder.rglob("*") if p.is_file() and word.encode() in p.read_bytes().lower()]


def count(memory: Memory, statement: str) -> int:
    with memory.store.read() as connection:
        return int(connection.exec_driver_sql(statement).scalar() or 0)


def test_a_forgotten_turn_is_gone_from_every_file(tmp_path: Path, make_memory: MakeMemory, backend: str) -> None:
    memory = make_memory(tmp_path / "a.db", index=backend)
    with memory.open_conversation(SCOPE) as handle:
        for i in range(20):
            say(handle, f"amber basil number{i}", f"cedar delta reply{i}")
        asked, replied = say(handle, f"My word is {SECRET}.", LONG)
        for i in range(20, 40):
            say(handle, f"amber basil number{i}", f"cedar delta reply{i}")
        handle.evicted([asked, replied])
        snapshot = handle.snapshot_path
        assert snapshot is not None
        snapshot.write_bytes(b"keys that have seen zanzibarium")
        handle.record_snapshot("f", 81, 0)
        assert handle.find_snapshot("f", 81) == snapshot
        assert handle.find_snapshot("g", 81) is None
        assert handle.find_snapshot("f", 80) is None
        memory.flush()
        memory._index.checkpoint()
        assert files_with(tmp_path, "zanzibarium") != []
        n_chunks = count(memory, "SELECT count(*) FROM chunks")
        receipt = memory.forget(SCOPE, f"turn:{asked}")
        assert receipt.verified
        assert receipt.echoes == ()
        assert receipt.snapshots == 1
        # Two windows and a summary held it; both windows had vectors, and so had the summary.
        assert receipt.removed == {
            "turns": 1, "words": 1, "turn_embeddings": 1, "chunks": 3, "embeddings": 3, "derived": 1,
        }  # fmt: skip
        assert files_with(tmp_path, "zanzibarium") == files_with(tmp_path, "quixotolit") == []
        assert handle.find_snapshot("f", 81) is None
        memory.flush()
        assert count(memory, "SELECT count(*) FROM chunks") == n_chunks  # two new windows, one new summary
        assert count(memory, f"SELECT count(*) FROM derived WHERE kind = 'summary' AND sources = '[{replied}]'") == 1
    assert memory.verify().problems == ()
    assert f"turn:{asked}" not in {hit.id for hit in memory.search(SCOPE, SECRET, limit=1000)}
    memory.close()
    assert files_with(tmp_path, "zanzibarium") == []
    assert make_memory(tmp_path / "a.db", index=backend).verify().problems == ()


def test_the_vector_is_gone_from_the_index_file(tmp_path: Path, make_memory: MakeMemory, backend: str) -> None:
    memory = make_memory(tmp_path / "a.db", index=backend)
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, SECRET)
        say(handle, "amber")
    memory.flush()
    memory._index.checkpoint()
    index = tmp_path / "a.db-index"
    with memory.store.read() as connection:
        from memstream.stores import vectors

        space = vectors.find_space(connection)
        assert space is not None
        _, matrix, _ = vectors.read(connection, space, [1])
    saved = vectors.pack(matrix[0])
    assert saved in index.read_bytes()
    memory.forget(SCOPE, f"turn:{asked}")
    assert saved not in index.read_bytes()


def test_what_a_killed_save_of_the_index_left_is_removed(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a[1].db")
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, SECRET)
    memory.flush()
    left = tmp_path / "a[1].db-index.killed.tmp"
    left.write_bytes(b"vectors")
    assert memory.forget(SCOPE, f"turn:{asked}").verified
    assert not left.exists()


def test_echoes_are_listed_and_stay_until_forgotten(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        asked, replied = say(handle, f"My word is {SECRET}.", f"So your word is {SECRET}.")
        say(handle, "amber basil", "quixotolite alone")
    fact = memory.remember(SCOPE, f"The word: {SECRET}")
    with memory.open_conversation(Scope("n", "other", "c")) as handle:
        say(handle, f"My word is {SECRET}.")
    receipt = memory.forget(SCOPE, f"turn:{asked}")
    assert receipt.echoes == (fact, f"turn:{replied}")
    assert receipt.verified
    memory.forget(SCOPE, fact)
    assert memory.forget(SCOPE, f"turn:{replied}").echoes == ()


def test_a_forgotten_fact_is_gone(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    fact = memory.remember(SCOPE, f"Prefers {SECRET}")
    memory.flush()
    assert memory.show(SCOPE, fact).why.pinned
    receipt = memory.forget(SCOPE, fact)
    assert receipt.removed == {"facts": 1, "pins": 1, "words": 1, "chunks": 1, "embeddings": 1, "derived": 0}
    assert receipt.verified
    recall = memory.recall(SCOPE, [SECRET], window_from=None, budget_tokens=50, count_tokens=count_words)
    assert recall.notes == ()
    assert files_with(tmp_path, "zanzibarium") == []
    assert memory.verify().problems == ()


def test_nobody_shows_or_forgets_what_is_not_theirs(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, SECRET)
    with memory.open_conversation(Scope("n", None, "c")) as handle:
        anonymous, _ = say(handle, SECRET)
    fact = memory.remember(SCOPE, SECRET)
    others = [Scope("n", "v", "c"), Scope("m", "u", "c"), Scope("n", None, "c"), Scope("n", "v")]
    for scope in others:
        for memory_id in (f"turn:{asked}", fact):
            with pytest.raises(InputError, match=f"no {memory_id}"):
                memory.show(scope, memory_id)
            with pytest.raises(InputError, match=f"no {memory_id}"):
                memory.forget(scope, memory_id)
    with pytest.raises(InputError):
        memory.forget(Scope("n", None, "d"), f"turn:{anonymous}")
    for wrong in ("17", "turn:", "turn:x", "fact:-1", "turn:1; DROP TABLE turns", "turn:999"):
        with pytest.raises(InputError):
            memory.forget(SCOPE, wrong)
    assert memory.show(SCOPE, f"turn:{asked}").text == SECRET
    assert memory.scope_of(f"turn:{asked}") == SCOPE
    assert memory.scope_of(fact) == Scope("n", "u")
    assert memory.scope_of("turn:999") is None


def test_a_turn_that_is_still_being_said_cannot_be_forgotten(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        handle.begin_turn("user", "amber", 1)
        replied = handle.begin_turn("assistant", "", 0)
        with pytest.raises(InputError, match="still being said"):
            memory.forget(SCOPE, f"turn:{replied}")
        handle.finish_turn(replied, "basil", 1, "complete")
        assert memory.forget(SCOPE, f"turn:{replied}").removed["turns"] == 1


def test_ids_are_not_used_again(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        _, last = say(handle, "amber")
        memory.forget(SCOPE, f"turn:{last}")
        after, _ = say(handle, "basil")
    assert after > last
    assert memory.verify().problems == ()


def test_what_is_forgotten_while_it_is_embedded_does_not_come_back(make_memory: MakeMemory, place: Place) -> None:
    import threading

    from tests.stores.tiny import TinyEmbedder

    started, go = threading.Event(), threading.Event()

    class Slow(TinyEmbedder):
        def embed(self, texts: list[str]):  # type: ignore[no-untyped-def]
            if any(SECRET in text for text in texts) and threading.current_thread().name.startswith("memstream"):
                started.set()
                assert go.wait(10)
            return super().embed(texts)

    memory = make_memory(place, embedder=Slow())
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, SECRET)
        assert started.wait(10)
        receipt = memory.forget(SCOPE, f"turn:{asked}")
        go.set()
    memory.flush()
    assert receipt.verified
    assert memory.verify().problems == ()
    assert count(memory, "SELECT count(*) FROM turn_embeddings") == 1
    assert count(memory, "SELECT count(*) FROM embeddings") == 1
