"""Killed with SIGKILL at any moment, the store keeps every acknowledged turn, and everything agrees."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from sqlalchemy import select

from memstream.memory import Memory, Scope
from memstream.stores import fulltext, rows, vectors
from memstream.stores import schema as db
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import WORDS, TinyEmbedder
from tests.stores.writer import SCOPES

N_KILLS = 50
ROOT = Path(__file__).resolve().parents[2]


class Promises:
    """What the writer said: what must be there, what may be, what must not."""

    def __init__(self) -> None:
        self.texts: dict[int, set[str]] = {}
        self.forgotten: set[int] = set()
        self.maybe_forgotten: set[int] = set()

    def hear(self, line: str) -> None:
        kind, *rest = line.split("\t")
        if kind == "turn":
            self.texts[int(rest[0])] = {rest[1]}
        elif kind == "finishing":
            self.texts[int(rest[0])].add(rest[1])
        elif kind == "finished":
            self.texts[int(rest[0])] = {rest[1]}
        elif kind == "forgetting":
            self.maybe_forgotten.add(int(rest[0]))
        elif kind == "forgot":
            self.forgotten.add(int(rest[0]))


def write_and_kill(path: Path, seed: int, backend: str, n_lines: int, after_s: float, promises: Promises) -> None:
    """Runs the writer and kills it ``after_s`` seconds after its ``n_lines``-th line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.writer", str(path), str(seed), backend],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    for _ in range(n_lines):
        line = process.stdout.readline().decode()
        assert line, "the writer died on its own"
        promises.hear(line.rstrip("\n"))
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().decode()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    for line in rest.split("\n")[:-1]:  # each line is one write: the last is whole
        promises.hear(line)


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
        there = rows.turns_by_id(connection, list(promises.texts))
    for turn_id, texts in promises.texts.items():
        if turn_id in promises.forgotten:
            assert turn_id not in there
        elif turn_id in there:
            assert there[turn_id].text in texts
        else:
            assert turn_id in promises.maybe_forgotten


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
        found = fulltext.turns_with(connection, scope_term, fulltext.words(word)[-1], -1, 0, 10**6)
        wanted = fulltext.words(word)[-1]
        assert sorted(found) == sorted(row.id for row in turns if wanted in fulltext.words(row.text))
        chunks = select(db.Chunk.id).where(
            db.Chunk.owner_id == owner if scope.user else db.Chunk.conversation_id == conversation
        )
        ids, matrix, _ = vectors.read(connection, connection.scalars(chunks).all(), 16)
    query = TinyEmbedder().embed([word])
    memory._index.refresh()
    got = memory._index.search(query[0], owner if scope.user else -conversation, 5, [])
    cosines = memory._index.cosines(query, got)
    np.testing.assert_allclose([cosines[i][0] for i in got], np.sort(matrix @ query[0])[::-1][:5], atol=1e-5)
    assert set(got) <= set(ids.tolist())


def test_kill_at_random_moments(tmp_path: Path, make_memory: MakeMemory) -> None:
    rng = random.Random(20261129)
    path, promises = tmp_path / "a.db", Promises()
    for kill in range(N_KILLS):
        backend = "faiss" if kill % 5 == 0 else "exact"
        write_and_kill(path, kill, backend, rng.randint(0, 30), rng.uniform(0.0, 0.03), promises)
        if kill % 10 == 9:
            memory = make_memory(path, index="faiss" if kill % 20 == 9 else "exact")
            memory.flush()
            assert memory.verify().problems == ()
            assert memory.verify().pending == 0
            check_promises(memory, promises)
            for scope in SCOPES:
                check_search(memory, scope, rng)
            for scope in SCOPES:  # the locks of the killed are free, and what they left open is cut
                with memory.open_conversation(scope) as handle:
                    assert all(turn.state != "open" for turn in handle.turns(live_only=False))
            memory.flush()
            assert memory.verify().problems == ()
            memory.close()
    assert len(promises.texts) > 3 * N_KILLS
    assert len(promises.forgotten) >= 5


def test_kill_two_processes_that_write_at_once(tmp_path: Path, make_memory: MakeMemory) -> None:
    path = tmp_path / "a.db"
    promises = [Promises(), Promises()]
    with ThreadPoolExecutor(2) as writers:
        jobs = [
            writers.submit(write_and_kill, path, 100 + i, backend, 60, 0.0, promises[i])
            for i, backend in enumerate(("exact", "faiss"))
        ]
        for job in jobs:
            job.result()
    memory = make_memory(path)
    memory.flush()
    assert memory.verify().problems == ()
    for heard in promises:
        assert len(heard.texts) >= 15
        check_promises(memory, heard)
