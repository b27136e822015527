"""Memories over every kind of store and vector index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, SqlStore
from tests.stores.tiny import TinyEmbedder

MakeMemory = Callable[..., Memory]


class Place(NamedTuple):
    """A store that is not there yet, and the index that searches it."""

    url: str
    index: str


@pytest.fixture(params=["exact", "faiss"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every test that takes it runs over both indexes that are kept in memory and in a file."""
    if request.param == "faiss":
        pytest.importorskip("faiss")
    return str(request.param)


@pytest.fixture(params=["sqlite exact", "sqlite faiss", "postgresql pgvector", "postgresql exact"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Every test that takes it runs over every database, with the indexes it may have."""
    database, index = request.param.split()
    if index == "faiss":
        pytest.importorskip("faiss")
    if database == "sqlite":
        return Place(str(tmp_path / "a.db"), index)
    return Place(request.getfixturevalue("new_database")(), index)


@pytest.fixture
def make_memory(request: pytest.FixtureRequest) -> Iterator[MakeMemory]:
    """Opens memories (tiny embedder, exact index unless told otherwise) and closes them at the end."""
    for name in {"place", "new_database"} & set(request.fixturenames):
        request.getfixturevalue(name)  # first: databases are emptied when the memories are closed
    opened: list[Memory] = []

    def make(
        where: Path | str | Place = "memory", *, embedder: Any = "tiny", index: str = "exact", **recall: Any
    ) -> Memory:
        chosen = TinyEmbedder() if embedder == "tiny" else embedder
        url, index = where if isinstance(where, Place) else (where, index)
        store = SqlStore.open(url)
        try:
            memory = Memory(store, chosen, RecallConfig(**recall), index=index)
        except BaseException:
            store.close()
            raise
        opened.append(memory)
        return memory

    yield make
    for memory in opened:
        memory.close()
