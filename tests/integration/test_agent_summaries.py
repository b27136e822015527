"""The chat model as a summariser: in a cache of its own, and only while nobody waits for a reply."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from memstream import Agent, CacheConfig, GenerationConfig
from memstream.engine import Engine
from memstream.errors import ConfigError
from memstream.memory import Turn
from memstream.model_summarizer import ASK, STEP_TOKENS, ModelSummarizer
from memstream.queues import TurnQueue
from memstream.report import SummaryCounts
from memstream.streaming.model import StreamingModel
from memstream.template import ChatTemplate
from tests.integration import tiny

CACHE = CacheConfig(cache_tokens=512, memory_tokens=192, evict_tokens=16, chunk_tokens=64)


def summaries(path: Path) -> list[str]:
    """Texts of the store's summaries, read without memstream."""
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute("SELECT text FROM derived WHERE kind = 'summary' ORDER BY id")]


def turns(*texts: str) -> list[Turn]:
    now = datetime.now(UTC)
    return [Turn(i, i, ("user", "assistant")[i % 2], text, 1, now, "complete", 1) for i, text in enumerate(texts)]


@pytest.fixture
def engine() -> Engine:
    return Engine(StreamingModel(tiny.model()), CACHE)


@pytest.fixture
def summarizer(engine: Engine) -> ModelSummarizer:
    return ModelSummarizer(engine, ChatTemplate(tiny.tokenizer()), TurnQueue().is_quiet)


def fill(agent: Agent, user: str, n: int = 8) -> None:
    """Exchanges of about 100 tokens, more than a window of 316 holds."""
    with agent.session(user=user) as chat:
        for i in range(n):
            chat.add(f"Exchange {i} about the river and the old mill.", "Noted.")


def test_it_asks_the_model_in_its_own_cache(summarizer: ModelSummarizer, engine: Engine) -> None:
    asked = summarizer._asked(turns("My cat is\n called Minka.", "Noted: Minka."))
    assert asked == f"User: My cat is called Minka.\nAssistant: Noted: Minka.\n\n{ASK}"
    before = {name: tensor.clone() for name, tensor in engine.cache.read(0, [(0, CACHE.total)]).items()}
    first = summarizer(turns("amber basil", "cedar"))
    assert first == summarizer(turns("amber basil", "cedar")), "nothing of one is in the next"
    assert all((tensor == before[name]).all() for name, tensor in engine.cache.read(0, [(0, CACHE.total)]).items())
    assert summarizer.cache_bytes == summarizer._engine.cache_bytes > 0


def test_a_long_exchange_is_cut_to_fit(summarizer: ModelSummarizer) -> None:
    """A token a byte: 512 slots for the prompt, its frame, and 64 tokens of summary; short turns stay whole."""
    asked = summarizer._asked(turns("river " * 300, "amber basil"))
    assert "Assistant: amber basil\n" in asked
    assert asked.startswith("User: river river")
    assert asked.endswith(ASK)
    prompt = [*summarizer._opening.tokens, *summarizer._template.user(asked, prefix=summarizer._opening.user_prefix)]
    assert 512 - 64 - 30 < len(prompt) <= 512 - 64
    summarizer(turns("river " * 300, "amber basil"))


