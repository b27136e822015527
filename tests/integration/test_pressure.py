"""Memory runs out: fewer rows, a smaller cache, and the same replies, token for token."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream import Agent, EngineState, GenerationConfig, RecallConfig
from memstream import watch as watching
from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.errors import CapacityError
from memstream.machine import Free
from memstream.streaming import snapshot
from memstream.streaming.decode import Decode
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row
from tests.integration import tiny
from tests.integration.test_oracles import tokens
from tests.integration.test_swap import files

OFF = RecallConfig(enabled=False)
CACHE = CacheConfig(cache_tokens=256, memory_tokens=64, evict_tokens=16, chunk_tokens=32)
NO_MEMORY = {
    "python": lambda: MemoryError("no memory"),
    "card": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "torch": lambda: RuntimeError("[enforce fail at alloc.cpp:1] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
}
TEXTS = {str(i): [f"amber {i} {turn}" for turn in range(4)] for i in range(4)}


@pytest.fixture
def make(make: Any) -> Callable[..., Agent]:
    def build(**given: Any) -> Agent:
        generation = GenerationConfig(max_new_tokens=24)
        agent: Agent = make(**{"rows": 4, "recall": OFF, "cache": CACHE, "generation": generation, **given})
        agent._watch.stop()  # the machine's own memory is not what is tested
        return agent

    return build


Said = tuple[str, list[int]]


def say(agent: Agent, name: str, text: str) -> Said:
    """A reply, and the ids of all that is in the window then."""
    reply = agent.chat(text, session=name)
    return reply.text, window_of(agent, name)


def window_of(agent: Agent, name: str) -> list[int]:
    found = next(c for scope, c in agent._residents._open.items() if scope.conversation == name)
    return list(found.resident.window_ids)


@pytest.fixture
def alone(make: Any, tmp_path: Path) -> dict[str, list[Said]]:
    """Replies to the texts where nothing goes wrong."""
    agent = make(rows=1, store=tmp_path / "alone.db")
    return {name: [say(agent, name, text) for text in texts] for name, texts in TEXTS.items()}


class Failing:
    """Has forwards fail, some after they have written into the cache.

    Args:
        kind: ``_decode`` or ``_prefill``.
        when: whether one of so many rows fails.
        times: how many fail at most.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        *,
        when: Callable[[int], bool] = lambda n: True,
        times: int = 10**9,
        error: Callable[[], BaseException] = NO_MEMORY["python"],
    ) -> None:
        self.n, self.left, self._when, self._error = 0, times, when, error
        self._compute = getattr(Engine, kind)
        monkeypatch.setattr(Engine, kind, lambda engine, *given: self._failing(engine, *given))

    def _failing(self, engine: Engine, rows: Sequence[Row], *given: Any) -> Any:
        if self.left and self._when(len(rows)):
            self.left -= 1
            self.n += 1
            if self.n % 2:
                self._compute(engine, rows, *given)
            raise self._error()
        return self._compute(engine, rows, *given)


def talk_at_once(agent: Agent) -> dict[str, list[str]]:
    """Replies to the texts, each conversation in a thread of its own."""
    found: dict[str, list[str]] = {}
    raised: list[BaseException] = []

    def talk(name: str) -> None:
        try:
            with agent.session(name=name) as session:
                found[name] = [session.chat(text).text for text in TEXTS[name]]
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=talk, args=(name,), daemon=True) for name in TEXTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if raised:
        raise raised[0]
    return found


@pytest.mark.parametrize("kind", list(NO_MEMORY))
@pytest.mark.parametrize("forward", ["_decode", "_prefill"])
def test_a_forward_without_memory_is_computed_again(
    make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, forward: str, kind: str
) -> None:
    agent = make()
    failing = Failing(monkeypatch, forward, times=1, error=NO_MEMORY[kind])
    found = {name: [say(agent, name, text) for text in texts] for name, texts in TEXTS.items()}
    assert found == alone
    assert failing.n == 1
    assert agent.state().pressure_events == 1


