"""Disks that are full or read-only, and what 10,000 exchanges cost in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores.conftest import MakeMemory
from tests.stores.tiny import say

ROOT = Path(__file__).resolve().parents[2]

FULL = """
import json, resource, sys
from memstream.config import RecallConfig
from memstream.errors import StoreError
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, say
path, kind = sys.argv[1:]
memory = Memory(SqlStore.open(path), TinyEmbedder(), RecallConfig(), index="exact")
with memory.open_conversation(Scope("n", "u", "c")) as handle:
    told = []
    for i in range(30):
        say(handle, f"amber number{i} " + "basil " * 200)
    memory.flush()
    memory._index.checkpoint()
    before = [turn.text for turn in handle.turns()]
    limit = 300_000 if kind == "store" else 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        if kind == "store":
            for i in range(1000):
                say(handle, f"cedar number{i} " + "basil " * 200)
                before = [turn.text for turn in handle.turns()]
        else:
            with memory.store.write() as connection:
                connection.exec_driver_sql("INSERT INTO events (action, chunk_id) VALUES ('delete', 999999)")
            memory._index.checkpoint()
    except StoreError as error:
        told = [str(error)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = [turn.text for turn in handle.turns()]
    print(json.dumps({"told": told, "same": after[: len(before)] == before, "more": len(after) - len(before)}))
with memory.open_conversation(Scope("n", "u", "c")) as handle:  # what the failure left open is cut
    say(handle, "delta after")
memory.flush()
print(json.dumps(memory.verify().problems))
memory.close()
"""


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, make_memory: MakeMemory) -> None:
    report, problems = run(FULL, str(tmp_path / "a.db"), "store")
    told = json.loads(report)
    assert len(told["told"]) == 1
    assert "nothing of this step was stored" in told["told"][0]
    assert told["same"]
    assert told["more"] <= 2  # a user's turn and an open reply that had been committed before it
    assert json.loads(problems) == []
    assert make_memory(tmp_path / "a.db").verify().problems == ()


def test_a_disk_too_full_for_the_index_keeps_the_old_one(tmp_path: Path, make_memory: MakeMemory) -> None:
    report, problems = run(FULL, str(tmp_path / "a.db"), "index")
    told = json.loads(report)
    assert len(told["told"]) == 1
    assert told["same"]
    assert not list(tmp_path.glob("*.tmp"))
    # The one event of a vector that never was, which the writer made up, is all that is wrong.
    assert json.loads(problems) == []


def test_a_read_only_store_can_be_read(tmp_path: Path, make_memory: MakeMemory) -> None:
    from memstream.config import RecallConfig
    from memstream.errors import StoreError
    from memstream.memory import Memory, Scope, SqlStore

    memory = make_memory(tmp_path / "a.db")
    with memory.open_conversation(Scope("n", "u", "c")) as handle:
        say(handle, "amber")
    memory.close()
    store = SqlStore.open(tmp_path / "a.db")
    with store.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    engine_only = Memory(store, None, RecallConfig())
    from sqlalchemy import event

    event.listen(store._engine, "connect", lambda dbapi, _: dbapi.execute("PRAGMA query_only = ON"))
    store._engine.dispose()  # from now on the database refuses writes, as on a read-only disk
    assert engine_only.search(Scope("n", "u"), "amber")[0].text == "amber"
    with pytest.raises(StoreError, match="cannot be written"):
        engine_only.remember(Scope("n", "u"), "basil")
    assert engine_only.memories(Scope("n", "u"))[0].text == "amber"


GROWTH = """
import gc, json, sys
import numpy as np, psutil
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from memstream.memory.embedder import embed
from tests.stores.tiny import say
DIMENSION, N = 384, 10_000


class Random:
    name = fingerprint = "random"
    dimension = DIMENSION

    def embed(self, texts):
        matrix = np.random.default_rng(len(texts[0])).standard_normal((len(texts), DIMENSION)).astype(np.float32)
        return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


process = psutil.Process()
memory = Memory(SqlStore.open(sys.argv[1]), Random(), RecallConfig(), index=sys.argv[2])
scope = Scope("n", "u", "c")
with memory.open_conversation(scope) as handle:
    say(handle, "amber basil")
    memory.flush()
    memory.recall(scope, ["amber"], window_from=None, budget_tokens=50, count_tokens=len)
    gc.collect()
    before = process.memory_info().rss
    for start in range(0, N, 500):  # what the handle writes, many exchanges to a transaction
        with memory.store.write(durable=False) as connection:
            for i in range(start, start + 500):
                connection.exec_driver_sql(
                    "INSERT INTO turns (conversation_id, sequence, role, text, n_tokens, created, state, superseded) "
                    "VALUES (?, ?, 'user', ?, 3, '2026-01-01 00:00:00', 'complete', 0)",
                    (handle.id, 2 + i, f"amber basil number{i}"),
                )
                connection.exec_driver_sql(
                    "INSERT INTO chunks (owner_id, conversation_id, kind, first_sequence, last_sequence, text) "
                    "VALUES (1, ?, 'window', ?, ?, ?)",
                    (handle.id, 2 + i, 2 + i, f"amber basil number{i}"),
                )
        memory._indexer.wake()
        memory.flush()
    for i in range(20):
        found = memory.recall(scope, [f"number{i * 31}"], window_from=None, budget_tokens=50, count_tokens=len)
        assert found.n_considered == N + 2
    gc.collect()
    with memory.store.read() as connection:
        n = connection.exec_driver_sql("SELECT count(*) FROM embeddings").scalar()
    print(json.dumps({"grown": process.memory_info().rss - before, "vectors": n}))
memory.close()
"""


def test_memory_grows_by_little_more_than_the_vectors(tmp_path: Path, backend: str) -> None:
    (line,) = run(GROWTH, str(tmp_path / "a.db"), backend)
    told = json.loads(line)
    assert told["vectors"] == 10_001
    assert told["grown"] <= 2.5 * 10_000 * 384 * 4
