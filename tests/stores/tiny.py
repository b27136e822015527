"""An embedder without a model: words hashed into a few dimensions. And texts made from a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from memstream.memory import ConversationHandle, Memory, keys
from memstream.stores import rows
from memstream.stores.base import Vectors
from memstream.stores.fulltext import words

_ALL = """
    amber basil cedar delta ember fjord grove heron ivory jolly kayak lemon maple noble ocean pearl quartz river sable
    tulip umber velvet willow xenon yarrow zephyr 订单 号码 天气 東京 서울 łódź
"""
WORDS = _ALL.split()


class TinyEmbedder:
    """Deterministic: equal words give equal vectors, other words give others."""

    def __init__(self, dimension: int = 16, name: str = "tiny") -> None:
        self.name = name
        self.dimension = dimension
        self.fingerprint = hashlib.sha256(f"{name} {dimension}".encode()).hexdigest()
        self.n_texts = 0

    def embed(self, texts: list[str]) -> Vectors:
        self.n_texts += len(texts)
        rows = [sum((self._word(word) for word in words(text)), self._word("")) for text in texts]
        matrix = np.array(rows, dtype=np.float32)
        return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)

    def _word(self, word: str) -> Vectors:
        seed = int.from_bytes(hashlib.sha256(f"{self.name} {word}".encode()).digest()[:8], "little")
        return np.random.default_rng(seed).standard_normal(self.dimension).astype(np.float32)


def sentence(rng: random.Random, n_words: int = 6) -> str:
    """A sentence of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(n_words))


def say(handle: ConversationHandle, user: str, assistant: str = "Noted.") -> tuple[int, int]:
    """One exchange; returns both ids."""
    asked = handle.begin_turn("user", user, len(user.split()))
    replied = handle.begin_turn("assistant", "", 0)
    handle.finish_turn(replied, assistant, len(assistant.split()), "complete")
    return asked, replied


def summarise(memory: Memory, handle: ConversationHandle, turn_ids: Sequence[int], text: str) -> None:
    """One more key to turns, as made of those that are too long for a window."""
    with memory.store.write() as connection:
        turns = rows.live_turns(connection, handle.id, turn_ids)
        keys.add_summary(connection, handle.id, turns, text)
    memory._indexer.wake()


def count_words(text: str) -> int:
    """Stands for a tokenizer."""
    return len(text.split())
