"""Memories over both index backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, SqlStore
from tests.stores.tiny import TinyEmbedder

MakeMemory = Callable[..., Memory]


@pytest.fixture(params=["exact", "faiss"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every test that takes it runs over both indexes."""
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return str(request.param)


@pytest.fixture
def make_memory() -> Iterator[MakeMemory]:
    """Opens memories (tiny embedder, exact index unless told otherwise) and closes them at the end."""
    opened: list[Memory] = []

    def make(path: Path | str = "memory", *, embedder: Any = "tiny", index: str = "exact", **recall: Any) -> Memory:
        chosen = TinyEmbedder() if embedder == "tiny" else embedder
        memory = Memory(SqlStore.open(path), chosen, RecallConfig(**recall), index=index)  # type: ignore[arg-type]
        opened.append(memory)
        return memory

    yield make
    for memory in opened:
        memory.close()
