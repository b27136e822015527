"""Bytes that SQLite leaves of deleted rows in the unused middle of its pages, and the wiping of them."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from memstream.errors import StoreError
from memstream.memory import ConversationHandle, Scope, forgetting
from memstream.stores import held, leftovers
from memstream.stores.sql import SqlStore
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import say

SCOPE = Scope("n", "u", "c")


def scramble(path: Path, seed: int) -> list[str]:
    """Writes, grows and deletes rows until pages were built anew over bytes of rows that moved; the deleted words."""
    rng, live, open_rows, gone = random.Random(seed), {}, [], []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("CREATE TABLE grown (id INTEGER PRIMARY KEY, text TEXT)")
        connection.execute("BEGIN")
        for n in range(3000):
            if rng.random() < 0.75:
                row = connection.execute("INSERT INTO grown (text) VALUES ('')").lastrowid
                open_rows.append((row, f"word{n}zq{rng.randrange(10**9)}"))
                if len(open_rows) > rng.randrange(1, 8):
                    row, word = open_rows.pop(rng.randrange(len(open_rows)))
                    filler = "y" * rng.choice([5, 50, 300, 1500])
                    connection.execute("UPDATE grown SET text = ? WHERE id = ?", (f"{word} {filler}", row))
                    live[row] = word
            elif live:
                row = rng.choice(list(live))
                connection.execute("DELETE FROM grown WHERE id = ?", (row,))
                gone.append(live.pop(row))
        connection.execute("COMMIT")
    return gone


def test_words_left_in_pages_are_seen_and_wiped(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    SqlStore.open(path).close()
    gone = scramble(path, seed=5)
    left = [word for word in gone if word.encode() in path.read_bytes()]
    assert left, "SQLite has learned to wipe; leftovers.py may go"
    descriptor, give_back = held.hold(path)
    assert not leftovers.found(descriptor, ["zanzibarium"])
    assert leftovers.found(descriptor, [f"We said {left[0].upper()}, indeed."])
    assert leftovers.found(descriptor, None)
    store = SqlStore.open(path)
    assert store.purge(left)
    store.close()
    assert [word for word in gone if word.encode() in path.read_bytes()] == []
    assert not leftovers.found(descriptor, None)
    give_back()
    with pytest.raises(OSError, match="descriptor"):
        held.read(descriptor, 1, 0)


def test_a_forget_leaves_no_byte_in_a_page_that_was_built_anew(tmp_path: Path, make_memory: MakeMemory) -> None:
    """Conversations whose replies grow while others are written, so that rows move between pages."""
    path, rng = tmp_path / "a.db", random.Random(1)
    memory = make_memory(path, embedder=None)
    told: dict[ConversationHandle, list[tuple[int, str]]] = {}
    gone: list[str] = []
    handles = [memory.open_conversation(Scope("n", "u", str(i))) for i in range(6)]
    with memory.store.write(durable=False):
        for n in range(300):
            handle = rng.choice(handles)
            replied = handle.begin_turn("assistant", "", 0)
            told.setdefault(handle, []).append((replied, f"word{n}zq{rng.randrange(10**9)}"))
            handle = rng.choice(list(told))
            turn, word = told[handle].pop(rng.randrange(len(told[handle])))
            if not told[handle]:
                del told[handle]
            handle.finish_turn(turn, f"{word} " + "y" * rng.choice([5, 50, 300, 1500]), 2, "complete")
    for handle in handles:
        handle.close()
    words = [note for note in memory.memories(Scope("n", "u"), limit=1000) if note.text]
    with memory.store.write(durable=False):
        for note in rng.sample(words, len(words) // 2):
            forgetting.forget(memory.store, Scope("n", "u"), note.id)
            words.remove(note)
            gone.append(note.text.split()[0])
    assert memory._purge()
    data = path.read_bytes()
    assert [word for word in gone if word.encode() in data] == []
    assert all(note.text.encode() in data for note in words)
    assert memory.verify().problems == ()


@pytest.mark.parametrize("how", ["closed", "forgotten", "opened"])
def test_what_could_not_be_wiped_at_once_is_wiped_later(
    tmp_path: Path, make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.db"
    memory = make_memory(path)
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, "My word is zanzibarium.")
        other, _ = say(handle, "amber basil")
    memory.flush()

    def refuse(*_: object) -> bool:
        raise StoreError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(memory.store, "purge", refuse)
        receipt = memory.forget(SCOPE, f"turn:{asked}")
        assert not receipt.verified
        assert receipt.removed["turns"] == 1
        assert "to be wiped later" in caplog.text
        if how == "opened":  # by the next process, as this one dies
            memory._index.checkpoint()
            memory.store.close()
    assert b"zanzibarium" in path.read_bytes() + Path(f"{path}-wal").read_bytes() if how != "opened" else True
    if how == "closed":
        memory.close()
    elif how == "forgotten":
        assert memory.forget(SCOPE, f"turn:{other}").verified
    else:
        memory = make_memory(path)
        memory.flush()
    assert not memory.store.owes_purge
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"zanzibar" not in file.read_bytes()
