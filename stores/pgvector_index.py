"""Vectors searched where they are: in PostgreSQL, by pgvector. A large scope gets an HNSW index of its own."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pgvector import HalfVector
from sqlalchemy import Connection, func, select, text

from memstream.stores import schema as db
from memstream.stores import vectors
from memstream.stores.base import Vectors
from memstream.stores.postgres import Postgres
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_log = logging.getLogger(__name__)
LARGE = 20_000  # a scope of more vectors is worth an index of its own
_LOOK_EVERY = 2_000  # vectors made between two looks for such scopes
_EF_SEARCH = 200
_BUILD_MEMORY = "512MB"
_BUILDING = 2**31 - 1  # the advisory lock of whoever builds an index


class PgVectorIndex:
    """The vectors of a PostgreSQL store: text, vector and delete are one transaction, so there is nothing to follow.

    A scope is searched exactly, by its rows alone, until it has more than ``large`` vectors; then by an HNSW index over
    it and nothing else, made in the background while the old way goes on, with pgvector's iterative scan, so that no
    filter costs hits.

    Args:
        store: on PostgreSQL.
        large: how many vectors a scope may have before it is worth an index.
    """

    unsaved_events = 0

    def __init__(self, store: SqlStore, *, large: int = LARGE) -> None:
        assert isinstance(store.database, Postgres)
        self._store, self._database = store, store.database
        self._large = large
        self._space: SpaceInfo | None = None
        self._next_look = 0

    @property
    def space(self) -> SpaceInfo | None:
        """The space that is searched; None before the first vector or ``refresh``."""
        return self._space

    def refresh(self) -> None:
        """Learns which space serves now."""
        with self._store.read() as connection:
            self._space = vectors.find_space(connection)

    def follow(self) -> None:
        """There is nothing to bring up to date but the space."""
        self.refresh()

    def search(self, query: Vectors, scope: int, k: int, without: Collection[int]) -> list[int]:
        """The at most k best of a scope for ``query`` [d], best first, ties by id."""
        if self._space is None or k < 1:
            return []
        nearest = text(
            f"SELECT chunk_id, vector::halfvec({self._space.dimension}) <#> :query AS distance FROM embeddings "
            f"WHERE space_id = {self._space.id} AND scope = {scope:d} AND chunk_id <> ALL(:without) "
            "ORDER BY distance LIMIT :k"
        )
        values = {"query": HalfVector(query), "without": [int(i) for i in without], "k": k}
        with self._store.read() as connection:
            connection.exec_driver_sql(
                f"SET LOCAL hnsw.ef_search = {_EF_SEARCH}; SET LOCAL hnsw.iterative_scan = strict_order"
            )
            found = connection.execute(nearest, values).all()
        return [row[0] for row in sorted(found, key=lambda row: (row[1], row[0]))]

    def cosines(self, queries: Vectors, chunk_ids: Collection[int]) -> dict[int, list[float]]:
        """The cosine of each chunk that has a vector with each query [n, d]."""
        if self._space is None or not chunk_ids:
            return {}
        with self._store.read() as connection:
            ids, matrix, _ = vectors.read(connection, self._space, chunk_ids)
        return dict(zip(ids.tolist(), (matrix @ queries.T).tolist(), strict=True))

    def holds(self, chunk_ids: Collection[int]) -> bool:
        """True where any of the chunks still has a vector."""
        with self._store.read() as connection:
            there = select(db.Embedding.chunk_id).where(db.Embedding.chunk_id.in_(list(chunk_ids))).limit(1)
            return connection.scalar(there) is not None

    def count(self) -> int:
        """How many vectors the space has."""
        if self._space is None:
            return 0
        with self._store.read() as connection:
            return vectors.count(connection, self._space)

    def checkpoint(self) -> None:
        """Nothing to do: every vector is stored when it is made."""

    def improve(self) -> None:
        """Builds an HNSW index for every scope that has grown large. Takes minutes, in which searches go on."""
        if self._space is None:
            return
        with self._store.read() as connection:
            newest = vectors.last_event(connection)
            if newest < self._next_look:
                return
            self._next_look = newest + _LOOK_EVERY
            missing = self._without_index(connection, self._space)
        for scope in missing:
            self._build(self._space, scope)

    def rebuild(self) -> None:
        """Builds again the indexes of large scopes whose making was interrupted."""
        self._next_look = 0
        self.refresh()
        self.improve()

    def _without_index(self, connection: Connection, space: SpaceInfo) -> list[int]:
        """Large scopes that have no whole index of their own."""
        large = (
            select(db.Embedding.scope)
            .where(db.Embedding.space_id == space.id)
            .group_by(db.Embedding.scope)
            .having(func.count() > self._large)
        )
        built = connection.scalars(
            text(
                "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
                "WHERE indrelid = 'embeddings'::regclass AND indisvalid"
            )
        )
        names = set(built)
        return [scope for scope in connection.scalars(large) if _name(space, scope) not in names]

    def _build(self, space: SpaceInfo, scope: int) -> None:
        name = _name(space, scope)
        _log.info("building the index %s", name)
        with self._database.statements() as connection:
            if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_BUILDING})").scalar():
                return  # another process is at it
            try:
                connection.exec_driver_sql(f"SET maintenance_work_mem = '{_BUILD_MEMORY}'")
                connection.exec_driver_sql(f'DROP INDEX IF EXISTS "{name}"')  # of a build that was interrupted
                connection.exec_driver_sql(
                    f'CREATE INDEX CONCURRENTLY "{name}" ON embeddings '
                    f"USING hnsw ((vector::halfvec({space.dimension})) halfvec_ip_ops) "
                    f"WHERE space_id = {space.id} AND scope = {scope:d}"
                )
            finally:
                connection.exec_driver_sql("RESET maintenance_work_mem")
                connection.exec_driver_sql(f"SELECT pg_advisory_unlock({_BUILDING})")

    def problems(self) -> list[str]:
        """Indexes that PostgreSQL does not use because their making was interrupted."""
        with self._store.read() as connection:
            broken = text(
                "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
                "WHERE indrelid = 'embeddings'::regclass AND NOT indisvalid"
            )
            return [f"the index {name} is not whole; it is built again" for name in connection.scalars(broken)]


def _name(space: SpaceInfo, scope: int) -> str:
    return f"embeddings_{space.id}_{'u' if scope > 0 else 'c'}{abs(scope)}"
