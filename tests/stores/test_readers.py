"""Readers beside a writer that says and forgets: nobody sees a torn view, somebody else's memory or a forgotten one."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from memstream.memory import Memory, Scope, SqlStore
from tests.stores.conftest import MakeMemory
from tests.stores.reader import USERS, looked
from tests.stores.tiny import say, sentence

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def readers_of(path: Path, backend: str, n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that read, each ready; ended in any case."""
    with ExitStack() as stack:
        readers = []
        for _ in range(n):
            reader = subprocess.Popen(
                [sys.executable, "-m", "tests.stores.reader", str(path), backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
            readers.append(stack.enter_context(reader))
            stack.callback(reader.kill)
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
        yield readers


@pytest.mark.parametrize("n_steps", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_readers_beside_a_writer(tmp_path: Path, make_memory: MakeMemory, backend: str, n_steps: int) -> None:
    path, rng, gone, done = tmp_path / "a.db", random.Random(n_steps), set[str](), threading.Event()
    memory = make_memory(path, index=backend, gate=0.2)

    def look(number: int) -> int:
        mine, n_looks = random.Random(number), 0
        while not done.is_set():
            looked(memory, mine, set(gone))
            n_looks += 1
        return n_looks

    with readers_of(path, backend, 2) as readers, ThreadPoolExecutor(2) as threads:
        looking = [threads.submit(look, number) for number in range(2)]
        try:
            with suppress(BrokenPipeError):  # a reader that died says why below
                write(memory, readers, gone, rng, n_steps)
        finally:
            done.set()
        for reader in readers:
            out, _ = reader.communicate(b"\n\n", timeout=120)
            assert reader.returncode == 0, out.decode()
            assert int(out.split()[-1]) > 0
        assert all(job.result() > 0 for job in looking)
    memory.flush()
    assert memory.verify().problems == ()


def write(
    memory: Memory, readers: list[subprocess.Popen[bytes]], gone: set[str], rng: random.Random, n_steps: int
) -> None:
    """Says and forgets; what is forgotten is told to the readers once it is acknowledged."""
    mine: list[tuple[Scope, str]] = []
    for _ in range(n_steps):
        scope = Scope("n", rng.choice(USERS), "c")
        mark = f"of{scope.user}"
        with memory.open_conversation(scope) as handle:
            ids = say(handle, f"{mark} {sentence(rng)}", f"{mark} {sentence(rng)}")
        mine += [(scope, f"turn:{turn}") for turn in ids]
        if rng.random() < 0.3:
            mine.append((scope, memory.remember(scope, f"{mark} {sentence(rng)}")))
        if rng.random() < 0.5:
            owner, memory_id = mine.pop(rng.randrange(len(mine)))
            memory.forget(owner, memory_id)
            gone.add(memory_id)
            for reader in readers:
                assert reader.stdin is not None
                reader.stdin.write(memory_id.encode() + b"\n")
                reader.stdin.flush()


def test_many_processes_may_create_one_store_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from memstream.memory import SqlStore\n"
        "sys.stdin.readline(); SqlStore.open(sys.argv[1]).close(); print('opened')"
    )
    path = tmp_path / "a.db"
    opening = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(4)
    ]
    for process in opening:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in opening:
        out, err = process.communicate(timeout=120)
        assert out == b"opened\n", err.decode()
    store = SqlStore.open(path)
    with store.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


ALONE = """
import sys
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
memory = Memory(SqlStore.open(sys.argv[1]), None, RecallConfig())
print([note.text for note in memory.memories(Scope("n", "u"))])
memory.close()
"""


@pytest.mark.parametrize("what", ["opened again", "forgotten"])
def test_a_store_is_not_taken_for_closed(tmp_path: Path, make_memory: MakeMemory, what: str) -> None:
    """POSIX drops a process's locks on a file when it closes any descriptor of it; then whoever closes the store next
    believes to be the last, and deletes the WAL that others write to."""
    path, scope = tmp_path / "a.db", Scope("n", "u", "c")
    memory = make_memory(path)
    with memory.open_conversation(scope) as handle:
        asked, _ = say(handle, "amber", "basil")
        memory.flush()
        if what == "opened again":
            SqlStore.open(path).close()
        else:
            assert memory.forget(scope, f"turn:{asked}").verified

        def others_see() -> list[str]:
            done = subprocess.run(
                [sys.executable, "-c", ALONE, str(path)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            )
            return list(ast.literal_eval(done.stdout))

        known = ["amber", "basil"] if what == "opened again" else ["basil"]
        assert others_see() == known
        say(handle, "cedar", "delta")
        assert others_see() == [*known, "cedar", "delta"]
    memory.close()
    assert others_see() == [*known, "cedar", "delta"]
