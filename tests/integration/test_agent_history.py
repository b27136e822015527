"""Other system texts, turns taken back, and conversations that are not kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from memstream import RecallConfig
from memstream.errors import CapacityError, InputError
from memstream.session import Session
from tests.integration import tiny

OFF = RecallConfig(enabled=False)


def seen(chat: Session) -> torch.Tensor:
    """What the row would say next: it depends on every token in it."""
    logits = chat._conversation.resident.logits
    assert logits is not None
    return logits.clone()


def test_a_session_may_speak_under_a_system_text_of_its_own(make: Any, tmp_path: Path) -> None:
    agent = make(system="You are the desk of a shop.", recall=OFF)
    with agent.session(name="a") as desk, agent.session(name="b", system="Be brief.") as brief:
        desk.chat("hello there")
        of_desk = seen(desk)
        brief.chat("hello there")
        spoken = seen(brief)
    other = make(system="Be brief.", store=tmp_path / "other.db", recall=OFF)
    with other.session(name="c") as same:
        same.chat("hello there")
        torch.testing.assert_close(seen(same), spoken)
    assert not torch.allclose(of_desk, spoken)


def test_the_system_text_may_change_between_turns(make: Any, tmp_path: Path) -> None:
    agent = make(system="One.", recall=OFF)
    with agent.session(name="a") as one:
        first = one.chat("hello there")
    with agent.session(name="a", system="Two.") as two:
        two.chat("go on")
        changed = seen(two)
    apart = make(system="Two.", store=tmp_path / "other.db", recall=OFF)
    with apart.session(name="a") as lived:
        lived.add("hello there", first.text)
        lived.chat("go on")
        torch.testing.assert_close(seen(lived), changed)


def test_a_system_text_that_cannot_be_pinned_changes_nothing(make: Any) -> None:
    agent = make(recall=OFF)
    with agent.session(name="a") as one:
        one.chat("hello there")
        with pytest.raises(CapacityError, match="pinned"), agent.session(name="a", system="long " * 200) as two:
            two.chat("go on")
        assert [turn.text for turn in one.turns()][:1] == ["hello there"]
        assert len(one.turns()) == 2
        one.chat("go on")


def test_what_is_taken_back_is_as_if_it_had_never_been_said(make: Any, tmp_path: Path) -> None:
    agent = make()
    with agent.session(user="anna", name="a") as chat:
        chat.chat("my cat is called Tom")
        chat.chat("the zebra is in the garden")
        undone = chat.turns()[2]
        assert undone.text == "the zebra is in the garden"
        chat.take_back(undone)
        assert [turn.text for turn in chat.turns() if turn.role == "user"] == ["my cat is called Tom"]
        chat.chat("what is my cat called")
        again = seen(chat)
        assert not [found for found in chat.search("zebra garden") if "zebra" in found.text]
    apart = make(store=tmp_path / "other.db")
    with apart.session(user="anna", name="a") as lived:
        lived.chat("my cat is called Tom")
        lived.chat("what is my cat called")
        torch.testing.assert_close(seen(lived), again)
    with sqlite3.connect(tmp_path / "store.db") as connection:
        kept = connection.execute("select count(*) from turns where superseded").fetchone()[0]
    assert kept == 2


def test_a_turn_said_in_other_words_computes_no_other_turn_again(make: Any) -> None:
    agent = make(recall=OFF)
    with agent.session() as chat:
        chat.chat("hello there")
        first = chat.chat("go on")
        for _ in range(3):
            chat.take_back(chat.turns()[2])
            again = chat.chat("go on")
            assert (again.text, again.usage) == (first.text, first.usage)


@pytest.mark.parametrize("n", [1, 3, 40])
def test_what_is_taken_back_may_be_more_than_the_window_holds(make: Any, n: int) -> None:
    agent = make(recall=OFF)
    with agent.session() as chat:
        for i in range(45):
            chat.chat(f"turn {i}")
        chat.take_back(chat.turns()[-2 * n])
        chat.chat("what now")
        window = [exchange.user for exchange in chat._conversation.window]
        assert window[-2:] == [f"turn {44 - n}", "what now"]
        layout = chat._conversation.resident.layout
        assert [group.key for group in layout.closed] == [exchange.key for exchange in chat._conversation.window]
        assert layout.window == len(chat._conversation.resident.window_ids) == sum(g.n_tokens for g in layout.closed)


def test_an_answer_alone_can_be_taken_back(make: Any) -> None:
    agent = make(recall=OFF)
    with agent.session() as chat:
        chat.chat("hello there")
        chat.chat("go on")
        chat.take_back(chat.turns()[3])
        assert [turn.role for turn in chat.turns()] == ["user", "assistant", "user"]
        chat.chat("and now")
        assert [exchange.user for exchange in chat._conversation.window] == ["hello there", "go on", "and now"]


def test_only_a_turn_of_the_conversation_can_be_taken_back(make: Any) -> None:
    agent = make()
    with agent.session(name="a") as one, agent.session(name="b") as two:
        one.chat("hello there")
        two.chat("hello here")
        two.chat("hello again")
        stranger = two.turns()[-2]
        with pytest.raises(InputError, match="not a turn of this conversation"):
            one.take_back(stranger)
        assert len(one.turns()) == 2
        assert len(two.turns()) == 4


def test_the_last_turns_are_read_alone(make: Any) -> None:
    agent = make(recall=OFF)
    with agent.session() as chat:
        for text in ("one", "two", "three"):
            chat.chat(text)
        assert chat.turns(last=2)[0].text == "three"
        assert len(chat.turns(last=100)) == 6


def test_what_is_not_kept_is_in_no_file_and_gone_afterwards(make: Any, tmp_path: Path) -> None:
    agent = make()
    with agent.session(user="anna", name="a") as kept:
        kept.chat("my cat is called Tom")
        with agent.session(user="anna", keep=False) as passing:
            reply = passing.chat("tell me about zanzibar and my cat")
            assert reply.recalled == ()
            passing.chat("go on")
            assert len(passing.turns()) == 4
        assert not kept.search("zanzibar")
    agent.memory.flush()
    assert [info.scope.conversation for info in agent.conversations(user="anna")] == ["a"]
    assert agent._passing is not None
    assert agent._passing.list_conversations(passing.scope) == []
    assert agent._passing.memories(passing.scope) == []
    agent.close()
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"zanzibar" not in file.read_bytes()


def test_a_conversation_that_is_not_kept_lives_as_one_that_is(make: Any) -> None:
    agent = make(recall=OFF)  # one row: each is swapped out for the other
    with agent.session(name="a") as kept, agent.session(keep=False) as passing, agent.session(keep=False) as third:
        for turn in range(5):
            text = f"turn {turn} of this"
            kept.chat(text)
            said = seen(kept)
            passing.chat(text)
            torch.testing.assert_close(seen(passing), said)
            third.chat(text)
            torch.testing.assert_close(seen(third), said)


def test_the_report_tells_how_much_the_reply_saw(make: Any) -> None:
    agent = make(recall=OFF)
    with agent.session() as chat:
        first = chat.chat("hello there").usage
        assert first.context_tokens == first.prompt_tokens
        second = chat.chat("hello there").usage
        assert second.context_tokens > second.prompt_tokens
        assert second.context_tokens <= tiny.CACHE.total


def test_what_nobody_answered_is_stored_and_found(make: Any) -> None:
    agent = make()
    with agent.session(user="anna", name="a") as chat:
        chat.add("my cat is called Tom", "")
        assert [(turn.role, turn.text, turn.state) for turn in chat.turns()] == [
            ("user", "my cat is called Tom", "complete"),
            ("assistant", "", "complete"),
        ]
        chat.chat("go on")
        with pytest.raises(InputError, match="empty"):
            chat.add("", "an answer")
    with agent.session(user="anna", name="b") as other:
        assert [note.text for note in other.recall("what is my cat called")][:1] == ["my cat is called Tom"]
        assert other.recall("zebra") == []
        assert other.turns() == []
