"""With the real embedder: facts told once are found among the three notes after much small talk."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SentenceTransformerEmbedder, SqlStore

FACTS = Path(__file__).parents[1] / "data" / "facts.json"
SCOPE = Scope("default", "c42", "first")
ACKNOWLEDGED = ["Thanks, noted.", "Got it.", "I will keep that in mind."]


def count(text: str) -> int:
    return 8 + len(text) // 4


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


@pytest.fixture(scope="module")
def told(embedder: SentenceTransformerEmbedder) -> Iterator[tuple[Memory, dict[str, str], int]]:
    """A memory after all facts and the small talk: with the turn of each question's fact, and the window's begin."""
    data = json.loads(FACTS.read_text())
    rng = random.Random(3)
    memory = Memory(SqlStore.open("memory"), embedder, RecallConfig(max_notes=3))
    turns = {}
    with memory.open_conversation(SCOPE) as handle:

        def say(user: str, assistant: str) -> int:
            asked = handle.begin_turn("user", user, count(user))
            replied = handle.begin_turn("assistant", "", 0)
            handle.finish_turn(replied, assistant, count(assistant), "complete")
            return asked

        for number, (fact, question) in enumerate(data["facts"]):
            echo = f"Noted: {fact.replace('My ', 'your ').replace('I ', 'you ')}"
            turns[question] = f"turn:{say(fact, ACKNOWLEDGED[number % 3] if number % 2 else echo)}"
            if number % 5 == 0:  # asked about before it counts, and answered without the fact
                say(question, "You told me a moment ago.")
        for _ in range(100):
            say(rng.choice(data["openers"]) + " " + rng.choice(data["talk"]), rng.choice(data["replies"]))
        window_from = handle.turns()[-1].sequence - 5
    memory.flush()
    yield memory, turns, window_from
    memory.close()


def test_95_percent_of_facts_are_among_three_notes(told: tuple[Memory, dict[str, str], int]) -> None:
    memory, turns, window_from = told
    missed = []
    for question, turn in turns.items():
        found = memory.recall(
            SCOPE,
            ["By the way, the weather is lovely today.", "It really is!", question],
            window_from=window_from,
            budget_tokens=256,
            count_tokens=count,
        )
        assert len(found.notes) <= 3
        assert [note.time for note in found.notes] == sorted(note.time for note in found.notes)
        if turn not in {note.id for note in found.notes}:
            missed.append((question, [note.text for note in found.notes]))
    assert len(turns) >= 40
    assert len(missed) <= 0.05 * len(turns), missed


def test_another_conversation_of_the_user_knows_them_too(told: tuple[Memory, dict[str, str], int]) -> None:
    memory, turns, _ = told
    question = "What is my dentist called?"
    found = memory.recall(
        Scope("default", "c42", "second"), [question], window_from=None, budget_tokens=256, count_tokens=count
    )
    assert turns[question] in {note.id for note in found.notes}
    for stranger in (Scope("default", "c43", "first"), Scope("default", None, "first")):
        notes = memory.recall(stranger, [question], window_from=None, budget_tokens=256, count_tokens=count).notes
        assert notes == ()


def test_questions_about_the_world_recall_nothing(told: tuple[Memory, dict[str, str], int]) -> None:
    memory, _, window_from = told
    for question in ("What is the capital of Mongolia?", "Sort a list in Haskell.", "What is the square root of 144?"):
        found = memory.recall(SCOPE, [question], window_from=window_from, budget_tokens=256, count_tokens=count)
        assert (found.notes, found.gated) == ((), True)


def test_the_gate_is_calibrated_once_and_kept(told: tuple[Memory, dict[str, str], int]) -> None:
    memory, _, _ = told
    with memory.store.read() as connection:
        (gate,) = connection.exec_driver_sql("SELECT gate FROM spaces").all()
    assert gate[0] == pytest.approx(memory._gate.value(None))
    assert 0.15 < gate[0] < 0.5


def test_the_embedder_gives_unit_vectors_that_know_meaning(embedder: SentenceTransformerEmbedder) -> None:
    texts = ["My dentist is Dr. Varga.", "Who looks after my teeth?", "The train to Lisbon was late."] * 5
    vectors = embedder.embed(texts)
    assert vectors.shape == (15, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.35 > vectors[0] @ vectors[2]
    np.testing.assert_allclose(vectors[:3], vectors[12:], atol=1e-5)
    assert embedder.embed([]).shape == (0, 384)
    assert embedder.name == "minilm-l6-v2"
    assert embedder.fingerprint == SentenceTransformerEmbedder().fingerprint
    assert len(embedder.fingerprint) == 32
