"""Conversations without a row: in memory, then in files, then nowhere; what comes back is what was put away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memstream import Agent, RecallConfig
from memstream.conversation import Conversation
from memstream.errors import ConfigError
from memstream.memory import Memory, Scope, SqlStore
from memstream.streaming import snapshot
from memstream.streaming.model import StreamingModel
from memstream.swap import SwapRoom, file_bytes, swap_room
from tests.integration import tiny

OFF = RecallConfig(enabled=False)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dimension, float32
WHERE = ["memory", "file"]


def state_bytes(conversation: Conversation) -> int:
    """What a conversation with a row takes without one: its slots, an id each, and the last logits."""
    return conversation.resident.layout.held * (TOKEN_BYTES + 8) + 259 * 4


@pytest.fixture
def make(make: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Agent]:
    """``where``: memory, or file for an agent that keeps nothing in memory."""

    def build(where: str = "memory", **settings: Any) -> Agent:
        agent: Agent = make(**{"recall": OFF, **settings})
        if where == "file":
            agent._residents._swap = agent._residents._swap._replace(memory=0)
        return agent

    return build


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all pieces that are prefilled."""
    found: list[int] = []
    forward = StreamingModel.forward

    def counted(self: StreamingModel, cache: Any, rows: Any, pieces: Any, tokens: Any) -> Any:
        found.append(sum(map(len, tokens)))
        return forward(self, cache, rows, pieces, tokens)

    monkeypatch.setattr(StreamingModel, "forward", counted)
    return found


def conversation(agent: Agent, name: str) -> Conversation:
    return next(c for scope, c in agent._residents._open.items() if scope.conversation == name)


def seen(agent: Agent, conversation: Conversation) -> str:
    """Everything in a conversation's row, as text."""
    row = conversation.resident
    return str(agent._template.tokenizer.decode([*row.sink_ids, *row.memory_ids, *row.window_ids]))


def files(path: Path) -> set[str]:
    folder = Path(f"{path}-snapshots")
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("where", WHERE)
def test_it_comes_back_bit_for_bit(make: Any, tmp_path: Path, where: str) -> None:
    agent = make(where)
    agent.chat("my harbour is Valparaiso", session="a")
    a = conversation(agent, "a")
    before = snapshot.take(agent._engine.cache, a.resident)
    agent.chat("hello", session="b")
    assert a.row is None
    assert (a.swapped.memory_bytes == 0) == (where == "file")
    assert files(tmp_path / "store.db") == ({"1.snapshot"} if where == "file" else set())
    agent._residents.make_resident(a, lambda: False)
    after = snapshot.take(agent._engine.cache, a.resident)
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name
    assert a.swapped.memory_bytes == 0


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("rows", [1, 2])
def test_more_conversations_than_rows_reply_as_each_alone(
    make: Any, tmp_path: Path, where: str, rows: int, prefilled: list[int]
) -> None:
    agent, alone = make(where, rows=rows), make(store=tmp_path / "alone.db", rows=5)
    draw, n_turns = random.Random(0), 0
    turns = [(str(draw.randrange(5)), f"amber {i}") for i in range(30)]
    for name, text in turns:
        prefilled.clear()
        swapped = agent.chat(text, session=name)
        together = sum(prefilled)
        prefilled.clear()
        assert alone.chat(text, session=name).text == swapped.text
        assert together == sum(prefilled), "nothing was read again"
        n_turns += 1
    assert n_turns == 30


def test_the_budget_in_memory_drops_who_was_unused_for_longest(make: Any, prefilled: list[int]) -> None:
    agent = make(store="memory")
    agent.chat("hello", session="0")
    size = state_bytes(conversation(agent, "0"))
    agent._residents._swap = SwapRoom(3 * size, 3 * size)
    for i in range(1, 6):  # 5 has the row
        agent.chat("hello", session=str(i))
    kept = {str(i): conversation(agent, str(i)).swapped.memory_bytes for i in range(6)}
    assert kept == {"0": 0, "1": 0, "2": size, "3": size, "4": size, "5": 0}
    assert agent.chat("again", session="2")  # drops nobody: it makes room itself
    assert [conversation(agent, name).swapped.memory_bytes for name in "345"] == [size] * 3
    prefilled.clear()
    agent.chat("again", session="0")
    assert sum(prefilled) > 60, "it was read again from its turns"
    window = [exchange.user for exchange in conversation(agent, "0").window]
    assert window == ["hello", "again"]


def test_what_memory_has_no_room_for_goes_into_files(make: Any, tmp_path: Path, prefilled: list[int]) -> None:
    agent = make()
    agent.chat("hello", session="0")
    size = state_bytes(conversation(agent, "0"))
    agent._residents._swap = SwapRoom(10**9, 2 * size)
    for i in range(1, 6):
        agent.chat("hello", session=str(i))
    assert [conversation(agent, str(i)).swapped.memory_bytes for i in range(6)] == [0, 0, 0, size, size, 0]
    assert files(tmp_path / "store.db") == {"1.snapshot", "2.snapshot", "3.snapshot"}
    prefilled.clear()
    agent.chat("again", session="0")
    once = sum(prefilled)
    prefilled.clear()
    agent.chat("again", session="5")
    assert sum(prefilled) == once, "both computed their turn, and nothing else"


