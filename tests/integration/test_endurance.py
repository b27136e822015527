"""Ten thousand turns on a tiny model: the cache never grows, and the process only by what it remembers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from memstream import Agent, CacheConfig, GenerationConfig, RecallConfig
from tests.integration import tiny

TURNS, WARM_UP = 10_000, 1_000
CACHE = CacheConfig(cache_tokens=256, memory_tokens=96, evict_tokens=32, chunk_tokens=128)
MIB = 2**20


class Embedder:
    """As wide as all-MiniLM-L6-v2, and fast: each text gets a direction of its own words."""

    name = "wide"
    fingerprint = "wide-1"
    dimension = 384

    def embed(self, texts: list[str]) -> Any:
        out = np.zeros((len(texts), self.dimension), np.float32)
        for i, text in enumerate(texts):
            for word in text.split() or [""]:
                out[i, hash_of(word)] += 1.0
        return out / np.linalg.norm(out, axis=1, keepdims=True)


def hash_of(word: str) -> int:
    """A slot for a word, the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(word)) % Embedder.dimension


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize("recall", [False, True], ids=["recall off", "recall on"])
def test_endurance(recall: bool, tmp_path: Path) -> None:
    agent = Agent(
        tiny.model(),
        tokenizer=tiny.tokenizer(),
        store=tmp_path / "store.db",
        cache=CACHE,
        recall=RecallConfig(enabled=recall),
        generation=GenerationConfig(max_new_tokens=2),
        embedder=Embedder(),
    )
    cache_bytes, begun, held, recalled, evicted = agent.cache_bytes, 0, 0, 0, 0
    with agent, agent.session(user="u") as chat:
        for turn in range(TURNS):
            if turn == WARM_UP:
                agent.memory.flush()
                begun, held = rss(), agent.memory._index.count()
            reply = chat.chat(f"word{turn % 997} topic{turn % 89} {turn}")
            recalled += bool(reply.recalled)
            evicted += len(reply.evicted)
            assert reply.cache_bytes == cache_bytes
        agent.memory.flush()
        grown, held = rss() - begun, agent.memory._index.count() - held
    assert evicted > TURNS - 20
    if not recall:
        assert recalled == 0
        assert grown < 10 * MIB, f"grew by {grown / MIB:.1f} MiB"
        return
    assert recalled > TURNS / 2
    assert TURNS - WARM_UP <= held <= 2 * (TURNS - WARM_UP)  # a window for each exchange, and a summary for some
    vectors = held * Embedder.dimension * 4
    assert grown < 2.5 * vectors, f"grew by {grown / MIB:.1f} MiB; the vectors alone take {vectors / MIB:.1f}"
