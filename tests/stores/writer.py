"""A process that does everything to a store until it is killed, and says on stdout what it begins and what it has done.

Run as ``python -m tests.stores.writer``, it forks a writer for each line ``STORE SEED BACKEND`` it reads, so that each
begins at once, and says when the writer has ended; given the three as arguments, it is that writer. A line ``kind-ing``
is written before a step, ``kind`` after it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import sys

from memstream.config import RecallConfig
from memstream.errors import ConversationBusyError, InputError
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, sentence

USERS = ("u1", "u2", None)
NAMES = ("a", "b", "c", "d")


def tell(*parts: object) -> None:
    os.write(1, ("\t".join(map(str, parts)) + "\n").encode())


class Writer:
    """Does one random thing after another; every text holds a word that no other text holds."""

    def __init__(self, path: str, seed: int, backend: str) -> None:
        self.rng, self.seed, self.n_texts = random.Random(seed), seed, 0
        self.memory = Memory(SqlStore.open(path), TinyEmbedder(), RecallConfig(), index=backend)  # type: ignore[arg-type]
        self.mine: list[tuple[Scope, str]] = []  # memories told by this writer

    def text(self) -> str:
        self.n_texts += 1
        return f"{sentence(self.rng, self.rng.choice((2, 6, 40)))} s{self.seed}n{self.n_texts}x"

    def talk(self) -> None:
        scope = Scope("n", self.rng.choice(USERS), self.rng.choice(NAMES))
        with self.memory.open_conversation(scope, wait_s=30.0) as handle:
            said = []
            for _ in range(self.rng.randint(1, 4)):
                text = self.text()
                asked = handle.begin_turn("user", text, 6)
                tell("turn", f"turn:{asked}", handle.id, text)
                replied = handle.begin_turn("assistant", "", 0)
                tell("turn", f"turn:{replied}", handle.id, "")
                reply = self.text()
                tell("finishing", f"turn:{replied}", handle.id, reply)
                handle.finish_turn(replied, reply, 6, "complete")
                tell("finished", f"turn:{replied}", handle.id, reply)
                said += [asked, replied]
            if self.rng.random() < 0.4:
                tell("evicting")
                handle.evicted(said)
                self.memory.flush()
                tell("evicted")
            if self.rng.random() < 0.3:
                tell("superseding", f"turn:{said[-1]}")
                handle.supersede([said[-1]])
                tell("superseded", f"turn:{said[-1]}")
            if self.rng.random() < 0.3 and (path := handle.snapshot_path) is not None:
                path.write_bytes(text.encode())
                handle.record_snapshot("f", handle.next_sequence() - 1, handle.n_forgotten())
        self.mine += [(scope, f"turn:{turn}") for turn in said]

    def remember(self) -> None:
        scope, text = Scope("n", self.rng.choice(USERS), self.rng.choice(NAMES)), self.text()
        tell("remembering")
        fact = self.memory.remember(scope, text)
        found = [info.id for info in self.memory.list_conversations(scope) if info.scope == scope]
        tell("remembered", fact, found[0] if scope.user is None else 0, text)
        self.mine.append((scope, fact))

    def forget(self) -> None:
        if not self.mine:
            return
        scope, memory_id = self.mine.pop(self.rng.randrange(len(self.mine)))
        tell("forgetting", memory_id)
        self.memory.forget(scope, memory_id)
        tell("forgot", memory_id)

    def rename(self) -> None:
        infos = self.memory.list_conversations(Scope("n", self.rng.choice(USERS)))
        free = sorted(set(NAMES) - {info.scope.conversation for info in infos})
        if infos and free:
            info, name = self.rng.choice(infos), self.rng.choice(free)
            tell("renaming", info.id, name)
            self.memory.rename_conversation(info.scope, name)
            tell("renamed", info.id, name)
            self.mine = [(scope, i) for scope, i in self.mine if scope != info.scope]

    def delete(self) -> None:
        infos = self.memory.list_conversations(Scope("n", self.rng.choice(USERS)))
        if infos:
            info = self.rng.choice(infos)
            tell("deleting", info.id)
            self.memory.delete_conversation(info.scope)
            tell("deleted", info.id)

    def checkpoint(self) -> None:
        self.memory.flush()
        tell("checkpointing")
        self.memory._index.checkpoint()
        tell("checkpointed")

    def purge(self) -> None:
        tell("purging")
        self.memory._purge()
        tell("purged")

    def run(self) -> None:
        tell("ready")
        steps = (self.talk, self.remember, self.forget, self.rename, self.delete, self.checkpoint, self.purge)
        while True:
            (step,) = self.rng.choices(steps, weights=(8, 3, 4, 2, 1, 2, 1))
            with contextlib.suppress(InputError, ConversationBusyError):  # another writer was there before
                step()


def main() -> None:
    if importlib.util.find_spec("faiss"):
        import faiss  # noqa: F401
    assert "torch" not in sys.modules
    if sys.argv[1:]:
        Writer(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run()
    for line in sys.stdin:
        path, seed, backend = line.rstrip("\n").split("\t")
        pid = os.fork()
        if not pid:
            Writer(path, int(seed), backend).run()
        tell("started", pid)
        _, status = os.waitpid(pid, 0)
        tell("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
