"""Disks that are full or read-only, and what 10,000 exchanges cost in memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores import full_disk
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import say

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str]) -> list[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def alone(how: str, folder: Path) -> list[str]:
    """What to run before a command that needs a small file system at ``folder``, seen by it alone."""
    if how == "size":
        return []
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"', str(folder)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a test mount a file system")
    return mount


@pytest.mark.parametrize("how", ["size", "space"])
@pytest.mark.parametrize("which", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_a_full_disk_is_told_and_nothing_is_lost_at_any_write(tmp_path: Path, how: str, which: str) -> None:
    """Each step fails as a whole until there is room, says so, and then succeeds: see full_disk.py."""
    command = [sys.executable, "-m", "tests.stores.full_disk", how, which, str(tmp_path)]
    (line,) = run([*alone(how, tmp_path), *command])
    found = json.loads(line)
    assert set(found) == set(full_disk.STEPS)
    for step, told in found.items():
        messages = list(told.values())
        assert messages[-1] is None
        assert len(messages) >= 2, f"{step} writes nothing"
        reason = "disk|File too large|No space left|to be wiped later"
        assert all(re.search(reason, message) for message in messages[:-1]), messages


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
from memstream.stores import fulltext
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
            said = connection.exec_driver_sql("SELECT id, text FROM turns WHERE sequence >= ?", (2 + start,))
            fulltext.add_turns(connection, 1, handle.id, dict(said.all()))
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
    (line,) = run([sys.executable, "-c", GROWTH, str(tmp_path / "a.db"), backend])
    told = json.loads(line)
    assert told["vectors"] == 10_001
    assert told["grown"] <= 2.5 * 10_000 * 384 * 4
