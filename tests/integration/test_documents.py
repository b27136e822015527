"""A desk's handbook: the real model answers from it, the citation says where that stands, strangers see nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memstream import Agent, CacheConfig, GenerationConfig
from memstream.errors import InputError
from memstream.memory import Document, Scope
from tests.integration.test_agent import row_of

DESK = Path(__file__).parents[1] / "data" / "desk"


@pytest.fixture
def desk(tmp_path: Path, smollm2: Any) -> Any:
    def open_agent(namespace: str) -> Agent:
        return Agent(
            model=smollm2.model,
            tokenizer=smollm2.tokenizer,
            store=tmp_path / "a.db",
            namespace=namespace,
            cache=CacheConfig(cache_tokens=1024, memory_tokens=320),
            generation=GenerationConfig(max_new_tokens=32),
        )

    return open_agent


@pytest.mark.parametrize(
    ("question", "answer", "heading"),
    [
        ("What is the code word for a refund by telephone?", "MARIGOLD", "Order desk handbook > Returns > Refunds"),
        ("Which company carries heavy parcels as freight?", "Osprey", "Order desk handbook > Delivery"),
    ],
)
def test_a_question_is_answered_from_the_handbook(desk: Any, question: str, answer: str, heading: str) -> None:
    with desk("brindle") as agent:
        report = agent.add_documents(DESK)
        agent.memory.flush()
        assert len(report.added) == 4
        reply = agent.chat(question, user="c42")
        assert answer in reply.text
        best = max(reply.recalled, key=lambda note: note.why.score)
        assert best.citation is not None
        assert best.citation.heading == heading
        text = (DESK / "handbook.md").read_bytes().decode()
        assert answer in text[best.citation.first : best.citation.last]
        assert answer in "\n".join(text.split("\n")[best.citation.first_line - 1 : best.citation.last_line])
        assert best.citation.path == str(DESK / "handbook.md")
    with desk("finch") as agent:  # another namespace of the same store
        reply = agent.chat(question, user="c42")
        assert reply.recalled == ()
        assert answer not in reply.text
        assert "document" not in {item.role for item in agent.memory.search(Scope("finch", "c42"), question)}


def test_documents_are_added_changed_and_forgotten_while_people_chat(make: Any) -> None:
    agent = make(namespace="n")
    with agent.session(user="a") as chat, agent.session(user="b", name="other") as other:
        chat.chat("hello there")
        agent.add_documents(Document(name="kb", text="# Desk\n\nthe harbour opens at seven"))
        agent.add_documents(Document(name="mine", text="the harbour master is Ines"), user="b")
        agent.memory.flush()
        reply = chat.chat("when is the harbour open")
        assert [str(note.citation) for note in reply.recalled] == ["kb, Desk"]
        said = agent._template.tokenizer.decode(row_of(agent).memory_ids)
        assert "- From kb, Desk: the harbour opens at seven\n" in said
        assert {str(note.citation) for note in other.chat("who is the harbour master").recalled} >= {"mine"}
        agent.add_documents(Document(name="kb", text="# Desk\n\nthe harbour opens at nine"))
        agent.memory.flush()
        texts = [note.text for note in chat.chat("when is the harbour open").recalled]
        assert "the harbour opens at nine" in texts
        assert "the harbour opens at seven" not in texts
        with pytest.raises(InputError):
            chat.forget("document:1")
        chat.chat("when is the harbour open")
        receipt = agent.forget("document:1", knowledge=True)
        assert receipt.verified
        assert receipt.caches == 1
        assert "harbour opens" not in agent._template.tokenizer.decode(agent_window(agent, chat))


def agent_window(agent: Agent, chat: Any) -> list[int]:
    """The window and the notes of a conversation once it says something more."""
    chat.chat("go on")
    return [*row_of(agent).window_ids, *row_of(agent).memory_ids]


def test_a_conversation_that_is_not_kept_recalls_shared_documents_alone(make: Any) -> None:
    agent = make(namespace="n")
    with agent.session(user="a") as chat:
        chat.chat("the harbour has a red crane")
    agent.add_documents(Document(name="kb", text="# Desk\n\nthe harbour opens at seven"))
    agent.add_documents(Document(name="mine", text="the harbour master is Ines"), user="a")
    agent.memory.flush()
    with agent.session(user="a", keep=False) as chat:
        asked = "when does the harbour open"
        assert [str(note.citation) for note in chat.recall(asked)] == ["kb, Desk"]
        assert [str(note.citation) for note in chat.chat(asked).recalled] == ["kb, Desk"]
    with agent.session(user="a", namespace="m", keep=False) as chat:
        assert chat.chat(asked).recalled == ()
    assert [info.scope.conversation for info in agent.conversations(user="a")] == ["default"]
