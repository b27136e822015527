"""One suite over all vector indexes: against brute force, and against what would poison an index."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.errors import ConfigError, DimensionMismatchError, StoreError
from memstream.stores.exact_index import ExactIndex
from memstream.stores.faiss_index import FaissIndex

D = 8
BACKENDS = ("exact", "faiss", "large")


def new(backend: str) -> Any:
    """``large`` has FAISS take over every scope of more than five vectors, as soon as ``settle`` is called."""
    if backend == "exact":
        return ExactIndex(D)
    pytest.importorskip("faiss")
    return FaissIndex(D, "IVF2,SQfp16" if backend == "large" else None, large=5 if backend == "large" else 20_000)


def settle(index: Any) -> None:
    """Builds what has become worth an index of its own, and has it search all lists, so that it is exact."""
    if isinstance(index, FaissIndex):
        while (scope := index.overgrown()) is not None:
            built = index.build(*index.copy(scope))
            built.nprobe = built.nlist
            index.install(scope, built)


def vectors(seed: int, n: int) -> np.ndarray:
    """Unit vectors that float16 holds exactly, as SQL does."""
    matrix = np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix.astype(np.float16).astype(np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scope_of(which: Any) -> np.ndarray:
    """Two scopes: the numbers 1 to 9, and those above."""
    return np.where(np.asarray(which, dtype=np.int64) < 10, 7, -3).astype(np.int64)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


step = st.tuples(
    st.sampled_from(["upsert", "delete", "settle"]), st.lists(st.integers(1, 20), max_size=12, unique=True)
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(step, max_size=12),
    without=st.lists(st.integers(1, 22), unique=True),
    scope=st.sampled_from([7, -3, 8]),
    k=st.integers(1, 20),
)
@pytest.mark.parametrize("name", BACKENDS)
def test_any_history_searches_like_brute_force(name: str, steps: Any, without: list[int], scope: int, k: int) -> None:
    index, truth = new(name), {}
    for number, (action, which) in enumerate(steps):
        if action == "upsert":
            matrix = vectors(number, len(which))
            index.upsert(ids(*which), matrix, scope_of(which))
            truth.update(zip(which, matrix, strict=True))
        elif action == "delete":
            removed = index.delete(ids(*which))
            assert removed == sum(truth.pop(i, None) is not None for i in which)
        else:
            settle(index)
    query = vectors(999, 1)[0]
    found, scores = index.search(query, scope, k, without=without)
    mine = [i for i in truth if scope_of(i) == scope and i not in without]
    expected = sorted((-float(truth[i] @ query), i) for i in mine)[:k]
    assert len(found) == len(expected)
    np.testing.assert_allclose(-scores, [score for score, _ in expected], atol=1e-6)
    assert set(found.tolist()) == {i for _, i in expected}
    assert index.count() == len(truth)
    assert index.ids().tolist() == sorted(truth)
    held, matrix = index.get(ids(*range(1, 23)))
    assert sorted(held.tolist()) == sorted(truth)
    for i, vector in zip(held.tolist(), matrix, strict=True):
        np.testing.assert_array_equal(vector, truth[i])
    assert index.scopes_of(ids(*range(1, 23))).tolist() == [int(scope_of(i)) * (i in truth) for i in range(1, 23)]


def test_a_vector_may_move_to_another_scope(backend: str) -> None:
    index, matrix = new(backend), vectors(1, 8)
    index.upsert(np.arange(1, 9), matrix, np.full(8, 7))
    settle(index)
    index.upsert(ids(3), matrix[:1], ids(-3))
    assert index.search(matrix[0], 7, 20)[0].tolist().count(3) == 0
    assert index.search(matrix[0], -3, 20)[0].tolist() == [3]


def test_what_changed_while_a_large_scope_was_built_is_in_it() -> None:
    index, matrix = new("large"), vectors(1, 12)
    index.upsert(np.arange(1, 9), matrix[:8], np.full(8, 7))
    scope = index.overgrown()
    built = index.build(*index.copy(scope))
    built.nprobe = built.nlist
    index.upsert(np.arange(9, 13), matrix[8:], np.full(4, 7))
    index.delete(ids(2, 3))
    index.install(scope, built)
    assert index.overgrown() is None
    found, _ = index.search(matrix[0], 7, 20)
    assert sorted(found.tolist()) == [1, *range(4, 13)]
    index.upsert(np.arange(13, 50), vectors(2, 37), np.full(37, 7))  # grown to four times and more
    assert index.overgrown() == 7
    settle(index)
    assert index.overgrown() is None
    assert len(index.search(matrix[0], 7, 50)[0]) == 47


def test_a_large_scope_is_found_as_by_brute_force_nearly() -> None:
    pytest.importorskip("faiss")
    index, matrix = FaissIndex(D, large=2000), vectors(1, 5000)
    index.upsert(np.arange(1, 5001), matrix, np.full(5000, 7))
    settle_as_it_is(index)
    right = 0
    for query in vectors(2, 50):
        expected = set((np.argsort(-(matrix @ query))[:10] + 1).tolist())
        right += len(expected & set(index.search(query, 7, 10)[0].tolist()))
    assert right >= 0.9 * 500


def settle_as_it_is(index: FaissIndex) -> None:
    """As ``settle``, but with the number of lists it would search in use."""
    while (scope := index.overgrown()) is not None:
        index.install(scope, index.build(*index.copy(scope)))


def test_a_factory_that_cannot_delete_is_refused() -> None:
    pytest.importorskip("faiss")
    with pytest.raises(ConfigError, match="cannot delete"):
        FaissIndex(D, "HNSW32")
    with pytest.raises(ConfigError, match="does not understand"):
        FaissIndex(D, "IVFsomething")
    for factory in ("Flat", "SQ8", "IVF4,Flat", "OPQ4_8,IVF4,SQfp16"):
        index = FaissIndex(D, factory, large=300)
        index.upsert(np.arange(1, 601), vectors(1, 600), np.full(600, 7))
        settle_as_it_is(index)
        assert index.delete(np.arange(1, 301)) == 300
        assert set(index.search(vectors(2, 1)[0], 7, 10)[0].tolist()) <= set(range(301, 601))


def test_poison_is_refused_and_nothing_is_added(backend: str) -> None:
    index, good, scopes = new(backend), vectors(1, 2), ids(7, 7)
    with pytest.raises(DimensionMismatchError, match="shape"):
        index.upsert(ids(1, 2), good[:, :4].copy(), scopes)
    with pytest.raises(DimensionMismatchError, match="3 ids"):
        index.upsert(ids(1, 2, 3), good, ids(7, 7, 7))
    with pytest.raises(StoreError, match="scopes"):
        index.upsert(ids(1, 2), good, ids(7))
    with pytest.raises(StoreError, match="scopes"):
        index.upsert(ids(1, 2), good, ids(7, 0))
    with pytest.raises(StoreError, match="float32"):
        index.upsert(ids(1, 2), good.astype(np.float64), scopes)
    bad = good.copy()
    bad[1, 3] = np.nan
    with pytest.raises(StoreError, match="NaN"):
        index.upsert(ids(1, 2), bad, scopes)
    with pytest.raises(StoreError, match="twice"):
        index.upsert(ids(1, 1), good, scopes)
    assert index.count() == 0


def test_what_was_dumped_is_loaded(backend: str) -> None:
    index, matrix = new(backend), vectors(3, 500)
    everyone = np.arange(500, dtype=np.int64) * 3 + 1
    index.upsert(everyone, matrix, scope_of(everyone))
    settle(index)
    index.delete(ids(1, 4))
    file = io.BytesIO()
    index.dump(file)
    assert matrix[2].astype("<f2").tobytes() in file.getvalue()
    assert matrix[0].astype("<f2").tobytes() not in file.getvalue()  # forgotten
    file.seek(0)
    other = new(backend)
    other.load(file, 498)
    assert other.ids().tolist() == [i * 3 + 1 for i in range(2, 500)]
    held, got = other.get(ids(1498, 7))
    for i, vector in zip(held.tolist(), got, strict=True):
        np.testing.assert_array_equal(vector, matrix[(i - 1) // 3])
    assert sorted(held.tolist()) == [7, 1498]
    assert other.delete(ids(7, 1498)) == 2
    for query in vectors(4, 5):
        assert other.search(query, 7, 3)[0].tolist() == []
        assert 1498 not in other.search(query, -3, 500)[0].tolist()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_deleted_vector_leaves_the_exact_index_memory(order: tuple[int, ...]) -> None:
    index = ExactIndex(D)
    index.upsert(ids(1, 2, 3), vectors(1, 3), np.full(3, 7))
    rows = index._scopes[7]
    for i in order:
        index.delete(ids(i))
    assert not rows._matrix.any()
