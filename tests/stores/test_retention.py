"""What is older than it may be is nowhere any more: tables, words, vectors, index, snapshots, bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from memstream.errors import InputError, StoreError
from memstream.memory import Memory, Part, Regularly, Scope
from memstream.stores import schema as db
from tests.stores.conftest import MakeMemory
from tests.stores.filled import tables
from tests.stores.test_memory_forget import count, files_with
from tests.stores.tiny import say, summarise

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime.now(UTC)
SCOPE = Scope("n", "u", "c")


def say_then(memory: Memory, scope: Scope, days: float, user: str, assistant: str = "Noted.") -> tuple[int, int]:
    """One exchange of so many days ago."""
    then = NOW - timedelta(days=days)
    with memory.open_conversation(scope) as handle:
        ids = say(handle, user, assistant)
    with memory.store.write() as connection:
        connection.execute(update(db.Turn).where(db.Turn.id.in_(ids)).values(created=then))
        older = (db.Conversation.name == scope.conversation, db.Conversation.created > then)
        connection.execute(update(db.Conversation).where(*older).values(created=then))
    return ids


def tell_then(memory: Memory, scope: Scope, days: float, text: str, *, pinned: bool) -> str:
    fact = memory.remember(scope, text)
    number = int(fact.removeprefix("fact:"))
    with memory.store.write() as connection:
        then = NOW - timedelta(days=days)
        connection.execute(update(db.Fact).where(db.Fact.id == number).values(created=then))
        if not pinned:
            connection.exec_driver_sql(f"DELETE FROM pins WHERE fact_id = {number}")
    return fact


def days_ago(days: float) -> datetime:
    return NOW - timedelta(days=days)


def test_nothing_older_is_left_anywhere(tmp_path: Path, make_memory: MakeMemory, backend: str) -> None:
    rng = random.Random(5)
    memory = make_memory(tmp_path / "a.db", index=backend)
    scopes = [SCOPE, Scope("n", "u", "d"), Scope("n", "v", "c"), Scope("n", None, "c"), Scope("m", "u", "c")]
    young: set[str] = set()
    for i in range(60):
        age = rng.choice([1, 20, 29.9, 30.1, 200])
        words = [f"{'old' if age > 30 else 'young'}{kind}{i:02}" for kind in ("asked", "answered")]
        said = say_then(memory, scopes[i % 5], age, f"amber {words[0]}.", f"basil {words[1]}.")
        young.update(words if age <= 30 else [])
        if rng.random() < 0.5:
            with memory.open_conversation(scopes[i % 5]) as handle:
                summarise(memory, handle, said, f"amber {words[0]}")
        if rng.random() < 0.2:
            with memory.open_conversation(scopes[i % 5]) as handle:
                handle.supersede([said[1]])
    with memory.open_conversation(SCOPE) as handle:
        assert handle.snapshot_path is not None
        handle.snapshot_path.write_bytes(b"keys of oldasked")
        handle.record_snapshot("f", 1, handle.n_forgotten())
    memory.flush()
    memory._index.checkpoint()
    n_turns = count(memory, "SELECT count(*) FROM turns")
    n_old = count(memory, f"SELECT count(*) FROM turns WHERE created < '{days_ago(30):%Y-%m-%d %H:%M:%S}'")
    assert 40 < n_old < n_turns - 40
    assert files_with(tmp_path, "oldasked") != []

    dry = memory.expire(days_ago(30), dry_run=True)
    assert (dry.removed, dry.verified) == ({"turns": n_old, "facts": 0}, False)
    assert count(memory, "SELECT count(*) FROM turns") == n_turns

    receipt = memory.expire(days_ago(30))
    assert receipt.verified
    assert (receipt.removed["turns"], receipt.kept, receipt.snapshots) == (n_old, 0, 1)
    assert receipt.removed["words"] + receipt.removed["turn_embeddings"] > n_old
    assert files_with(tmp_path, "oldasked") == files_with(tmp_path, "oldanswered") == []
    memory.flush()
    assert memory.verify().problems == ()
    assert memory.verify().pending == 0
    assert files_with(tmp_path, "oldasked") == files_with(tmp_path, "oldanswered") == []
    held = tables(tmp_path / "a.db")
    assert len(held["turns"]) == n_turns - n_old
    said = "".join(held["turns"] + held["chunks"] + held["derived"])
    assert "old" not in said
    assert all(word in said for word in young)
    assert len(held["turn_words_content"]) == count(memory, "SELECT count(*) FROM turns WHERE NOT superseded")
    assert memory.expire(days_ago(30)).removed == {}
    memory.close()
    assert files_with(tmp_path, "oldasked") == []
    again = make_memory(tmp_path / "a.db", index=backend)
    assert again.verify().problems == ()


def test_more_than_one_batch(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream.memory.retention._BATCH", 3)
    memory = make_memory()
    for i in range(8):
        say_then(memory, SCOPE, 50 if i < 6 else 1, f"amber{i}", f"basil{i}")
    receipt = memory.expire(days_ago(30))
    assert (receipt.removed["turns"], receipt.verified) == (12, True)
    assert [turn.text for turn in memory.open_conversation(SCOPE).turns()] == ["amber6", "basil6", "amber7", "basil7"]
    memory.flush()
    assert memory.verify().problems == ()


def test_a_part(make_memory: MakeMemory) -> None:
    memory = make_memory()
    scopes = [Scope("n", "u", "c"), Scope("n", "v", "c"), Scope("n", None, "c"), Scope("m", "u", "c")]
    for scope in scopes:
        say_then(memory, scope, 9, "amber")

    def left() -> list[int]:
        return [sum(info.n_turns for info in memory.list_conversations(scope)) for scope in scopes]

    memory.expire(days_ago(5), Part(namespace="n", user="u"))
    assert left() == [0, 2, 2, 2]
    memory.expire(days_ago(5), Part(namespace="n"))
    assert left() == [0, 0, 0, 2]
    memory.expire(days_ago(10))
    assert left() == [0, 0, 0, 2]
    memory.expire(days_ago(5))
    assert left() == [0, 0, 0, 0]


def test_conversations_in_which_nothing_is_left_go_too(make_memory: MakeMemory) -> None:
    memory = make_memory()
    say_then(memory, SCOPE, 9, "amber")
    say_then(memory, Scope("n", "u", "open"), 9, "amber")
    say_then(memory, Scope("n", "u", "part"), 9, "amber")
    say_then(memory, Scope("n", "u", "part"), 1, "amber")
    with memory.open_conversation(Scope("n", "u", "open")) as handle:
        assert memory.expire(days_ago(5)).removed["conversations"] == 1
        say(handle, "basil")
    assert [info.scope.conversation for info in memory.list_conversations(SCOPE)] == ["open", "part"]


def test_pinned_facts_stay_unless_told(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    loose = tell_then(memory, SCOPE, 9, "loose quixotolite", pinned=False)
    pinned = tell_then(memory, SCOPE, 9, "pinned zanzibarium", pinned=True)
    young = tell_then(memory, SCOPE, 1, "young", pinned=True)
    memory.flush()
    receipt = memory.expire(days_ago(5))
    assert receipt.verified
    assert (receipt.removed["facts"], receipt.removed["embeddings"]) == (1, 1)
    assert files_with(tmp_path, "quixotolit") == []
    with pytest.raises(InputError):
        memory.show(SCOPE, loose)
    assert memory.show(SCOPE, pinned).why.pinned
    receipt = memory.expire(days_ago(5), pinned=True)
    assert (receipt.removed["facts"], receipt.removed["pins"], receipt.verified) == (1, 1, True)
    assert files_with(tmp_path, "zanzibarium") == []
    assert memory.show(SCOPE, young).text == "young"
    assert memory.verify().problems == ()


def test_what_is_being_said_is_not_torn_out(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    say_then(memory, SCOPE, 9, "amber", "basil")
    long_ago = NOW - timedelta(days=9)
    handle = memory.open_conversation(SCOPE)
    asked = handle.begin_turn("user", "cedar", 1, long_ago)
    for _ in range(2):  # before the reply begins, and while it is said
        receipt = memory.expire(days_ago(5))
        assert (receipt.kept, receipt.verified) == (1, True)
        assert handle.turn(asked).text == "cedar"
        replied = handle.begin_turn("assistant", "", 0, long_ago)
    assert [turn.text for turn in handle.turns()] == ["cedar", "", ""]
    handle.finish_turn(replied, "delta", 1, "complete")
    receipt = memory.expire(days_ago(5))
    assert (receipt.kept, receipt.removed["turns"]) == (0, 2)
    handle.close()
    memory.flush()
    receipt = memory.expire(days_ago(5))  # nobody says it any more: what was left open is cut
    assert (receipt.kept, receipt.removed["turns"], receipt.removed["conversations"]) == (0, 1, 1)
    assert count(memory, "SELECT count(*) FROM turns") == 0
    assert memory.verify().problems == ()


def test_every_cache_that_has_seen_it_is_told(make_memory: MakeMemory) -> None:
    memory = make_memory()
    say_then(memory, Scope("n", "u", "old"), 9, "amber")
    with memory.open_conversation(SCOPE) as mine, memory.open_conversation(Scope("n", "v", "c")) as other:
        memory.expire(days_ago(5))
        assert (mine.n_forgotten(), other.n_forgotten()) == (1, 0)
        memory.expire(days_ago(5))
        assert (mine.n_forgotten(), other.n_forgotten()) == (1, 0)


def test_times_that_make_no_sense_are_refused(make_memory: MakeMemory) -> None:
    memory = make_memory()
    for wrong in (datetime.now(UTC) + timedelta(seconds=60), datetime(2020, 1, 1)):
        with pytest.raises(InputError, match="before is"):
            memory.expire(wrong)


TALKING = """
import sys
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, say
memory = Memory(SqlStore.open(sys.argv[1]), TinyEmbedder(), RecallConfig(), index="exact")
n = 0
while True:
    with memory.open_conversation(Scope("n", "u", f"c{n % 3}"), wait_s=30.0) as handle:
        for _ in range(5):
            n += 1
            handle.evicted(say(handle, f"amber asked{n}", f"basil answered{n}"))
            print(n, flush=True)
