"""What goes wrong around a turn: late streams, closing, cancelling, forgetting elsewhere. Each was a fault once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstream import Agent, CacheConfig, GenerationConfig, RecallConfig
from memstream.errors import BusyError, ConfigError
from memstream.memory import Memory, Scope, SqlStore
from memstream.models import load_model
from tests.integration import tiny

ROOT = Path(__file__).resolve().parents[2]
CACHE = CacheConfig(cache_tokens=512, memory_tokens=192, evict_tokens=16, chunk_tokens=16)
LONG = GenerationConfig(max_new_tokens=300)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def build(**settings: Any) -> Agent:
        settings = {"cache": CACHE, "generation": GenerationConfig(max_new_tokens=6), **settings}
        given = {"tokenizer": tiny.tokenizer(), "store": tmp_path / "s.db", "embedder": tiny.WordEmbedder()}
        agent = Agent(tiny.model(), **{**given, **settings})
        made.append(agent)
        return agent

    yield build
    for agent in made:
        agent.close()


def row(agent: Agent) -> Any:
    return next(c.row for c in agent._residents._open.values() if c.row is not None)


def seen(agent: Agent) -> str:
    """Everything the cache holds, as text."""
    found = row(agent)
    return str(agent._template.tokenizer.decode([*found.sink_ids, *found.memory_ids, *found.window_ids]))


def test_a_stream_begun_after_its_session_was_closed_harms_nobody(make: Any) -> None:
    agent = make()
    chat = agent.session(user="a")
    late = chat.stream("hello")
    chat.close()
    assert list(late) == []
    with pytest.raises(BusyError, match="closed"):
        chat.stream("hello")
    assert agent.chat("hello", user="b").finish_reason == "length"


def test_short_forms_never_close_a_session_that_is_used(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream.agent._MOST_KEPT", 2)
    agent = make()
    waiting = agent.stream("hello", user="0")
    for i in range(1, 6):
        agent.chat("hello", user=str(i))
    assert len(agent._kept) <= 3
    assert "".join(waiting)
    del waiting
    agent.chat("hello", user="6")
    agent.chat("hello", user="7")
    assert len(agent._kept) == 2
    assert len(agent.conversations(user="0")) == 1


def test_sessions_open_and_close_while_a_reply_is_streamed(make: Any) -> None:
    agent = make(generation=LONG)
    one, other = agent.session(user="a"), agent.session(user="b")
    stream = one.stream("hello")
    next(stream)
    closing = threading.Thread(target=other.close)
    closing.start()
    time.sleep(0.2)
    third = agent.session(user="c")  # in this very thread, while another one waits to close
    for _ in stream:
        pass
    closing.join(timeout=20)
    assert not closing.is_alive()
    third.close()


def test_a_session_closed_in_its_own_stream_ends_the_reply(make: Any, tmp_path: Path) -> None:
    agent = make(generation=LONG)
    chat = agent.session(user="a", name="x")
    stream = chat.stream("hello")
    next(stream)
    chat.close()
    assert list(stream) == []
    assert chat.last is not None
    assert chat.last.finish_reason == "cancelled"
    with make().session(user="a", name="x"):
        pass


def test_an_agent_closed_in_a_stream_keeps_what_was_said(make: Any, tmp_path: Path) -> None:
    agent = make(generation=LONG)
    chat = agent.session(user="a")
    stream = chat.stream("hello")
    next(stream)
    agent.close()
    chat.close()
    with pytest.raises(BusyError, match="closed"):
        chat.remember("too late")
    assert (tmp_path / "s.db-snapshots" / "1.snapshot").is_file()


def test_every_call_gets_its_own_reply(make: Any) -> None:
    agent = make()

    async def all_at_once() -> list[int]:
        chat = agent.session(user="a")
        calls = [chat.achat(f"q{i}", generation=GenerationConfig(max_new_tokens=i + 1)) for i in range(6)]
        return [reply.usage.reply_tokens for reply in await asyncio.gather(*calls)]

    assert asyncio.run(all_at_once()) == [1, 2, 3, 4, 5, 6]


def test_cancelling_a_waiting_call_leaves_the_running_one_alone(make: Any, tmp_path: Path) -> None:
    agent = make(generation=LONG)

    async def talk() -> tuple[Any, float]:
        chat = agent.session(user="a")
        running = asyncio.create_task(chat.achat("first"))
        while not row_exists(agent):
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(chat.achat("second"))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await running, time.monotonic() - begun

    reply, _ = asyncio.run(talk())
    assert (reply.finish_reason, reply.usage.reply_tokens) == ("length", 300)
    with agent.session(user="a") as chat:
        assert not [found for found in chat.search("second") if found.text == "second"], "it was never said"


def row_exists(agent: Agent) -> bool:
    return any(c.row is not None for c in agent._residents._open.values())


def test_a_call_cancelled_before_it_begins_says_nothing(make: Any) -> None:
    agent = make(generation=LONG)
    with agent.session(user="a") as chat:
        stream = chat.stream("hello")
        chat.cancel()
        assert list(stream) == []
        assert chat.last is not None
        assert chat.last.finish_reason == "cancelled"


def test_a_turn_cut_off_in_its_prefill_is_not_half_in_the_window(make: Any) -> None:
    agent = make(recall=RecallConfig(enabled=False))
    with agent.session(user="a") as chat:
        stream = chat.stream("A" * 60 + " the code is 4711")
        chat.cancel()
        list(stream)
        chat.chat("go on")
        assert "the code is 4711<|im_end|>\n<|im_start|>assistant\n" in seen(agent)


def test_exchanges_among_the_sinks_do_not_block_recall(make: Any) -> None:
    agent = make(cache=CacheConfig(cache_tokens=600, sink_tokens=100, memory_tokens=192, evict_tokens=16))
    with agent.session(user="a") as chat:
        chat.remember("Prefers e-mail")
        chat.chat("hi")
        chat.chat("my harbour is Valparaiso")
        for i in range(14):
            chat.chat(f"filler number {i} about nothing")
        agent.memory.flush()
        notes = [note.text for note in chat.chat("which harbour is my harbour").recalled]
    assert "my harbour is Valparaiso" in notes


def test_what_another_process_forgets_leaves_this_cache_and_its_snapshot(make: Any, tmp_path: Path) -> None:
    agent = make(recall=RecallConfig(enabled=False))
    chat = agent.session(user="a")
    chat.chat("my secret is xylophone")
    chat.chat("hello again")
    other = Memory(SqlStore.open(tmp_path / "s.db"), tiny.WordEmbedder(), RecallConfig())
    assert other.forget(Scope("default", "a", "default"), "turn:1").verified
    other.close()
    chat.close()
    assert not (tmp_path / "s.db-snapshots" / "1.snapshot").exists()
    with agent.session(user="a") as chat:
        chat.chat("what now")
        assert "xylophone" not in seen(agent)
        assert "hello again" in seen(agent)
        other = Memory(SqlStore.open(tmp_path / "s.db"), tiny.WordEmbedder(), RecallConfig())
        other.forget(Scope("default", "a", "default"), "turn:3")
        other.close()
        chat.chat("and now")
        assert "hello again" not in seen(agent)


def test_a_snapshot_whose_writer_was_killed_is_forgotten_too(make: Any, tmp_path: Path) -> None:
    agent = make()
    agent.chat("my secret is xylophone", user="a")
    agent.close()
    folder = tmp_path / "s.db-snapshots"
    (folder / "1.snapshot.99.partial").write_bytes(b"xylophone")
    again = make()
    again.forget("turn:1", user="a")
    assert list(folder.iterdir()) == []


def test_a_stop_text_is_neither_said_nor_cached(make: Any) -> None:
    agent = make(recall=RecallConfig(enabled=False))
    with agent.session(user="a") as chat:
        whole = chat.chat("hello", generation=GenerationConfig(max_new_tokens=60)).text
    stop = whole[len(whole) // 2 :][:3]
    with agent.session(user="b") as chat:
        reply = chat.chat("hello", generation=GenerationConfig(max_new_tokens=60, stop=(stop,)))
        assert reply.text == whole[: whole.index(stop)]
        assert seen(agent).endswith(f"assistant\n{reply.text}<|im_end|>\n")


def test_a_generator_may_move_between_threads(make: Any) -> None:
    agent = make(generation=GenerationConfig(max_new_tokens=100))
    stream = agent.stream("hello", session="1")
    next(stream)
    waiting = threading.Thread(target=lambda: [time.sleep(0.3), *stream])
    waiting.start()
    assert agent.chat("hello", session="2").usage.reply_tokens == 100  # waits for the other thread to go on
    waiting.join()


def test_a_loaded_model_cannot_be_given_another_form_of_weights(tmp_path: Path) -> None:
    store = tmp_path / "never.db"
    with pytest.raises(ConfigError, match="loaded already"):
        Agent(model=tiny.model(), tokenizer=tiny.tokenizer(), store=store, weights="int4")
    assert not store.exists()


def test_what_load_model_returned_is_a_model(model_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model_folder), device="cpu")
    settings: dict[str, Any] = {"cache": tiny.CACHE, "generation": tiny.SHORT, "embedder": tiny.WordEmbedder()}
    with Agent(model=loaded, store=tmp_path / "a.db", **settings) as agent:
        said = agent.chat("hello").text
    with Agent(model=str(model_folder), store=tmp_path / "b.db", device="cpu", **settings) as agent:
        assert agent.chat("hello").text == said


def test_a_process_may_end_in_the_middle_of_a_stream(model_folder: Path, tmp_path: Path) -> None:
    code = f"""
from memstream import Agent
from tests.integration import tiny
agent = Agent({str(model_folder)!r}, store={str(tmp_path / "a.db")!r}, cache=tiny.CACHE, embedder=tiny.WordEmbedder())
stream = agent.session(user="u", name="c").stream("my harbour is Valparaiso")
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "Traceback" not in done.stderr
    memory = Memory(SqlStore.open(tmp_path / "a.db"), tiny.WordEmbedder(), RecallConfig())
    with memory.open_conversation(Scope("default", "u", "c")) as handle:
        assert [(turn.role, turn.state) for turn in handle.turns()] == [("user", "complete"), ("assistant", "cut")]
    memory.close()
