"""A process that reads a store others write, until it is told to stop: ``python -m tests.stores.reader STORE``.

It reads on stdin, line by line, what was forgotten with an acknowledgement, and must never see it from then on. On an
empty line it says how often it looked, and ends.
"""

from __future__ import annotations

import os
import select
import sys
from random import Random

from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import WORDS, TinyEmbedder, count_words

USERS = ("u", "v", None)


def looked(memory: Memory, rng: Random, gone: set[str]) -> None:
    """One look of each kind; what is in ``gone`` must not be seen, nor another's, nor half an exchange."""
    scope = Scope("n", rng.choice(USERS), "c")
    mark = f"of{scope.user}"
    kinds = [
        [(hit.id, hit.text) for hit in memory.search(scope, rng.choice([*WORDS, mark]), limit=1000)],
        [(note.id, note.text) for note in memory.memories(scope, limit=1000)],
        [
            (note.id, note.text)
            for note in memory.recall(
                scope, [rng.choice(WORDS)], window_from=None, budget_tokens=10_000, count_tokens=count_words
            ).notes
        ],
    ]
    for found in kinds:
        assert not gone & {memory_id for memory_id, _ in found}, "seen after it was forgotten"
        assert all(mark in text.split() for _, text in found), "another's memory"
    with memory.store.read() as connection:  # what is written in one transaction is seen as a whole
        torn = connection.exec_driver_sql(
            "SELECT count(*) FROM turns LEFT JOIN turn_words ON turn_words.rowid = turns.id "
            "WHERE (turns.state = 'open') <> (turn_words.rowid IS NULL)"
        ).scalar()
        n_turns = connection.exec_driver_sql("SELECT count(*) FROM turns").scalar()
        again = connection.exec_driver_sql("SELECT count(*) FROM turns").scalar()
    assert torn == 0
    assert n_turns == again


def main() -> None:
    rng, gone, n_looks, heard = Random(os.getpid()), set[str](), 0, b""
    memory = Memory(SqlStore.open(sys.argv[1]), TinyEmbedder(), RecallConfig(gate=0.2), index=sys.argv[2])  # type: ignore[arg-type]
    os.write(1, b"ready\n")
    while b"\n\n" not in heard:
        while select.select([0], [], [], 0)[0]:
            heard += os.read(0, 1 << 16)
            gone |= {line.decode() for line in heard.split(b"\n")[:-1] if line}
            if b"\n\n" in heard:
                break
        looked(memory, rng, gone)
        n_looks += 1
        if n_looks % 10 == 0:  # connections come and go, too
            memory.close()
            memory = Memory(SqlStore.open(sys.argv[1]), TinyEmbedder(), RecallConfig(gate=0.2), index=sys.argv[2])  # type: ignore[arg-type]
    assert memory.verify().problems == ()
    memory.close()
    os.write(1, f"{n_looks}\n".encode())


if __name__ == "__main__":
    main()