def test_files_keep_to_the_budget(make: Any, tmp_path: Path) -> None:
    agent = make()
    path, sizes = tmp_path / "store.db", []
    for i in range(7):
        with agent.session(user=str(i)) as chat:
            chat.chat("hello")
        sizes.append(file_bytes(path) - sum(sizes))
        if i == 2:
            agent._residents._swap = SwapRoom(sum(sizes) + 100, 10**9)
    assert files(path) == {f"{i}.snapshot" for i in (5, 6, 7)}
    agent._residents._swap = SwapRoom(1000, 10**9)  # less than one takes
    with agent.session(user="8") as chat:
        chat.chat("hello")
    assert files(path) == {f"{i}.snapshot" for i in (5, 6, 7)}
    assert agent.memory.verify().problems == ()


def test_a_budget_of_nothing_reads_every_history_again(make: Any, tmp_path: Path) -> None:
    agent = make(swap_bytes=0)
    for name in ("a", "b", "a"):
        agent.chat(f"hello {name}", session=name)
    assert [exchange.user for exchange in conversation(agent, "a").window] == ["hello a", "hello a"]
    assert agent._residents._parked() == []
    agent.close()
    assert files(tmp_path / "store.db") == set()


def test_closing_writes_what_is_in_memory(make: Any, prefilled: list[int]) -> None:
    agent = make()
    for name in "abc":
        agent.chat("hello", session=name)
    prefilled.clear()
    agent.chat("again", session="c")
    turn = sum(prefilled)
    agent.close()
    again = make()
    for name in "ab":
        prefilled.clear()
        again.chat("again", session=name)
        assert sum(prefilled) == turn, "nothing was read again"


def test_forgetting_reaches_what_is_in_memory(make: Any) -> None:
    agent = make()
    agent.chat("my secret is xylophone", user="u", session="a")
    agent.chat("hello", user="u", session="b")
    agent.chat("hello", user="other", session="c")
    a, b = conversation(agent, "a"), conversation(agent, "b")
    assert a.swapped.memory_bytes > 0
    assert b.swapped.memory_bytes > 0
    receipt = agent.forget("turn:1", user="u", session="b")
    assert (a.swapped.memory_bytes, b.swapped.memory_bytes) == (0, 0)
    assert receipt.caches == 2
    assert conversation(agent, "c").row is not None, "somebody else's"
    agent.chat("what now", user="u", session="a")
    assert "xylophone" not in " ".join(exchange.user for exchange in a.window)


@pytest.mark.parametrize("where", WHERE)
def test_what_another_process_forgets_does_not_come_back(
    make: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it is forgotten while the conversation waits for its row."""
    agent = make(where)
    agent.chat("my secret is xylophone", user="u", session="a")
    agent.chat("hello", user="u", session="a")
    agent.chat("hello", user="other", session="b")

    def forget(turn: str) -> None:
        other = Memory(SqlStore.open(tmp_path / "store.db"), tiny.WordEmbedder(), RecallConfig())
        assert other.forget(Scope("default", "u", "a"), turn).verified
        other.close()

    reserve = Conversation.reserve
    forgotten: list[str] = []

    def late(self: Conversation) -> None:
        reserve(self)
        if not forgotten:
            forgotten.append("turn:1")
            forget("turn:1")

    monkeypatch.setattr(Conversation, "reserve", late)
    agent.chat("what now", user="u", session="a")
    a = conversation(agent, "a")
    assert forgotten == ["turn:1"]
    assert [exchange.user for exchange in a.window][1:] == ["hello", "what now"]
    assert "xylophone" not in seen(agent, a)
    agent.chat("hello", user="other", session="b")
    forget("turn:3")
    agent.close()
    assert "1.snapshot" not in files(tmp_path / "store.db")


@pytest.mark.parametrize("where", WHERE)
def test_a_turn_taken_back_does_not_come_back(make: Any, where: str) -> None:
    agent = make(where)
    session = agent.session(name="a")
    session.chat("hello")
    session.chat("amber")
    agent.chat("hello", session="b")  # takes the row
    session.take_back(session.turns()[2])
    session.chat("basil")
    a = conversation(agent, "a")
    assert [exchange.user for exchange in a.window] == ["hello", "basil"]
    assert "amber" not in seen(agent, a)
    assert agent.memory.verify().problems == ()


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_budget_that_is_none(make: Any, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swap_bytes is"):
        make(swap_bytes=value)
    assert not (tmp_path / "store.db").exists()


def test_it_can_be_set_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("swap_bytes = 3000\n")
    given = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "store": "memory", "embedder": tiny.WordEmbedder()}
    with Agent.from_toml(path, **given) as agent:
        assert agent._residents._swap == SwapRoom(3000, 3000)


def test_a_budget_is_a_tenth_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memstream import machine, swap

    monkeypatch.setattr(swap, "free_memory", lambda: machine.Free(5_000, 20_000))
    monkeypatch.setattr(swap.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 69_000}))
    store = tmp_path / "s.db"
    folder = tmp_path / "s.db-snapshots"
    folder.mkdir()
    (folder / "1.snapshot").write_bytes(b"x" * 1000)
    assert swap_room(None, store) == SwapRoom(500 + 7_000, 500)
    assert swap_room(None, None) == SwapRoom(500, 500)
    assert swap_room(90_000, store) == SwapRoom(90_000, 500)
    assert swap_room(90_000, None) == SwapRoom(90_000, 90_000)
    assert swap_room(300, store) == SwapRoom(300, 300)