"""


def test_beside_a_writing_process(tmp_path: Path, make_memory: MakeMemory) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", TALKING, str(tmp_path / "a.db")],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    n_gone = 0
    try:
        assert writer.stdout.readline() == b"1\n"
        memory = make_memory(tmp_path / "a.db", embedder=None, enabled=False)
        for _ in range(4):
            for _ in range(15):
                assert writer.stdout.readline()
            n_gone += memory.expire(datetime.now(UTC)).removed.get("turns", 0)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert n_gone > 20
    again = make_memory(tmp_path / "a.db")
    again.flush()
    assert again.verify().problems == ()
    cut = datetime.now(UTC)
    receipt = again.expire(cut)
    assert receipt.verified
    assert (receipt.kept, count(again, "SELECT count(*) FROM turns")) == (0, 0)


class Job:
    """Something to do, that fails the second time."""

    def __init__(self) -> None:
        self.n_runs = 0
        self.often = threading.Event()

    def run(self) -> None:
        self.n_runs += 1
        if self.n_runs == 2:
            raise StoreError("the disk is full")
        if self.n_runs == 4:
            self.often.set()


def test_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    hourly = Regularly("work", job.run, every_s=0.001)
    assert job.often.wait(30)
    hourly.stop()
    n_runs = job.n_runs
    hourly.stop()
    assert job.n_runs == n_runs
    assert "work in the background failed: the disk is full" in caplog.text
    idle = Job()
    Regularly("work", idle.run, every_s=3600).stop()
    assert idle.n_runs == 0
