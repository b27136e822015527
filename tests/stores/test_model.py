"""Random histories over 50 scopes: what is found is what was said and not taken back, as a dictionary knows it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from memstream.stores.faiss_index import FaissIndex
from tests.stores.model import SCOPES, STEPS, World, history

SEED = 20261130


@pytest.fixture(autouse=True)
def _soon_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS takes over every scope of more than 8 vectors."""
    monkeypatch.setitem(FaissIndex.__init__.__kwdefaults__, "large", 8)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a hundred thousand steps wait for the disk some hundred thousand times."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("n_operations", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_history_is_as_a_dictionary_knows_it(folder: Path, backend: str, n_operations: int) -> None:
    assert len(set(SCOPES)) == 50
    world, n_large = World(folder / "a.db", backend), 0
    for number, (name, seed) in enumerate(history(SEED)):
        try:
            world.step(name, seed)
        except BaseException:
            print(f"history({SEED}), step {number}: {name!r}, {seed}")
            raise
        index = world.memory._index._index
        if isinstance(index, FaissIndex):
            n_large = max(n_large, len(index._large))
        if world.n_operations >= n_operations:
            break
    world.step("reopen", 0)
    world.close()
    assert (n_large > 0) == (backend == "faiss"), "no scope became large"


@pytest.mark.parametrize("n_histories", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_any_short_history_is_as_a_dictionary_knows_it(folder: Path, backend: str, n_histories: int) -> None:
    numbers = itertools.count()

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            place = folder / str(next(numbers))
            place.mkdir()
            self.world = World(place / "a.db", backend)

        @rule(name=st.sampled_from(sorted(STEPS)), seed=st.integers(0, 2**16))
        def step(self, name: str, seed: int) -> None:
            self.world.step(name, seed)

        def teardown(self) -> None:
            self.world.close()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=n_histories,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