def test_no_step_is_longer_than_a_reply_may_wait_for(
    summarizer: ModelSummarizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    forward = Engine._forward

    def watched(self: Engine, rows: Any, tokens: Sequence[Sequence[int]], compute: Any) -> Any:
        lengths.append(len(tokens[0]))
        return forward(self, rows, tokens, compute)

    monkeypatch.setattr(Engine, "_forward", watched)
    summarizer(turns("amber basil cedar", "delta"))
    assert max(lengths) == STEP_TOKENS
    assert len(lengths) > 10


def test_it_computes_nothing_while_a_turn_is_lived(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TurnQueue()
    summarizer = ModelSummarizer(engine, ChatTemplate(tiny.tokenizer()), queue.is_quiet)
    steps: list[bool] = []
    forward = Engine._forward

    def watched(self: Engine, *args: Any) -> Any:
        steps.append(queue.is_quiet())
        if len(steps) == 3:  # a reply begins while this step is computed
            queue.enter(lambda: False)
            entered.set()
        return forward(self, *args)

    entered, made = threading.Event(), []
    monkeypatch.setattr(Engine, "_forward", watched)
    thread = threading.Thread(target=lambda: made.append(summarizer(turns("amber basil", "cedar"))))
    thread.start()
    assert entered.wait(20)
    thread.join(0.2)
    assert thread.is_alive()
    assert len(steps) == 3, "the step that was begun is the last one"
    queue.leave()
    thread.join(20)
    assert not thread.is_alive()
    assert len(steps) > 3
    assert all(steps)


def test_a_stream_that_nobody_reads_on_does_not_hold_it_up() -> None:
    queue = TurnQueue()
    assert queue.is_quiet()
    queue.enter(lambda: False)
    assert not queue.is_quiet()
    queue.suspended()
    assert not queue.is_quiet()  # the next piece may be asked for at once
    queue._suspended = time.monotonic() - 2 * queue.QUIET_S
    assert queue.is_quiet()
    queue.resumed()
    assert not queue.is_quiet()
    queue.leave()
    assert queue.is_quiet()


def test_stopping_gives_up_in_the_middle(engine: Engine) -> None:
    summarizer = ModelSummarizer(engine, ChatTemplate(tiny.tokenizer()), lambda: False)
    made: list[str] = []
    thread = threading.Thread(target=lambda: made.append(summarizer(turns("amber", "basil"))))
    thread.start()
    summarizer.stop()
    thread.join(20)
    assert made == [""]
    assert len(summarizer._engine._free) == 1, "its row is free again"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def build(**settings: Any) -> Agent:
        given = {"cache": CACHE, "generation": tiny.SHORT, "embedder": tiny.WordEmbedder(), "store": tmp_path / "s.db"}
        made.append(Agent(tiny.model(), tokenizer=tiny.tokenizer(), **{**given, **settings}))
        return made[-1]

    yield build
    for agent in made:
        agent.close()


def test_an_agent_lets_its_model_summarise(
    make: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(summarizer="model")
    assert agent.cache_bytes == 2 * make(summarizer="extractive", store="memory").cache_bytes  # 512 tokens each
    said = iter(["The river is old.", "Varga owns 12 mills.", ""])  # known words; an invented name and number; nothing
    monkeypatch.setattr(ModelSummarizer, "__call__", lambda self, turns: next(said, "The old mill."))
    fill(agent, "a")
    agent.memory.flush()
    n = len(summaries(tmp_path / "s.db"))
    assert n >= 4
    assert summaries(tmp_path / "s.db")[:3] == [
        "The river is old.",
        "Exchange 1 about the river and the old mill. Noted.",
        "Exchange 2 about the river and the old mill. Noted.",
    ]
    with agent.session(user="a") as chat:
        reply = chat.chat("What about the river?")
        agent.memory.flush()
        assert reply.summaries == SummaryCounts(chosen=n - 2, extractive=2, rejected=1)
        texts = {turn.text for turn in chat._conversation.handle.turns()}
        assert {note.text for note in reply.recalled} <= texts


def test_the_model_really_summarises_while_replies_go_on(make: Callable[..., Agent], tmp_path: Path) -> None:
    """A random model names what nobody said, or says no sentence: every exchange has its extractive summary."""
    agent = make(summarizer="model")
    fill(agent, "a", 4)
    with agent.session(user="a") as chat:
        assert chat.chat("hello", generation=GenerationConfig(max_new_tokens=20)).usage.reply_tokens == 20
    agent.memory.flush()
    made = agent.memory.summaries
    assert len(summaries(tmp_path / "s.db")) == made.chosen + made.extractive >= 1
    assert made.failed == made.copies == 0


def test_closing_does_not_wait_for_the_model(
    make: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make(summarizer="model")
    steps = iter(range(10**9))
    monkeypatch.setattr(ModelSummarizer, "_is_stopped", lambda self: next(steps) >= 0 and self._stopped.wait(60))
    fill(agent, "a")
    agent.close()
    assert next(steps) <= 2, "one was asked and given up"
    assert len(summaries(tmp_path / "s.db")) == agent.memory.summaries.extractive >= 4
    assert agent.memory.summaries.failed == 0


def test_a_failing_summariser_is_told_and_loses_nothing(make: Callable[..., Agent], tmp_path: Path) -> None:
    def broken(turns: Sequence[Turn]) -> str:
        raise RuntimeError("no")

    agent = make(summarizer=broken)
    fill(agent, "a")
    agent.memory.flush()
    with agent.session(user="a") as chat:
        reply = chat.chat("hello")
    assert reply.summaries.failed == reply.summaries.extractive >= 4
    assert {"Exchange 0 about the river and the old mill.", "Noted."} <= {
        t for _, t, _ in tiny.stored(tmp_path / "s.db")
    }


def test_what_is_left_over_from_a_killed_process_is_summarised(make: Callable[..., Agent], tmp_path: Path) -> None:
    agent = make(summarizer=lambda turns: "zephyr")
    fill(agent, "a")
    agent.memory.flush()
    n = len(summaries(tmp_path / "s.db"))
    agent.close()
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:  # as if killed before any was made
        connection.executescript("DELETE FROM derived; DELETE FROM events WHERE chunk_id IN "
            "(SELECT id FROM chunks WHERE kind = 'summary'); DELETE FROM embeddings WHERE chunk_id IN "
            "(SELECT id FROM chunks WHERE kind = 'summary'); DELETE FROM chunks WHERE kind = 'summary'")  # fmt: skip
    again = make(summarizer=lambda turns: "zephyr")
    with again.session(user="a") as chat:
        chat.chat("hello")
        again.memory.flush()
        assert n <= len(summaries(tmp_path / "s.db")) <= n + 1
    again.memory.flush()
    assert again.memory.verify().problems == ()


def test_a_summariser_is_one_of_three(make: Callable[..., Agent], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="summarizer is 'nobody'"):
        make(summarizer="nobody")
    (tmp_path / "a.toml").write_text('summarizer = "model"\n')
    agent = Agent.from_toml(
        tmp_path / "a.toml", model=tiny.model(), tokenizer=tiny.tokenizer(), store="memory", cache=CACHE,
        embedder=tiny.WordEmbedder(),
    )  # fmt: skip
    assert agent._summarizer is not None
    agent.close()
