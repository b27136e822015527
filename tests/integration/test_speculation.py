"""Speculative decoding: with any drafts, right, half right or wrong, a reply and its row are what they are without."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from memstream import Agent, GenerationConfig, RecallConfig
from memstream.batching import Batch
from memstream.engine import Engine
from memstream.errors import ConfigError
from memstream.speculation import Speculation
from memstream.streaming.row import Row
from tests.integration import tiny
from tests.integration.families import FAMILIES, tiny_model
from tests.integration.test_agent import row_of
from tests.integration.test_oracles import EXACT, engine_for, tokens

OFF = RecallConfig(enabled=False)


@dataclass
class Oracle:
    """Drafts what a reply is known to say next, some of it spoiled."""

    truth: list[int] = field(default_factory=list)
    at: int = 0  # the token that is fed next
    spoiled: float = 0.0  # share
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, ids: list[int], most: int) -> list[int]:
        assert ids[-1] == self.truth[self.at]
        following = (self.truth[self.at + 1 :] + [5] * most)[:most]
        return [3 + self.draw.randrange(90) if self.draw.random() < self.spoiled else token for token in following]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """In the place of the look-up, and never switched off."""
    found = Oracle()
    monkeypatch.setattr("memstream.speculation.look_up", found)
    monkeypatch.setattr("memstream.speculation.Acceptance.note", lambda *_: None)
    return found


def talk(model: Any, position: Any, most: int, oracle: Oracle, known: list[list[int]]) -> tuple[Engine, Row, list[Any]]:
    """Four turns in which all happens: eviction, memory, rebase; slots that are free hold NaN."""
    engine = engine_for(model, memory_position=position)
    engine.limit = 120
    row, seen = engine.admit(), list[Any]()
    speculation = Speculation(Batch(engine, most=1))
    for turn in range(4):
        row.layout.open_group(turn)
        engine.feed(row, tokens(13 + 9 * turn, seed=turn))
        engine.set_memory(row, tokens(5 + turn, seed=100 + turn))
        speculation.begin()
        oracle.truth, said = known[turn] if known else [], list[int]()
        for oracle.at in range(30):
            assert row.logits is not None
            said.append(int(row.logits.argmax()))
            speculation.advance(row, said[-1], most)
            layout = row.layout
            for slot, length in layout._arcs(layout.end, layout.start + layout.window_room):
                engine.cache.poison(row.index, slot, length)
        speculation.end(row)
        assert speculation.drafted > 20 or not most
        seen.append((said, list(row.window_ids), row.take_gone(), row.logits))
        row.layout.close_group()
    assert row.layout.base > 0
    return engine, row, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_and_holds_the_same(family: str, oracle: Oracle) -> None:
    model, position = tiny_model(family), "before_turn" if len(family) % 2 else "after_sinks"
    plain_engine, plain, expected = talk(model, position, 0, oracle, [])
    known = [said for said, *_ in expected]
    for oracle.spoiled, most in ((0.2, 7), (1.0, 3)):
        engine, row, seen = talk(model, position, most, oracle, known)
        for (said, window, gone, logits), (said_too, window_too, gone_too, logits_too) in zip(
            seen, expected, strict=True
        ):
            assert said == said_too
            assert (window, gone) == (window_too, gone_too)
            torch.testing.assert_close(logits, logits_too, atol=EXACT, rtol=0)
        layout, layout_too = row.layout, plain.layout
        assert (layout.start, layout.end, layout.base) == (layout_too.start, layout_too.end, layout_too.base)
        arcs = layout.window_arcs()
        for held, held_too in zip(
            engine.cache.read(row.index, arcs).values(),
            plain_engine.cache.read(plain.index, arcs).values(),
            strict=True,
        ):
            torch.testing.assert_close(held, held_too, atol=EXACT, rtol=0)


def test_there_is_no_spare_room_where_something_would_have_to_leave_or_move() -> None:
    engine = engine_for(tiny_model("llama"))
    row = engine.admit()
    row.layout.open_group(0)
    engine.feed(row, tokens(3))
    assert engine.spare(row) == 0  # among the sinks nothing is taken back
    engine.feed(row, tokens(1 + 70))
    assert engine.spare(row) == 96 - 4 - 16 - 70 - 1
    engine.limit = 4 + 70 + 3
    assert engine.spare(row) == 2
    engine.feed(row, tokens(3))
    assert engine.spare(row) == 0
    engine.limit = 4096
    engine.feed(row, tokens(3))
    assert row.layout.room() == 0
    assert engine.spare(row) == 0


def says(agent: Agent, texts: list[str], **how: Any) -> list[Any]:
    return [agent.chat(text, **how) for text in texts]


TEXTS = [f"amber basil {i} amber basil" for i in range(8)]


def config(most: int, **settings: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 40, "speculative": most, **settings})


@pytest.mark.parametrize("most", [1, 4, 15])
def test_conversations_are_the_same_and_the_report_counts(make: Any, tmp_path: Any, most: int) -> None:
    expected = says(make(store=tmp_path / "plain.db", generation=config(0)), TEXTS, user="u")
    agent = make(generation=config(most))
    replies = says(agent, TEXTS, user="u")
    assert [reply.text for reply in replies] == [reply.text for reply in expected]
    assert [reply.evicted for reply in replies] == [reply.evicted for reply in expected]
    assert any(reply.evicted for reply in replies)
    assert any(reply.recalled for reply in replies)
    for reply, plain in zip(replies, expected, strict=True):
        assert plain.usage.drafted_tokens == plain.usage.accepted_tokens == 0
        assert 0 <= reply.usage.accepted_tokens <= reply.usage.drafted_tokens
        assert reply.usage.window_tokens == plain.usage.window_tokens
    state = agent.state()
    assert state.tokens - state.steps == sum(reply.usage.accepted_tokens for reply in replies)
    # A random model falls into loops, which is what a look-up is good at.
    assert sum(reply.usage.accepted_tokens for reply in replies) > 40


def spoken(make: Any, tmp_path: Any) -> tuple[str, list[int]]:
    """What the tiny model says to a text, and as tokens: a token a byte."""
    agent = make(store=tmp_path / "spoken.db", generation=config(0))
    text = agent.chat("amber").text
    ids = list(row_of(agent).window_ids)[-40 - len(agent._template.closing) :][:40]
    return text, ids


def window_of(agent: Agent) -> list[int]:
    return list(row_of(agent).window_ids)


@pytest.mark.parametrize("n", range(1, 9))
def test_a_reply_ends_inside_a_draft_as_it_would_end_without(make: Any, tmp_path: Any, oracle: Oracle, n: int) -> None:
    """By its length, by a stop text, by a token that ends it: all of a draft of eight is what the model would say."""
    text, ids = spoken(make, tmp_path)
    ending = ids[n] if ids[n] not in ids[:n] else None
    for settings, stop_id in (({"max_new_tokens": n}, None), ({"stop": (text[n : n + 3],)}, None), ({}, ending)):
        found = []
        for most in (0, 8):
            oracle.truth, oracle.at = ids, 0
            agent = make(store="memory", recall=OFF, generation=config(most, **settings))
            if stop_id is not None:
                agent._template.stop_ids |= {stop_id}
            advance = Speculation.advance

            def counted(self: Any, row: Any, token: int, most: int, advance: Any = advance) -> None:
                advance(self, row, token, most)
                oracle.at += 1

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Speculation, "advance", counted)
                reply = agent.chat("amber")
            found.append((reply.text, reply.finish_reason, reply.usage.reply_tokens, window_of(agent)))
            assert bool(reply.usage.drafted_tokens) == bool(most and reply.usage.reply_tokens)
        assert found[0] == found[1]


def test_a_reply_that_is_cancelled_leaves_what_was_said(make: Any) -> None:
    agent = make(recall=OFF, generation=config(8, max_new_tokens=200))
    chat, accepted = agent.session(user="a"), 0
    for i in range(4):
        stream = chat.stream(f"amber basil {i}")
        begun = "".join(next(stream) for _ in range(30 + i))
        stream.close()
        assert chat.last is not None
        assert (chat.last.text, chat.last.finish_reason) == (begun, "cancelled")
        accepted += chat.last.usage.accepted_tokens
        window = agent._template.tokenizer.decode(window_of(agent))
        assert window.endswith(begun + "<|im_end|>\n")
    assert accepted > 0
    plain = make(store="memory", recall=OFF, generation=config(0, max_new_tokens=200))
    other = plain.session(user="a")
    for i in range(4):
        stream = other.stream(f"amber basil {i}")
        for _ in range(30 + i):
            next(stream)
        stream.close()
    assert window_of(plain) == window_of(agent)


def test_wrong_drafts_are_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time: sixteen drafted tokens, 32 without, sixteen, 64 without, and sixteen again within 120."""
    monkeypatch.setattr("memstream.speculation.look_up", lambda ids, most: [258] * most)
    expected = make(store="memory", recall=OFF, generation=config(0, max_new_tokens=120)).chat("amber").text
    reply = make(recall=OFF, generation=config(4, max_new_tokens=120)).chat("amber")
    assert reply.text == expected
    assert (reply.usage.drafted_tokens, reply.usage.accepted_tokens) == (48, 0)