def test_another_error_is_raised_as_it_is(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    Failing(monkeypatch, "_decode", times=1, error=lambda: RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        agent.chat("hello")
    assert agent.state().pressure_events == 0
    assert agent.chat("hello").finish_reason == "length"


def test_so_many_rows_never_fit_into_one_step(make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    failing = Failing(monkeypatch, "_decode", when=lambda n: n > 2)
    assert talk_at_once(agent) == {name: [text for text, _ in said] for name, said in alone.items()}
    state = agent.state()
    assert state.pressure_events == failing.n
    assert failing.n == 0 or state.rows_allowed < 4


def test_after_failures_again_and_again_the_cache_becomes_smaller(
    make: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    found = {name: [say(agent, name, texts[0])] for name, texts in TEXTS.items()}
    before = agent.state()
    assert (before.rows, before.rows_allowed, before.resident, before.swap_bytes) == (4, 4, 4, 0)
    failing = Failing(monkeypatch, "_prefill", times=0)
    rows = []
    for turn in (1, 2, 3):
        for name in TEXTS:
            failing.left = failing.n < 3
            found[name].append(say(agent, name, TEXTS[name][turn]))
            state = agent.state()
            rows.append((state.rows_allowed, state.rows))
    assert found == alone
    assert failing.n == 3
    # Four rows are taken, then three, then two; the third time the cache is made anew with one.
    assert rows[:3] == [(3, 4), (2, 4), (1, 1)]
    assert set(rows[3:]) == {(1, 1)}
    after = agent.state()
    assert after.cache_bytes * 4 == before.cache_bytes
    assert after.resident == 1
    assert after.swap_outs > 3


def test_turns_that_run_do_not_notice_that_the_cache_is_made_anew(make: Any, alone: Any) -> None:
    agent = make()
    found = {name: [say(agent, name, TEXTS[name][0])] for name in TEXTS}
    for turn in (1, 2):
        streams = {name: agent._kept_session(name, None).stream(TEXTS[name][turn]) for name in ("2", "3")}
        pieces = {name: [next(stream), next(stream)] for name, stream in streams.items()}
        for _ in range(3):
            agent._watch.relieve()
        state = agent.state()
        assert (state.rows, state.rows_allowed, state.resident) == (2, 1, 2)
        for name, stream in streams.items():
            found[name].append(("".join([*pieces[name], *stream]), window_of(agent, name)))
        agent._engine.resize(4)
        agent._engine.rows_allowed = 4
        for name in ("0", "1"):
            found[name].append(say(agent, name, TEXTS[name][turn]))
    assert found == {name: replies[:3] for name, replies in alone.items()}


def test_where_nothing_helps_the_turn_fails_and_the_next_goes_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(rows=1)
    with agent.session() as chat:
        chat.chat("amber")
        with monkeypatch.context() as patch:
            failing = Failing(patch, "_decode")
            with pytest.raises(MemoryError):
                chat.chat("basil")
            assert failing.n == 2, "a single time more"
        assert chat.chat("cedar").finish_reason == "length"
        said = [exchange.user for exchange in chat._conversation.window]
        assert said == ["amber", "basil", "cedar"]


def test_keys_that_were_turned_in_part_are_never_used(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(rows=1)
    agent._engine.limit = 300
    rebase, fail = StreamingModel.rebase, [True]

    def in_part(self: StreamingModel, cache: Any, *given: Any) -> None:
        rebase(self, cache, *given)
        if fail:
            fail.clear()
            raise MemoryError("no memory for the last layer")

    monkeypatch.setattr(StreamingModel, "rebase", in_part)
    with agent.session() as chat:
        raised = None
        for i in range(20):
            try:
                chat.chat(f"amber {i}")
            except CapacityError as error:
                raised = error
                assert chat._conversation.row is None
        assert raised is not None
        assert "filled anew" in str(raised)


def test_no_memory_to_park_a_conversation(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(rows=1)
    agent.chat("amber", session="a")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "take", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        assert agent.chat("basil", session="b").finish_reason == "length"
    agent.chat("cedar", session="a")
    a = next(c for scope, c in agent._residents._open.items() if scope.conversation == "a")
    assert [exchange.user for exchange in a.window] == ["amber", "cedar"]
    assert agent.state().rebuilds == 1


# ---- looking ----


def test_little_memory_frees_rows_and_states_until_there_is_enough(
    make: Any, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(rows=3)
    found = {name: [say(agent, name, texts[0])] for name, texts in TEXTS.items()}
    left = Free(100, 1000)
    monkeypatch.setattr(watching, "free_memory", lambda: left)
    states: list[EngineState] = []

    def look() -> tuple[int, int, int]:
        agent._watch.look()
        states.append(agent.state())
        return states[-1].rows_allowed, states[-1].rows, states[-1].resident

    assert look() == (3, 3, 3)
    left = Free(10, 1000)
    assert look() == (2, 3, 2)
    assert look() == (2, 3, 2), "too soon"
    monkeypatch.setattr(watching, "_APART_S", 0.0)
    assert look() == (1, 3, 1)
    assert look() == (1, 1, 1), "the third time"
    # All states are of a size; each time, one of a row that is freed comes to it and half of them become files.
    assert [state.swap_bytes / states[0].swap_bytes for state in states] == [1, 1, 1, 1, 0]
    assert files(tmp_path / "store.db") == {"1.snapshot", "2.snapshot", "3.snapshot"}
    for name, texts in TEXTS.items():
        found[name].append(say(agent, name, texts[1]))
    left = Free(100, 1000)
    assert look() == (1, 1, 1), "too soon"
    monkeypatch.setattr(watching, "_QUIET_S", 0.0)
    assert [look()[:2] for _ in range(3)] == [(2, 2), (3, 3), (3, 3)]
    for name, texts in TEXTS.items():
        found[name] += [say(agent, name, text) for text in texts[2:]]
    assert found == alone
    assert agent.state().pressure_events == 3


def test_a_row_that_there_is_no_memory_for_is_not_used_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(rows=2)
    for _ in range(3):
        agent._watch.relieve()
    assert agent.state().rows == 1
    monkeypatch.setattr(watching, "free_memory", lambda: Free(100, 1000))
    monkeypatch.setattr(watching, "_QUIET_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(agent._engine.cache, "resize", lambda rows: (_ for _ in ()).throw(MemoryError("no memory")))
        agent._watch.look()
    assert (agent.state().rows, agent.state().rows_allowed) == (1, 1)
    assert agent.chat("hello").finish_reason == "length"
    agent._watch.look()
    assert (agent.state().rows, agent.state().rows_allowed) == (2, 2)


def test_the_log_has_a_line_while_turns_run(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LINE_S", 0.0)
    monkeypatch.setattr(watching, "free_memory", lambda: Free(100, 1000))
    caplog.set_level(logging.INFO, logger="memstream.watch")
    agent = make(rows=2)
    agent._watch.look()
    assert caplog.messages == [], "nothing was said"
    for name in "abc":
        agent.chat("hello", session=name)
    agent._watch.look()
    agent._watch.look()
    (line,) = caplog.messages
    assert line.startswith("2 of 2 rows taken, 3 conversations open, 0 turns run, 0 wait; ")
    assert "tokens a second; process" in line


def test_the_state_in_numbers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, prefilled = list[int](), list[int]()
    decode, forward = Decode.__call__, StreamingModel.forward
    monkeypatch.setattr(Decode, "__call__", lambda *given: (decoded.append(len(given[1])), decode(*given))[1])
    monkeypatch.setattr(
        StreamingModel, "forward", lambda *given: (prefilled.append(sum(map(len, given[4]))), forward(*given))[1]
    )
    agent = make(rows=2, generation=GenerationConfig(max_new_tokens=5))
    empty = agent.state()
    assert (empty.rows, empty.rows_allowed, empty.open, empty.resident, empty.tokens) == (2, 2, 0, 0, 0)
    assert empty.cache_bytes == 2 * 256 * 2 * 2 * 2 * 8 * 4  # rows, slots, keys and values, layers, heads, dim, float32
    assert empty.process_bytes > 2**24
    replies = {name: agent.chat("hello", session=name) for name in "abc"}  # a is parked
    stream = agent.stream("more", session="a")  # b is
    next(stream)
    state = agent.state()
    assert (state.open, state.resident, state.running, state.waiting) == (3, 2, 1, 0)
    assert (state.swap_outs, state.swap_ins, state.rebuilds, state.pressure_events) == (2, 1, 0, 0)
    assert state.swap_out_ms > 0 < state.swap_in_ms
    b = next(c for scope, c in agent._residents._open.items() if scope.conversation == "b")
    assert state.swap_bytes == b.swapped.memory_bytes > 0
    assert state.swap_file_bytes == 0
    list(stream)
    state = agent.state()
    assert state.steps == state.tokens == sum(decoded) >= 20, "four replies of five tokens, one row at a time"
    assert state.prefill_tokens == sum(prefilled) >= sum(reply.usage.prompt_tokens for reply in replies.values())
    assert state.evictions == 0
    for i in range(6):
        n_evicted = len(agent.chat(f"amber {i}", session="a").evicted)
        assert agent.state().evictions - state.evictions == n_evicted
        state = agent.state()
    assert state.evictions > 0


# ---- rows keep what they hold ----


@pytest.fixture(scope="module")
def model() -> StreamingModel:
    return StreamingModel(tiny.model())


MOVES = st.lists(
    st.one_of(
        st.just(("admit", 0)),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("resize"), st.integers(0, 6)),
        st.tuples(st.just("fail"), st.integers(0, 6)),
    ),
    max_size=14,
)


@given(moves=MOVES)
@settings(deadline=None, max_examples=60)
def test_every_row_keeps_what_it_holds(model: StreamingModel, moves: list[tuple[str, int]]) -> None:
    engine, rows, n_admitted = Engine(model, CACHE, rows=3), list[tuple[Row, dict[str, torch.Tensor]]](), 0
    for move, number in moves:
        if move == "admit" and engine.has_free_row:
            row = engine.admit()
            row.layout.open_group(0)
            engine.feed(row, tokens(7, seed=n_admitted))
            rows.append((row, snapshot.take(engine.cache, row)[0]))
            n_admitted += 1
        elif move == "leave" and rows:
            engine.leave(rows.pop(number % len(rows))[0])
        elif move == "resize":
            engine.resize(number)
            engine.rows_allowed = engine.rows
            assert engine.rows == max(number, len(rows), 1)
            assert all(len(side) == engine.rows for side in (*engine.cache.keys, *engine.cache.values))
        elif move == "fail":
            with failing_after(number % 4), contextlib.suppress(MemoryError):
                engine.resize(number)
        indices = [row.index for row, _ in rows]
        assert len(set(indices)) == len(rows) == engine.n_taken
        assert sorted([*indices, *engine._free]) == list(range(engine.rows))
        for row, held in rows:
            for name, tensor in snapshot.take(engine.cache, row)[0].items():
                assert torch.equal(tensor, held[name])


class failing_after:
    """Within, memory runs out once so many tensors were made."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        make = torch.Tensor.new_zeros

        def new_zeros(*given: Any, **named: Any) -> torch.Tensor:
            if not self._left:
                raise MemoryError("no memory")
            self._left -= 1
            return make(*given, **named)

        self._patch.setattr(torch.Tensor, "new_zeros", new_zeros)

    def __exit__(self, *exception: object) -> None:
        self._patch.undo()


def test_rows_go_on_in_a_cache_made_anew(model: StreamingModel) -> None:
    engine, other = Engine(model, CACHE, rows=4), Engine(model, CACHE, rows=4)
    rows, undisturbed = [engine.admit() for _ in range(4)], [other.admit() for _ in range(4)]
    for i in range(4):
        for one, row in ((engine, rows[i]), (other, undisturbed[i])):
            row.layout.open_group(0)
            one.feed(row, tokens(20 + i, seed=i))
    engine.leave(rows[0])
    engine.leave(rows[2])
    for n_rows in (2, 5, 2):
        engine.resize(n_rows)
        assert engine.cache_bytes == other.cache_bytes * n_rows // 4
        for token in tokens(3, seed=9):
            engine.step([rows[1], rows[3]], [token, token + 1])
            other.step([undisturbed[1], undisturbed[3]], [token, token + 1])
            for i in (1, 3):
                assert torch.equal(rows[i].logits, undisturbed[i].logits)
