"""Turns that wait for a row: first come, first served; no more of them than may; nobody waits for another's prefill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstream import Agent, GenerationConfig, OverloadedError, RecallConfig
from memstream.conversation import Conversation
from memstream.errors import ConfigError
from tests.integration import tiny

LONG = GenerationConfig(max_new_tokens=300)


@pytest.fixture
def make(make: Any) -> Callable[..., Agent]:
    return lambda **settings: make(recall=RecallConfig(enabled=False), **settings)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits until something is so."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.002)


class Turn(threading.Thread):
    """A turn in a thread of its own."""

    def __init__(self, session: Any, text: str = "hello") -> None:
        super().__init__(daemon=True)
        self.session, self.text, self.raised, self.reply = session, text, None, None
        self.start()

    def run(self) -> None:
        try:
            self.reply = self.session.chat(self.text)
        except Exception as error:  # noqa: BLE001
            self.raised = error


@pytest.fixture
def busy(make: Any) -> Iterator[tuple[Agent, Iterator[str]]]:
    """An agent with one row, on which a reply is being streamed."""
    agent = make(max_waiting=2)
    stream = agent.session(name="talks").stream("hello", generation=LONG)
    next(stream)
    yield agent, stream
    for _ in stream:
        pass


def test_one_turn_more_than_may_wait_is_refused_at_once(busy: Any) -> None:
    agent, _ = busy
    sessions = [agent.session(name=str(i)) for i in range(3)]
    turns = [Turn(sessions[0]), Turn(sessions[1])]
    until(lambda: agent._residents.waiting.n == 2)
    refused = Turn(sessions[2])
    refused.join(20)
    assert isinstance(refused.raised, OverloadedError)
    assert "2 turns wait already" in str(refused.raised)
    sessions[0].cancel()
    turns[0].join(20)
    assert turns[0].reply.finish_reason == "cancelled"
    assert agent._residents.waiting.n == 1
    later = Turn(sessions[2])
    until(lambda: agent._residents.waiting.n == 2)
    for session in sessions[1:]:
        session.cancel()
    for turn in (turns[1], later):
        turn.join(20)
        assert turn.reply.finish_reason == "cancelled"
    assert agent._residents.waiting.n == 0


def test_a_turn_behind_another_of_its_conversation_waits_too(busy: Any) -> None:
    agent, _ = busy
    session = agent.session(name="talks")
    turns = [Turn(session), Turn(session)]
    until(lambda: agent._residents.waiting.n == 2)
    refused = Turn(session)
    refused.join(20)
    assert isinstance(refused.raised, OverloadedError)
    session.cancel()
    for turn in turns:
        turn.join(20)


def test_who_finds_a_row_does_not_wait(make: Any) -> None:
    agent = make(max_waiting=0)
    for name in ("a", "b", "a"):
        assert agent.chat("hello", session=name).finish_reason == "length"


def test_the_first_come_is_the_first_served(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, stream = busy
    agent._residents.waiting._most = None
    served: list[str | None] = []
    reserve = Conversation.reserve
    monkeypatch.setattr(
        Conversation, "reserve", lambda self: (served.append(self.handle.scope.conversation), reserve(self))[1]
    )
    names = [str(i) for i in range(6)]
    turns = []
    for n, name in enumerate(names, start=1):
        turns.append(Turn(agent.session(name=name)))
        until(lambda n=n: agent._residents.waiting.n == n)  # type: ignore[misc]
    for _ in stream:
        pass
    for turn in turns:
        turn.join(20)
        assert turn.raised is None
    assert served == names


def test_nobody_waits_for_a_history_that_another_reads_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(rows=2)
    slow, quick = agent.session(name="slow"), agent.session(name="quick")
    begun, go_on = threading.Event(), threading.Event()
    rebuild = Conversation._rebuild

    def held_up(self: Conversation) -> None:
        if self.handle.scope.conversation == "slow":
            begun.set()
            assert go_on.wait(20)
        rebuild(self)

    monkeypatch.setattr(Conversation, "_rebuild", held_up)
    turn = Turn(slow)
    assert begun.wait(20)
    try:
        for _ in range(2):
            other = Turn(quick)
            other.join(20)
            assert other.reply is not None, "it waited"
    finally:
        go_on.set()
    turn.join(20)
    assert turn.reply.finish_reason == "length"


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_number_of_turns_that_is_none(make: Any, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_waiting is"):
        make(max_waiting=value)
    assert not (tmp_path / "store.db").exists()


def test_it_can_be_set_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("max_waiting = 3\n")
    given = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "store": "memory", "embedder": tiny.WordEmbedder()}
    with Agent.from_toml(path, **given) as agent:
        assert agent._residents.waiting._most == 3
