"""One suite over all vector indexes: against brute force, and against what would poison an index."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.errors import DimensionMismatchError, StoreError
from memstream.stores.exact_index import ExactIndex
from memstream.stores.faiss_index import FaissIndex

D = 8


def new(backend: str) -> Any:
    return ExactIndex(D) if backend == "exact" else FaissIndex(D)


def vectors(seed: int, n: int) -> np.ndarray:
    matrix = np.random.default_rng(seed).standard_normal((n, D)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


step = st.tuples(st.sampled_from(["upsert", "delete"]), st.lists(st.integers(1, 12), max_size=6, unique=True))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step, max_size=12), chosen=st.lists(st.integers(1, 15), unique=True), k=st.integers(1, 20))
@pytest.mark.parametrize("name", ["exact", "faiss"])
def test_any_history_searches_like_brute_force(name: str, steps: Any, chosen: list[int], k: int) -> None:
    index, truth = new(name), {}
    for number, (action, which) in enumerate(steps):
        if action == "upsert":
            matrix = vectors(number, len(which))
            index.upsert(ids(*which), matrix)
            truth.update(zip(which, matrix, strict=True))
        else:
            removed = index.delete(ids(*which))
            assert removed == sum(truth.pop(i, None) is not None for i in which)
    query = vectors(999, 1)[0]
    found, scores = index.search(query, ids(*chosen), k)
    expected = sorted((-float(truth[i] @ query), i) for i in chosen if i in truth)[:k]
    assert len(found) == len(expected)
    np.testing.assert_allclose(-scores, [score for score, _ in expected], atol=1e-6)
    assert set(found.tolist()) == {i for _, i in expected}
    assert index.count() == len(truth)
    assert index.ids().tolist() == sorted(truth)
    for i, vector in truth.items():
        np.testing.assert_array_equal(index.get(ids(i))[0], vector)


def test_many_candidates_are_restricted_before_the_search(backend: str) -> None:
    index, matrix = new(backend), vectors(1, 6000)
    everyone = np.arange(1, 6001, dtype=np.int64)
    index.upsert(everyone, matrix)
    query = vectors(2, 1)[0]
    odd = everyone[::2]  # 3,000: more than are gathered
    found, scores = index.search(query, odd, 10)
    expected = odd[np.argsort(-(matrix[::2] @ query), kind="stable")[:10]]
    assert found.tolist() == expected.tolist()
    np.testing.assert_allclose(scores, matrix[expected - 1] @ query, atol=1e-6)


def test_poison_is_refused_and_nothing_is_added(backend: str) -> None:
    index, good = new(backend), vectors(1, 2)
    with pytest.raises(DimensionMismatchError, match="shape"):
        index.upsert(ids(1, 2), good[:, :4].copy())
    with pytest.raises(DimensionMismatchError, match="3 ids"):
        index.upsert(ids(1, 2, 3), good)
    with pytest.raises(StoreError, match="float32"):
        index.upsert(ids(1, 2), good.astype(np.float64))
    bad = good.copy()
    bad[1, 3] = np.nan
    with pytest.raises(StoreError, match="NaN"):
        index.upsert(ids(1, 2), bad)
    with pytest.raises(StoreError, match="twice"):
        index.upsert(ids(1, 1), good)
    assert index.count() == 0


def test_what_was_dumped_is_loaded(backend: str) -> None:
    index, matrix = new(backend), vectors(3, 500)
    index.upsert(np.arange(500, dtype=np.int64) * 3 + 1, matrix)
    index.delete(ids(1, 4))
    file = io.BytesIO()
    index.dump(file)
    file.seek(0)
    other = new(backend)
    other.load(file, 498)
    assert other.ids().tolist() == [i * 3 + 1 for i in range(2, 500)]
    np.testing.assert_array_equal(other.get(ids(7, 1498)), matrix[[2, 499]])


def test_a_deleted_vector_leaves_the_exact_index_memory() -> None:
    index = ExactIndex(D)
    index.upsert(ids(1, 2), vectors(1, 2))
    index.delete(ids(1))
    index.delete(ids(2))
    assert not index._matrix[:2].any()