def test_rows_that_step_together_are_not_drafted_for(make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make(store=tmp_path / "alone.db", recall=OFF, generation=config(0, max_new_tokens=60))
    agent = make(recall=OFF, rows=3, generation=config(4, max_new_tokens=60))
    sizes: list[int] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, rows, ids: (sizes.append(len(rows)), step(self, rows, ids))[1])
    found: dict[str, list[str]] = {}
    gate = threading.Barrier(3)

    def chat(name: str) -> None:
        with agent.session(name=name) as session:
            gate.wait()
            found[name] = [session.chat(f"amber {name} {turn}").text for turn in range(3)]

    threads = [threading.Thread(target=chat, args=(str(i),), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 3 in sizes
    for name, said in found.items():
        assert [alone.chat(f"amber {name} {turn}", session=name).text for turn in range(3)] == said


@pytest.mark.parametrize(
    "settings",
    [{"speculative": 4, "temperature": 0.7}, {"speculative": 4, "repetition_penalty": 1.1}, {"speculative": 16}],
)
def test_what_cannot_be_checked_against_the_likeliest_token_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        GenerationConfig(**settings)


def test_logits_processors_are_refused_before_anything_is_stored(make: Any, tmp_path: Any) -> None:
    agent = make(generation=config(4), logits_processors=[lambda ids, scores: scores])
    with pytest.raises(ConfigError, match="logits_processors"):
        agent.chat("amber")
    assert tiny.stored(tmp_path / "store.db") == []


def test_a_sampling_client_of_a_speculative_server_is_served(make: Any) -> None:
    from memstream.serving.openai import ChatRequest

    said = {"model": "m", "messages": [{"role": "user", "content": "amber"}]}
    for asked, expected in (
        ({}, 4),
        ({"temperature": 0}, 4),
        ({"temperature": 0.7}, 0),
        ({"repetition_penalty": 1.2}, 0),
    ):
        assert ChatRequest(**said, **asked).generation(config(4), 64).speculative == expected


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of several threads may differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
