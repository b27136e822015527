"""Several conversations at once on the rows of one engine: batched with others, a reply equals the reply alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memstream import Agent, GenerationConfig, RecallConfig
from memstream.batching import Batch
from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.errors import BusyError, ConfigError
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row
from tests.integration import tiny
from tests.integration.test_oracles import tokens

CACHE = CacheConfig(cache_tokens=256, memory_tokens=64, evict_tokens=16)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def build(store: str = "store.db", **settings: Any) -> Agent:
        given: dict[str, Any] = {
            "tokenizer": tiny.tokenizer(),
            "embedder": tiny.WordEmbedder(),
            "cache": CACHE,
            "generation": GenerationConfig(max_new_tokens=24),
            "store": tmp_path / store,
        }
        made.append(Agent(model=tiny.model(), **{**given, **settings}))
        return made[-1]

    yield build
    for agent in made:
        agent.close()


def in_threads(*jobs: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Runs them all at once; raises what any of them raised."""
    raised: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    if raised:
        raise raised[0]


# ---- the batch ----


def engine_with(n: int, prompt: int = 9) -> tuple[Engine, list[Row]]:
    engine = Engine(StreamingModel(tiny.model()), CACHE, rows=n)
    rows = [engine.admit() for _ in range(n)]
    for i, row in enumerate(rows):
        row.layout.open_group(0)
        engine.feed(row, tokens(prompt + i, seed=i))
    return engine, rows


def test_rows_stepped_together_equal_rows_stepped_alone() -> None:
    engine, rows = engine_with(5)
    alone_engine, alone = engine_with(5)
    for row, i in zip(alone, range(5), strict=True):
        for token in tokens(30, seed=10 + i):
            alone_engine.step([row], [token])
    batch, sizes = Batch(engine, most=5), []
    step = engine.step
    engine.step = lambda rows, ids: (sizes.append(len(rows)), step(rows, ids))[1]  # type: ignore[method-assign]

    def feed(i: int) -> None:
        for token in tokens(30, seed=10 + i):
            batch.step(rows[i], token)

    in_threads(*(lambda i=i: feed(i) for i in range(5)))  # type: ignore[misc]
    assert sum(sizes) == 150
    assert len(sizes) < 75, "most steps are of several rows"
    for row, other in zip(rows, alone, strict=True):
        assert row.logits is not None
        assert other.logits is not None
        torch.testing.assert_close(row.logits, other.logits, atol=1e-4, rtol=0)


def test_more_rows_than_fit_into_a_step_take_turns() -> None:
    engine, rows = engine_with(5)
    batch, sizes = Batch(engine, most=2), []
    step = engine.step
    engine.step = lambda rows, ids: (sizes.append(len(rows)), step(rows, ids))[1]  # type: ignore[method-assign]
    in_threads(*(lambda row=row: [batch.step(row, t) for t in range(5, 15)] for row in rows))  # type: ignore[misc]
    assert (sum(sizes), max(sizes)) == (50, 2)


def test_a_step_that_fails_fails_for_its_rows_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = engine_with(4)
    batch = Batch(engine, most=4)
    step, broken = engine.step, threading.Event()

    def breaks(chosen: Any, ids: Any) -> None:
        if rows[2] in chosen and not broken.is_set():
            broken.set()
            raise MemoryError("no room")
        step(chosen, ids)

    monkeypatch.setattr(engine, "step", breaks)
    failed: list[int] = []

    def feed(i: int) -> None:
        for token in range(5, 25):
            try:
                batch.step(rows[i], token)
            except MemoryError:
                failed.append(i)
                return

    in_threads(*(lambda i=i: feed(i) for i in range(4)))  # type: ignore[misc]
    assert 2 in failed
    for i in set(range(4)) - set(failed):
        assert list(rows[i].window_ids)[-20:] == list(range(5, 25))


def test_rows_change_hands_while_a_forward_runs() -> None:
    engine, (row, other) = engine_with(2, prompt=9)

    def change() -> None:
        state = engine.take(row)
        engine.leave(row)
        engine.put(engine.admit(), state)

    with engine.lock:  # as a forward holds it
        in_threads(change)
    assert engine.n_taken == 2
    engine.step([other], [5])


