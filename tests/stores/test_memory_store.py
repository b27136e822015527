"""Turns, windows, conversations, locks: what is written when, and what can be read back."""

from __future__ import annotations

import hashlib
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from memstream.errors import (
    ConfigError,
    ConversationBusyError,
    DimensionMismatchError,
    InputError,
    StoreError,
)
from memstream.memory import Scope, storable_text
from memstream.stores import index_file
from memstream.stores import schema as db
from tests.stores.conftest import MakeMemory, Place
from tests.stores.tiny import TinyEmbedder, count_words, say, sentence

SCOPE = Scope("n", "u", "c")


def plain_sql(memory: object, statement: str) -> list[tuple[object, ...]]:
    with memory.store.read() as connection:  # type: ignore[attr-defined]
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def test_a_reply_collected_inside_a_write_is_stored_at_once(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    with memory.open_conversation(SCOPE) as handle:
        turn = handle.begin_turn("assistant", "", 0)

        def reply() -> Iterator[None]:
            try:
                yield
            finally:
                handle.finish_turn(turn, "cut off", 2, "cut")

        running = reply()
        next(running)
        began = time.monotonic()
        with memory.store.write():
            del running  # what the garbage collector does, wherever the thread is
        assert time.monotonic() - began < 5  # SQLite would wait 15 s for the thread's own lock
        assert plain_sql(memory, "SELECT text, state FROM turns") == [("cut off", "cut")]


def test_turns_are_committed_before_and_after_the_reply(make_memory: MakeMemory, place: Place) -> None:
    memory, reader = make_memory(place), make_memory(place, embedder=None)
    with memory.open_conversation(SCOPE) as handle:
        asked = handle.begin_turn("user", "amber basil", 2)
        replied = handle.begin_turn("assistant", "", 0)
        seen = plain_sql(reader, "SELECT id, sequence, role, text, n_tokens, state FROM turns")
        assert seen == [(asked, 0, "user", "amber basil", 2, "complete"), (replied, 1, "assistant", "", 0, "open")]
        handle.finish_turn(replied, "cedar", 1, "cut")
        seen = plain_sql(reader, "SELECT text, n_tokens, state FROM turns WHERE sequence = 1")
        assert seen == [("cedar", 1, "cut")]
        assert plain_sql(reader, "SELECT rowid, text FROM turn_words") == [(asked, "amber basil"), (replied, "cedar")]
        windows = plain_sql(reader, "SELECT kind, first_sequence, last_sequence, text FROM chunks")
        assert windows == [("window", 0, 1, "amber basil\ncedar")]
        with pytest.raises(InputError, match="not an open turn"):
            handle.finish_turn(replied, "again", 1, "complete")


def test_a_turn_left_open_by_a_crash_is_cut_when_reopened(make_memory: MakeMemory, place: Place) -> None:
    crashed = make_memory(place)
    handle = crashed.open_conversation(SCOPE)
    handle.begin_turn("user", "amber", 1)
    handle.begin_turn("assistant", "half a", 2)
    handle.close()  # the lock goes with the process; the open turn stays
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as again:
        assert [(turn.text, turn.state) for turn in again.turns()] == [("amber", "complete"), ("half a", "cut")]
    memory.flush()
    assert memory.verify().problems == ()
    assert [hit.text for hit in memory.search(SCOPE, "half")] == ["half a", "amber"]


def test_windows_hold_four_turns_and_step_by_two(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        for i in range(5):
            say(handle, f"question{i}", f"answer{i}")
    ranges = plain_sql(memory, "SELECT first_sequence, last_sequence FROM chunks ORDER BY id")
    assert ranges == [(0, 1), (0, 3), (2, 5), (4, 7), (6, 9)]


def test_superseded_turns_are_kept_and_never_recalled(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber", "basil")
        asked, replied = say(handle, "cedar", "delta")
        say(handle, "ember", "fjord")
        memory.flush()
        handle.supersede([replied])
        assert [turn.text for turn in handle.turns()] == ["amber", "basil", "cedar", "ember", "fjord"]
        assert [turn.text for turn in handle.turns(live_only=False)][3] == "delta"
        with pytest.raises(InputError, match="not a turn of this"):
            handle.supersede([9999])
    memory.flush()
    assert memory.verify().problems == ()
    assert f"turn:{replied}" not in {hit.id for hit in memory.search(SCOPE, "delta", limit=100)}
    assert memory.search(SCOPE, "cedar")[0].id == f"turn:{asked}"
    assert "delta" not in " ".join(str(row) for row in plain_sql(memory, "SELECT text FROM chunks"))


def test_a_turn_that_is_still_being_said_cannot_be_superseded(make_memory: MakeMemory) -> None:
    memory = make_memory()
    with memory.open_conversation(SCOPE) as handle:
        handle.begin_turn("user", "amber", 1)
        replied = handle.begin_turn("assistant", "", 0)
        with pytest.raises(InputError, match="still being said"):
            handle.supersede([replied])
        handle.finish_turn(replied, "basil", 1, "complete")
        handle.supersede([replied])
    memory.flush()
    assert memory.verify().problems == ()


def test_users_are_those_with_something_stored(make_memory: MakeMemory) -> None:
    memory = make_memory()
    for user in ("u", "v"):
        with memory.open_conversation(Scope("n", user, "c")) as handle:
            say(handle, "amber")
    fact = memory.remember(Scope("n", "w"), "basil")
    assert memory.list_users("n") == ["u", "v", "w"]
    memory.delete_conversation(Scope("n", "u", "c"))
    memory.forget(Scope("n", "w"), fact)
    assert memory.list_users("n") == ["v"]


@pytest.mark.parametrize("what", ["renamed", "deleted"])
def test_a_conversation_that_is_deleted_at_the_same_moment(
    tmp_path: Path, make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    memory, other = make_memory(tmp_path / "a.db"), make_memory(tmp_path / "a.db")
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
    lock = memory.store.lock_conversation

    def late(*args: object, **settings: object) -> object:
        other.delete_conversation(SCOPE)
        return lock(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(memory.store, "lock_conversation", late)
    act = {
        "renamed": lambda: memory.rename_conversation(SCOPE, "d"),
        "deleted": lambda: memory.delete_conversation(SCOPE),
    }
    with pytest.raises(InputError, match="meanwhile"):
        act[what]()
    assert memory.verify().problems == ()


def test_a_snapshot_of_what_was_forgotten_meanwhile_is_not_kept(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory, other = make_memory(tmp_path / "a.db"), make_memory(tmp_path / "a.db")
    with memory.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, "amber")
        count, path = handle.n_forgotten(), handle.snapshot_path
        assert path is not None
        other.forget(SCOPE, f"turn:{asked}")
        path.write_bytes(b"amber")  # computed before, written after
        handle.record_snapshot("f", 1, count)
        assert not path.exists()
        assert handle.find_snapshot("f", 1) is None
        path.write_bytes(b"basil")
        handle.record_snapshot("f", 1, handle.n_forgotten())
        assert handle.find_snapshot("f", 1) == path
        (path.parent / f"{path.name}.99.partial").write_bytes(b"of a writer that was killed")
    with memory.open_conversation(SCOPE):
        assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b", "\udfff", "\x00", "ok \U0001f600", "", " ", "x" * 100_000])
def test_any_text_is_stored_searched_and_given_back(make_memory: MakeMemory, place: Place, text: str) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, text, text)
        expected = text.replace("\x00", "\ufffd").replace("\ud800", "\ufffd").replace("\udfff", "\ufffd")
        assert storable_text(text) == expected
        assert [turn.text for turn in handle.turns()] == [expected, expected]
    memory.flush()
    assert memory.verify().problems == ()
    memory.search(SCOPE, text)
    memory.recall(SCOPE, [text], window_from=None, budget_tokens=10, count_tokens=count_words)


def test_scopes_refuse_what_cannot_be_a_name() -> None:
    for bad in ("", "a\x00", "\ud800", "x" * 513):
        for scope in ({"namespace": bad}, {"user": bad}, {"conversation": bad}):
            with pytest.raises(ConfigError, match="Scope"):
                Scope(**scope)


def test_a_conversation_has_one_owner(tmp_path: Path, make_memory: MakeMemory) -> None:
    for place in (tmp_path / "a.db", "memory"):
        memory = make_memory(place)
        other = make_memory(place) if place != "memory" else memory
        handle = memory.open_conversation(SCOPE)
        with pytest.raises(ConversationBusyError, match="'c'"):
            other.open_conversation(SCOPE)
        with pytest.raises(ConversationBusyError):
            other.delete_conversation(SCOPE)
        with other.open_conversation(Scope("n", "u", "d")):
            pass
        threading.Timer(0.2, handle.close).start()
        other.open_conversation(SCOPE, wait_s=5.0).close()
        with pytest.raises(StoreError, match="was closed"):
            handle.begin_turn("user", "late", 1)


def test_a_killed_process_leaves_no_lock(tmp_path: Path, make_memory: MakeMemory) -> None:
    code = (
        "import sys, time; from memstream.memory import *; from memstream.config import RecallConfig\n"
        f"m = Memory(SqlStore.open({str(tmp_path / 'a.db')!r}), None, RecallConfig())\n"
        "h = m.open_conversation(Scope('n', 'u', 'c')); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    memory = make_memory(tmp_path / "a.db")
    with pytest.raises(ConversationBusyError):
        memory.open_conversation(SCOPE)
    process.kill()
    process.wait()
    process.stdout.close()
    memory.open_conversation(SCOPE).close()


def test_conversations_are_listed_renamed_and_deleted(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    for name in ("c", "d"):
        with memory.open_conversation(Scope("n", "u", name)) as handle:
            say(handle, f"secret{name}word", "basil")
            path = handle.snapshot_path
            assert path is not None
            path.write_bytes(b"x")
            handle.record_snapshot("f", 1, 0)
    memory.flush()
    memory.rename_conversation(SCOPE, "e")
    assert [(i.scope.conversation, i.n_turns) for i in memory.list_conversations(SCOPE)] == [("e", 2), ("d", 2)]
    with pytest.raises(InputError, match="already"):
        memory.rename_conversation(Scope("n", "u", "e"), "d")
    with pytest.raises(InputError, match="no conversation"):
        memory.delete_conversation(SCOPE)
    memory.delete_conversation(Scope("n", "u", "e"))
    assert [i.scope.conversation for i in memory.list_conversations(SCOPE)] == ["d"]
    assert memory.search(SCOPE, "secretcword") == []
    assert memory.verify().problems == ()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(b"secretcword" in file.read_bytes() for file in files)
    assert any(b"secretdword" in file.read_bytes() for file in files)
    assert list((tmp_path / "a.db-snapshots").iterdir()) == []  # both may have recalled it


def test_another_embedder_is_refused_even_at_the_same_dimension(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
    memory.close()
    for other in (TinyEmbedder(16, "other"), TinyEmbedder(32)):
        with pytest.raises(DimensionMismatchError, match="cannot be mixed"):
            make_memory(place, embedder=other)
    assert make_memory(place).verify().problems == ()


def test_a_broken_embedder_is_told_by_flush_and_poisons_nothing(
    make_memory: MakeMemory, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TinyEmbedder):
        broken = True

        def embed(self, texts: list[str]) -> np.ndarray:
            matrix = super().embed(texts)
            return matrix * np.nan if self.broken else matrix

    embedder = Broken()
    memory = make_memory(place, embedder=embedder)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
        with pytest.raises(StoreError, match="not finite"):
            memory.flush()
        assert "indexing in the background failed" in caplog.text
        assert memory.verify().pending == 3
        embedder.broken = False
        say(handle, "basil")
    memory.flush()
    assert memory.verify().pending == 0
    assert memory.verify().problems == ()


def test_vectors_are_made_in_the_background_and_after_a_crash(make_memory: MakeMemory, place: Place) -> None:
    without = make_memory(place, embedder=None)
    with without.open_conversation(SCOPE) as handle:
        say(handle, "amber")
    assert without.verify().pending == 3
    assert next(hit.text for hit in without.search(SCOPE, "amber")) == "amber"
    without.close()
    memory = make_memory(place)
    memory.flush()
    assert memory.verify().pending == 0


@pytest.mark.parametrize("harm", ["flip", "cut", "foreign", "older", "format"])
def test_a_bad_index_file_is_rebuilt_with_one_line(
    tmp_path: Path, make_memory: MakeMemory, backend: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.db"
    memory = make_memory(path, index=backend)
    with memory.open_conversation(SCOPE) as handle:
        for word in ("amber", "basil", "cedar"):
            say(handle, word)
    memory.close()
    index = Path(f"{path}-index")
    whole = index.read_bytes()
    if harm == "flip":
        index.write_bytes(whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:])
    elif harm == "format":  # of the version before
        old = whole[:-16].replace(b"memstream-index-2", b"memstream-index-1", 1)
        index.write_bytes(old + hashlib.blake2b(old, digest_size=16).digest())
    elif harm == "cut":
        index.write_bytes(whole[: len(whole) // 2])
    elif harm == "foreign":
        other = make_memory(tmp_path / "b.db", index=backend)
        with other.open_conversation(SCOPE) as handle:
            for word in ("delta", "ember", "fjord"):
                say(handle, word)
        other.close()
        index.write_bytes(Path(f"{tmp_path / 'b.db'}-index").read_bytes())
    else:
        with make_memory(path, index=backend).open_conversation(SCOPE) as handle:
            say(handle, "delta")
            index.write_bytes(whole)
    with caplog.at_level(logging.INFO, logger="memstream"):
        again = make_memory(path, index=backend)
        again.flush()
        assert again.verify().problems == ()
    told = [r.message for r in caplog.records if "rebuilding the vector index" in r.message]
    assert len(told) == (1 if harm != "older" else 0)


def test_a_saved_index_is_used_and_only_newer_events_are_read(
    tmp_path: Path, make_memory: MakeMemory, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    memory = make_memory(path, index=backend)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
        say(handle, "basil")
    memory.close()
    header, _ = index_file.read_header(Path(f"{path}-index"))
    assert (header.backend, header.count, header.last_sequence) == (backend, 2, 2)
    again = make_memory(path, index=backend)
    monkeypatch.setattr(again._index, "_rebuild", lambda connection: pytest.fail("the saved index was not used"))
    with again.open_conversation(SCOPE) as handle:
        say(handle, "cedar")
    again.flush()
    assert again.verify().problems == ()
    assert again._index._index is not None
    assert again._index._index.count() == 3


def test_two_processes_follow_each_other(make_memory: MakeMemory, place: Place) -> None:
    one, two = make_memory(place), make_memory(place)
    with one.open_conversation(SCOPE) as handle:
        asked, _ = say(handle, "amber basil")
    one.flush()
    assert two.search(Scope("n", "u"), "amber")[0].id == f"turn:{asked}"
    two.forget(Scope("n", "u"), f"turn:{asked}")
    assert one.search(Scope("n", "u"), "amber") == []
    for memory in (one, two):
        memory.flush()
        assert memory.verify().problems == ()


def test_many_threads_write_and_search_at_once(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)

    def work(number: int) -> None:
        rng = random.Random(number)
        scope = Scope("n", f"u{number % 3}", f"c{number}")
        with memory.open_conversation(scope) as handle:
            for _ in range(12):
                say(handle, sentence(rng), sentence(rng))
                memory.recall(scope, [sentence(rng, 2)], window_from=4, budget_tokens=50, count_tokens=count_words)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))  # raises what a thread raised
    memory.flush()
    with memory.store.read() as connection:
        sequences = connection.execute(select(db.Turn.conversation_id, db.Turn.sequence)).all()
    assert len(sequences) == len(set(sequences)) == 8 * 24
    assert memory.verify().problems == ()
    assert memory.verify().pending == 0
