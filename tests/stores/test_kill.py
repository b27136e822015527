"""Killed with SIGKILL at any moment, the store keeps every acknowledged turn, and everything agrees."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from memstream.memory import Memory, Scope
from memstream.stores import fulltext, rows, vectors
from memstream.stores import schema as db
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import WORDS, TinyEmbedder
from tests.stores.writer import NAMES, USERS

ROOT = Path(__file__).resolve().parents[2]
SCOPES = [Scope("n", user, name) for user in USERS for name in NAMES]
STEPS = {
    "finishing": "finished", "evicting": "evicted", "superseding": "superseded", "remembering": "remembered",
    "forgetting": "forgot", "renaming": "renamed", "deleting": "deleted", "checkpointing": "checkpointed",
    "purging": "purged",
}  # fmt: skip
AIMS = [*STEPS, "forgetting", "deleting"]  # these take two transactions and the wiping of the files


class Promises:
    """What a writer said: what must be there, what may be, what must not."""

    def __init__(self, of: Iterable[Promises] = ()) -> None:
        self.texts: dict[str, set[str]] = {}  # what a memory may say
        self.places: dict[str, int] = {}  # its conversation; 0 for a user's fact
        self.gone: set[str] = set()
        self.maybe_gone: set[str] = set()
        self.deleted: set[int] = set()
        self.maybe_deleted: set[int] = set()
        self.superseded: set[str] = set()
        self.maybe_superseded: set[str] = set()
        self.names: dict[int, set[str]] = {}
        self.begun = ""  # the step that was begun and has not ended
        for other in of:
            for name, value in vars(other).items():
                if name != "begun":
                    getattr(self, name).update(value)

    def hear(self, line: str) -> None:
        kind, *rest = line.split("\t")
        self.begun = kind if kind in STEPS else ""
        if kind in ("turn", "finished", "remembered"):
            memory, place, text = rest
            self.texts[memory], self.places[memory] = {text}, int(place)
        elif kind == "finishing":
            self.texts[rest[0]].add(rest[2])
        elif kind in ("forgetting", "forgot"):
            (self.gone if kind == "forgot" else self.maybe_gone).add(rest[0])
        elif kind in ("superseding", "superseded"):
            (self.superseded if kind == "superseded" else self.maybe_superseded).add(rest[0])
        elif kind in ("deleting", "deleted"):
            (self.deleted if kind == "deleted" else self.maybe_deleted).add(int(rest[0]))
        elif kind == "renaming":
            self.names.setdefault(int(rest[0]), set()).add(rest[1])
        elif kind == "renamed":
            self.names[int(rest[0])] = {rest[1]}

    def must_be_gone(self, memory_id: str) -> bool:
        return memory_id in self.gone or self.places[memory_id] in self.deleted

    def may_be_gone(self, memory_id: str) -> bool:
        return memory_id in self.maybe_gone or self.places[memory_id] in self.maybe_deleted


class Server:
    """Forks writers; see writer.py."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout

    def _line(self) -> str:
        return self._out.readline().decode().removesuffix("\n")

    def write_and_kill(
        self, path: Path, seed: int, backend: str, promises: Promises, *, after: int | str, wait_s: float
    ) -> str:
        """Runs a writer and kills it ``wait_s`` after its n-th line, or after it began a step of a kind.

        Returns:
            The step that was cut off; empty where none was.
        """
        self._in.write(f"{path}\t{seed}\t{backend}\n".encode())
        self._in.flush()
        early = [self._line(), self._line()]  # in whatever order
        (pid,) = [int(line.removeprefix("started\t")) for line in early if line.startswith("started")]
        assert "ready" in early
        n = 0
        while n != after and promises.begun != after:
            line = self._line()
            assert not line.startswith("ended"), f"the writer died on its own: {line}"
            promises.hear(line)
            n += 1
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        while not (line := self._line()).startswith("ended"):
            promises.hear(line)
        assert line == f"ended\t{-signal.SIGKILL}"
        begun, promises.begun = promises.begun, ""
        return begun