@pytest.mark.parametrize("n", [1, 3])
def test_a_tuple_of_tokens_is_scored_as_a_list(n: int) -> None:
    engine, (row, other) = engine_with(2, prompt=9)
    engine.retract(other, 1)
    engine.feed(other, [tokens(9, seed=0)[-1]])
    ids = tokens(n, seed=4)
    assert engine.score(row, tuple(ids)).shape == (n,)
    assert engine.score(other, ids).shape == (n,)


# ---- conversations on rows ----


def test_replies_of_many_at_once_equal_those_alone(make: Any) -> None:
    off = RecallConfig(enabled=False)
    together, alone = make(rows=4, recall=off), make("alone.db", recall=off)
    # No choice is near: the best two logits are 3e-3 apart at least. Another number of rows rounds otherwise.
    texts = {str(i): [f"hazel {i} {turn}" for turn in range(4)] for i in range(4)}
    found: dict[str, list[str]] = {}

    def talk(name: str) -> None:
        with together.session(name=name) as session:
            found[name] = [session.chat(text).text for text in texts[name]]

    in_threads(*(lambda name=name: talk(name) for name in texts))  # type: ignore[misc]
    for name, said in texts.items():
        assert [alone.chat(text, session=name).text for text in said] == found[name]


def test_more_conversations_than_rows_lose_and_mix_nothing(make: Any, tmp_path: Path) -> None:
    off = RecallConfig(enabled=False)
    agent, alone = make(rows=2, recall=off), make("alone.db", recall=off)
    texts = {str(i): [f"cedar {i} {turn}" for turn in range(3)] for i in range(7)}
    found: dict[str, list[str]] = {name: [] for name in texts}
    sessions = {name: agent.session(name=name) for name in texts}

    def talk(name: str) -> None:
        for text in texts[name]:
            found[name].append(sessions[name].chat(text).text)

    in_threads(*(lambda name=name: talk(name) for name in texts))  # type: ignore[misc]
    for name, said in texts.items():
        assert [alone.chat(text, session=name).text for text in said] == found[name]
    for session in sessions.values():
        session.close()
    assert len(agent._engine._free) == 2
    stored = [text for role, text, _ in tiny.stored(tmp_path / "store.db") if role == "user"]
    assert sorted(stored) == sorted(text for said in texts.values() for text in said)


def test_two_streams_in_one_thread_where_there_are_rows(make: Any) -> None:
    agent = make(rows=2)
    one, two = agent.session(name="1"), agent.session(name="2")
    first, second = one.stream("amber"), two.stream("basil")
    pieces = [next(first), next(second), next(first), next(second)]
    assert all(pieces)
    three = agent.session(name="3")
    with pytest.raises(BusyError, match="still being streamed"):
        three.chat("cedar")
    list(first)
    assert three.chat("cedar").text
    list(second)


def test_forgetting_while_others_wait_for_a_row_ends(make: Any) -> None:
    """A turn that waits for the row of a conversation that forgetting holds must not be waited for."""
    agent = make(rows=1)
    one, two = agent.session(user="u", name="1"), agent.session(user="u", name="2")
    one.chat("amber")
    draw = random.Random(0)

    def talk(session: Any) -> None:
        for i in range(6):
            session.chat(f"basil {i} {draw.random()}")

    def forget() -> None:
        for i in range(6):
            one.forget(one.remember(f"cedar {i}"))

    in_threads(lambda: talk(one), lambda: talk(two), forget)


def test_a_row_waited_for_can_be_given_up(make: Any) -> None:
    agent = make(rows=1, generation=GenerationConfig(max_new_tokens=200))
    one, two = agent.session(name="1"), agent.session(name="2")
    stream = one.stream("amber")
    next(stream)
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(two.chat("basil")))
    thread.start()
    threading.Timer(0.3, two.cancel).start()
    thread.join(20)
    assert [reply.finish_reason for reply in replies] == ["cancelled"]
    list(stream)


@pytest.mark.parametrize("rows", [0, -1, 1.5, "2"])
def test_a_number_of_rows_that_is_none(make: Any, rows: Any) -> None:
    with pytest.raises(ConfigError, match="rows is"):
        make(rows=rows)
