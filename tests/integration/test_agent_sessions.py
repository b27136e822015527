"""Several conversations, threads, event loops and owners on one agent; how it is set up and closed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from memstream import Agent, GenerationConfig, RecallConfig
from memstream.errors import BusyError, ConfigError, ConversationBusyError
from memstream.memory import Scope
from memstream.streaming.model import StreamingModel
from tests.integration import tiny


def test_two_conversations_on_one_row_equal_the_same_apart(make: Any, tmp_path: Path) -> None:
    off = RecallConfig(enabled=False)
    together = make(recall=off)
    apart = [make(store=tmp_path / f"{i}.db", recall=off) for i in range(2)]
    for turn in range(5):
        for i in range(2):
            text = f"conversation {i} turn {turn}"
            assert together.chat(text, session=str(i)).text == apart[i].chat(text, session=str(i)).text


def test_a_second_stream_in_one_thread_is_an_error_and_in_another_waits(make: Any) -> None:
    agent = make(generation=GenerationConfig(max_new_tokens=40))
    one, two = agent.session(name="1"), agent.session(name="2")
    stream = one.stream("hello")
    next(stream)
    with pytest.raises(BusyError, match="still being streamed"):
        two.chat("hello")
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(two.chat("hello").text))
    thread.start()
    rest = list(stream)
    thread.join(timeout=30)
    assert len(answers) == 1
    assert rest
    one.close()
    two.close()


def test_threads_on_one_conversation_queue(make: Any, tmp_path: Path) -> None:
    agent = make()
    chat = agent.session()
    threads = [threading.Thread(target=chat.chat, args=(f"from thread {i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chat.close()
    turns = tiny.stored(tmp_path / "store.db")
    assert [role for role, _, _ in turns] == ["user", "assistant"] * 6
    assert sorted(text for role, text, _ in turns if role == "user") == [f"from thread {i}" for i in range(6)]


def test_asyncio(make: Any, tmp_path: Path) -> None:
    agent = make()

    async def talk() -> tuple[str, str]:
        pieces = [piece async for piece in agent.astream("hello", session="a")]
        reply, _ = await asyncio.gather(agent.achat("hello", session="b"), agent.achat("more", session="a"))
        return "".join(pieces), reply.text

    streamed, text = asyncio.run(talk())
    assert streamed == text

    async def give_up() -> None:
        long = agent.session(name="c")
        task = asyncio.create_task(long.achat("hello", generation=GenerationConfig(max_new_tokens=3000)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert tiny.stored(tmp_path / "store.db")[-1][2] == "cut"


def test_the_conversation_has_one_owner(make: Any) -> None:
    agent, other = make(), make()
    with agent.session(user="a", name="x"):
        with pytest.raises(ConversationBusyError):
            other.session(user="a", name="x")
        with other.session(user="a", name="y"):
            pass
    with other.session(user="a", name="x"):
        pass


def test_closed_things_say_so(make: Any) -> None:
    agent = make()
    chat = agent.session()
    chat.close()
    chat.close()
    with pytest.raises(BusyError, match="closed"):
        chat.chat("hello")
    agent.close()
    agent.close()
    with pytest.raises(BusyError, match="closed"):
        agent.chat("hello")


def test_cancel_and_timeout(make: Any) -> None:
    agent = make(generation=GenerationConfig(max_new_tokens=400))
    with agent.session() as chat:
        pieces = []
        for piece in chat.stream("count"):
            pieces.append(piece)
            chat.cancel()
        assert chat.last is not None
        assert chat.last.finish_reason == "cancelled"
        assert len(pieces) <= 2
        late = chat.chat("count", generation=GenerationConfig(max_new_tokens=400, timeout_s=0.0))
        assert late.finish_reason == "timeout"
        assert late.text == ""
        assert chat.chat("count", generation=tiny.SHORT).finish_reason == "length"


def test_settings_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(
        'system = "Be kind."\n[cache]\ncache_tokens = 640\nmemory_tokens = 128\n[generation]\nmax_new_tokens = 5\n'
    )
    given = {"model": tiny.model(), "tokenizer": tiny.tokenizer(), "store": "memory", "embedder": tiny.WordEmbedder()}
    with Agent.from_toml(path, **given) as agent:
        assert (agent.cache.total, agent.cache.memory_tokens, agent.system) == (640, 128, "Be kind.")
        assert agent.chat("hello").usage.reply_tokens == 5
    path.write_text("cach = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'cach'"):
        Agent.from_toml(path)
    path.write_text("[cache]\nwindow = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'window'"):
        Agent.from_toml(path)


def test_a_store_in_memory_keeps_nothing(make: Any, tmp_path: Path) -> None:
    agent = make(store="memory")
    agent.chat("hello", session="a")
    agent.chat("hello", session="b")
    assert agent.chat("more", session="a").finish_reason == "length"
    assert [info.scope for info in agent.conversations()] == [Scope("default", None, "a"), Scope("default", None, "b")]
    agent.close()
    assert list(tmp_path.iterdir()) == []


def test_conversations_that_begin_alike_compute_their_beginning_once(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    forward = StreamingModel.forward

    def counted(self: StreamingModel, cache: Any, rows: Any, pieces: Any, tokens: Any) -> Any:
        computed.append(sum(map(len, tokens)))
        return forward(self, cache, rows, pieces, tokens)

    monkeypatch.setattr(StreamingModel, "forward", counted)

    def logits(agent: Agent, user: str) -> torch.Tensor:
        with agent.session(user=user) as session:
            computed.clear()
            session.chat("hello")
            row = session._conversation.resident
            assert row.logits is not None
            return row.logits.clone()

    long = "You answer in one word. " * 4
    agent = make(system=long)
    first, n_first = logits(agent, "a"), sum(computed)
    second, n_second = logits(agent, "b"), sum(computed)
    alone = logits(make(system=long, store=tmp_path / "other.db"), "b")
    assert n_first - n_second == len(agent._template.opening(long).tokens) > 20
    assert torch.equal(first, second)
    assert torch.equal(second, alone)
    other = make(system="Another one.", store=tmp_path / "third.db")
    assert not torch.equal(logits(other, "b"), alone)