@contextmanager
def server() -> Iterator[Server]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stores.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


ADDER = """
import os, sys
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder
memory = Memory(SqlStore.open(sys.argv[1]), TinyEmbedder(), RecallConfig(), index="exact")
scope = Scope("n", knowledge=True)
memory.add_documents(scope, sys.argv[2], sync=True, told=lambda name: os.write(1, f"{name}\\n".encode()))
os.write(1, b"all\\n")
"""


def test_killed_while_documents_are_added_the_next_run_goes_on(tmp_path: Path, make_memory: MakeMemory) -> None:
    rng = random.Random(5)
    folder = tmp_path / "kb"
    folder.mkdir()
    scope = Scope("n", knowledge=True)
    for run in range(4):  # the first adds, the others change a few and remove one
        for i in range(60):
            if run == 0 or rng.random() < 0.3:
                parts = [f"## Part {part}\n\n{rng.choice(WORDS)} doc{i}" for part in range(5)]
                (folder / f"d{i:02}.md").write_text("\n\n".join(parts))
        (folder / f"d{run}.md").unlink(missing_ok=True)
        records = [json.dumps({"id": i, "text": f"{rng.choice(WORDS)} record{i}"}) for i in range(80)]
        (folder / "a.jsonl").write_text("\n".join(records))
        process = subprocess.Popen(
            [sys.executable, "-c", ADDER, str(tmp_path / "a.db"), str(folder)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        told = [process.stdout.readline().decode().strip() for _ in range(rng.randint(1, 130))]
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        memory = make_memory(tmp_path / "a.db")
        memory.flush()
        assert memory.verify().problems == ()
        assert {name for name in told if name} <= {document.name for document in memory.documents(scope)}
        memory.close()
    memory = make_memory(tmp_path / "a.db")
    memory.add_documents(scope, folder, sync=True)
    memory.flush()
    assert memory.verify().problems == ()
    shown = {d.name: memory.show(scope, d.id).text for d in memory.documents(scope)}
    files = {path.name: path.read_text() for path in folder.glob("*.md")}
    wanted = {name: "\n\n".join(text.split("\n\n")[1::2]) for name, text in files.items()}
    wanted |= {f"a.jsonl#{i}": json.loads(line)["text"] for i, line in enumerate(records)}
    assert shown == wanted


def check_promises(memory: Memory, promises: Promises) -> None:
    with memory.store.read() as connection:
        turns = connection.execute(select(db.Turn.id, db.Turn.text, db.Turn.superseded)).all()
        facts = connection.execute(select(db.Fact.id, db.Fact.text)).all()
        names = dict(connection.execute(select(db.Conversation.id, db.Conversation.name)).all())
    there = {f"turn:{row.id}": row.text for row in turns} | {f"fact:{row.id}": row.text for row in facts}
    for memory_id, texts in promises.texts.items():
        if promises.must_be_gone(memory_id):
            assert memory_id not in there
        elif memory_id in there:
            assert there[memory_id] in texts
        else:
            assert promises.may_be_gone(memory_id)
    for row in turns:
        if row.superseded:
            assert f"turn:{row.id}" in promises.maybe_superseded
        else:
            assert f"turn:{row.id}" not in promises.superseded
    for conversation_id, allowed in promises.names.items():
        if conversation_id in names and len(allowed) == 1:
            assert names[conversation_id] in allowed | set(NAMES)
    # What is gone has left every file, although who wiped it may have been killed in the middle.
    left = b"".join(file.read_bytes() for file in memory.store.path.parent.rglob("*") if file.is_file())  # type: ignore[union-attr]
    marks = set(re.findall(rb"s\d+n\d+x", left))
    for memory_id, texts in promises.texts.items():
        if memory_id not in there:
            assert marks.isdisjoint(text.rpartition(" ")[2].encode() for text in texts), memory_id


def check_search(memory: Memory, scope: Scope, rng: random.Random) -> None:
    """Words and vectors of one scope, found by the store and by reading everything."""
    word = rng.choice(WORDS)
    with memory.store.read() as connection:
        owner = rows.find_owner(connection, scope)
        conversation = rows.find_conversation(connection, scope)
        if owner is None or conversation is None:
            return
        mine = [db.Conversation.owner_id == owner] if scope.user else [db.Conversation.id == conversation]
        turns = connection.execute(
            select(db.Turn.id, db.Turn.text).join(db.Conversation).where(db.Turn.superseded.is_(False), *mine)
        ).all()
        scope_term = f"o{owner}" if scope.user else f"c{conversation}"
        found = fulltext.newest_with(connection, "turn_words", [scope_term], fulltext.words(word)[-1], 10**6)
        wanted = fulltext.words(word)[-1]
        assert sorted(found) == sorted(row.id for row in turns if wanted in fulltext.words(row.text))
        chunks = select(db.Chunk.id).where(
            db.Chunk.owner_id == owner if scope.user else db.Chunk.conversation_id == conversation
        )
        space = vectors.find_space(connection)
        assert space is not None
        ids, matrix, _ = vectors.read(connection, space, connection.scalars(chunks).all())
    query = TinyEmbedder().embed([word])
    memory._index.refresh()
    got = memory._index.search(query[0], owner if scope.user else -conversation, 5, [])
    cosines = memory._index.cosines(query, got)
    np.testing.assert_allclose([cosines[i][0] for i in got], np.sort(matrix @ query[0])[::-1][:5], atol=1e-5)
    assert set(got) <= set(ids.tolist())


@pytest.mark.parametrize("n_kills", [40, pytest.param(160, marks=pytest.mark.slow)])
def test_kill_at_random_moments(tmp_path: Path, make_memory: MakeMemory, n_kills: int) -> None:
    """Half of the kills come in the middle of a step of each kind in turn."""
    rng = random.Random(20261129 + n_kills)
    path, promises, cut_off = tmp_path / "a.db", Promises(), Counter[str]()
    with server() as writers:
        for kill in range(n_kills):
            backend = "faiss" if kill % 5 == 0 else "exact"
            after = rng.randint(0, 30) if kill % 2 else AIMS[kill // 2 % len(AIMS)]
            seed, wait_s = 1000 * n_kills + kill, rng.uniform(0.0, 0.02 if kill % 2 else 0.12)
            step = writers.write_and_kill(path, seed, backend, promises, after=after, wait_s=wait_s)
            cut_off[step] += 1
            if kill % 10 == 9 or step in ("forgetting", "deleting"):
                memory = make_memory(path, index="faiss" if kill % 20 == 9 else "exact")
                for info in (info for user in USERS for info in memory.list_conversations(Scope("n", user))):
                    # The locks of the killed are free, and what they left open is cut.
                    with memory.open_conversation(info.scope) as handle:
                        assert all(turn.state != "open" for turn in handle.turns(live_only=False))
                memory.flush()
                assert memory.verify().problems == ()
                assert memory.verify().pending == 0
                assert not memory.store.owes_purge
                check_promises(memory, promises)
                for scope in SCOPES:
                    check_search(memory, scope, rng)
                memory.close()
    assert len(promises.texts) > 3 * n_kills
    assert len(promises.gone) >= 5
    del cut_off[""]
    assert len(cut_off) >= len(STEPS) // 2, cut_off


def test_kill_two_processes_that_write_at_once(tmp_path: Path, make_memory: MakeMemory) -> None:
    path = tmp_path / "a.db"
    promises = [Promises(), Promises()]

    def run(i: int, backend: str) -> None:
        with server() as writers:
            writers.write_and_kill(path, 100 + i, backend, promises[i], after=120, wait_s=0.0)

    with ThreadPoolExecutor(2) as writers:
        for job in [writers.submit(run, i, backend) for i, backend in enumerate(("exact", "faiss"))]:
            job.result()
    memory = make_memory(path)
    memory.flush()
    assert memory.verify().problems == ()
    for heard in promises:
        assert len(heard.texts) >= 15
    check_promises(memory, Promises(promises))
