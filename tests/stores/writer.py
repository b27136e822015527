"""A process that writes until it is killed: turns, exchanges, evictions, forgets. Says on stdout what is committed.

Run as ``python -m tests.stores.writer STORE SEED BACKEND``. Each line is written after the commit it tells of.
"""

from __future__ import annotations

import os
import random
import sys

from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, sentence

SCOPES = [Scope("n", "u1", "a"), Scope("n", "u1", "b"), Scope("n", "u2", "a"), Scope("n", None, "a")]


def tell(*parts: object) -> None:
    os.write(1, ("\t".join(map(str, parts)) + "\n").encode())


def main() -> None:
    path, seed, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rng = random.Random(seed)
    memory = Memory(SqlStore.open(path), TinyEmbedder(), RecallConfig(), index=backend)  # type: ignore[arg-type]
    assert "torch" not in sys.modules
    tell("ready")
    while True:
        scope = rng.choice(SCOPES)
        with memory.open_conversation(scope, wait_s=30.0) as handle:
            said: list[int] = []
            for _ in range(rng.randint(1, 4)):
                text = sentence(rng)
                asked = handle.begin_turn("user", text, 6)
                tell("turn", asked, text)
                replied = handle.begin_turn("assistant", "", 0)
                tell("turn", replied, "")
                reply = sentence(rng)
                tell("finishing", replied, reply)
                handle.finish_turn(replied, reply, 6, "complete")
                tell("finished", replied, reply)
                said += [asked, replied]
            if rng.random() < 0.3:
                handle.evicted(said)
            if rng.random() < 0.2:
                tell("superseding", said[-1])
                handle.supersede([said[-1]])
        if rng.random() < 0.3:
            gone = rng.choice(said)
            tell("forgetting", gone)
            memory.forget(scope, f"turn:{gone}")
            tell("forgot", gone)
        if rng.random() < 0.1:
            memory.flush()
            memory._index.checkpoint()


if __name__ == "__main__":
    main()
