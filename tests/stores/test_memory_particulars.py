"""Sentences that tell something particular: which they are, and that they only ever lead to their turn."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from memstream.memory import Memory, Scope
from memstream.memory.particulars import MOST, particulars
from memstream.stores.rows import Turn
from tests.stores.conftest import MakeMemory
from tests.stores.tiny import count_words, say

SCOPE = Scope("n", "u", "c")
WHEN = datetime(2026, 11, 30, 9, tzinfo=UTC)
TOLD = "The weather stayed dry. My sister Minka has 12 zephyr kites."
KEY = "My sister Minka has 12 zephyr kites."


def told(text: str) -> list[str]:
    return particulars(Turn(1, 0, "user", text, 1, WHEN, "complete", 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The weather stayed dry. My sister is called Minka.", ["My sister is called Minka."]),  # a name
        ("The weather stayed dry. The code is 4711.", ["The code is 4711."]),
        ("The weather stayed dry. They own three boats.", ["They own three boats."]),
        ("The weather stayed dry. The kites broke yesterday.", ["The kites broke yesterday."]),
        ("The weather stayed dry. The kites broke in May 2025.", ["The kites broke in May 2025."]),
        ("The weather stayed dry. I really love old kites.", ["I really love old kites."]),
        ("The weather stayed dry. She loves old kites.", []),  # nobody's own taste
        ("Minka's kites broke. The weather stayed dry.", []),  # any sentence begins with a capital
        ("My sister is called Minka.", []),  # the turn's own vector is this thing's
        ("Where does Minka live? My sister is called Minka.", []),  # of which one only asks
        ("Ann: The weather stayed dry. My cat is called Minka.", ["Ann: My cat is called Minka."]),
        ("今天天气很好。我的订单号是48213。", ["我的订单号是48213。"]),
        ("", []),
    ],
)
def test_what_is_particular(text: str, expected: list[str]) -> None:
    assert told(text) == expected


def test_of_many_those_that_tell_most() -> None:
    plain = [f"Number {i} is a kite." for i in range(2 * MOST)]
    rich = "Yesterday I said that I love 12 kites of Minka."
    found = told(" ".join([*plain, rich]))
    assert found == [*plain[: MOST - 1], rich]


def keys(memory: Memory) -> list[tuple[str, int, int, list[int]]]:
    """Text, sequences and sources of the keys to particulars, all with a vector."""
    statement = (
        "SELECT chunks.text, first_sequence, last_sequence, sources, derived.text, vector IS NOT NULL FROM chunks "
        "JOIN derived ON derived.chunk_id = chunks.id LEFT JOIN embeddings ON embeddings.chunk_id = chunks.id "
        "WHERE chunks.kind = 'fact' AND fact_id IS NULL AND derived.kind = 'fact' ORDER BY chunks.id"
    )
    with memory.store.read() as connection:
        rows = connection.exec_driver_sql(statement).all()
    assert all((text, embedded) == (key, 1) for key, _, _, _, text, embedded in rows)
    assert memory.verify().problems == ()
    return [(key, first, last, json.loads(sources)) for key, first, last, sources, _, _ in rows]


def test_a_particular_is_a_key_to_its_turn_once(make_memory: MakeMemory) -> None:
    memory = make_memory()
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber", "basil")
        asked, _ = say(handle, TOLD, "cedar")
        for _ in range(3):
            say(handle, "amber", "basil")  # whose windows hold it again
    memory.flush()
    assert keys(memory) == [(KEY, 2, 2, [asked])]
    found = memory.recall(SCOPE, ["zephyr"], window_from=None, budget_tokens=99, count_tokens=count_words)
    texts = {note.text for note in found.notes}
    assert TOLD in texts
    assert KEY not in texts
    memory.open_conversation(SCOPE).close()
    memory.flush()
    assert len(keys(memory)) == 1


def test_what_a_turn_tells_in_particular_brings_it_forward(make_memory: MakeMemory) -> None:
    """Two turns with the same words; in one of them they are a sentence of their own, as they were asked for."""
    blurred = "The amber basil cedar delta 12 ember fjord grove heron ivory. The jolly kayak zephyr tulip."
    exact = "The amber basil cedar delta ember fjord grove heron ivory jolly kayak. The 12 zephyr tulip."
    memory = make_memory()
    with memory.open_conversation(SCOPE) as handle:
        say(handle, exact, "")
        for _ in range(4):
            say(handle, "velvet", "willow")
        say(handle, blurred, "")
    memory.flush()
    scores = {hit.text: hit.why.score for hit in memory.search(SCOPE, "12 zephyr tulip")}
    assert scores[exact] > scores[blurred]
    with memory.store.write() as connection:
        connection.exec_driver_sql("DELETE FROM derived")
        connection.exec_driver_sql("UPDATE chunks SET kind = 'summary' WHERE kind = 'fact'")  # no particulars any more
    without = {hit.text: hit.why.score for hit in memory.search(SCOPE, "12 zephyr tulip")}
    assert scores[exact] > without[exact]


def test_what_is_forgotten_undone_or_in_the_window_leads_nowhere(make_memory: MakeMemory) -> None:
    memory = make_memory()
    with memory.open_conversation(SCOPE) as handle:
        asked, replied = say(handle, TOLD, TOLD.replace("Minka", "Varga"))
        say(handle, "amber", "basil")
        memory.flush()
        assert [sources for _, _, _, sources in keys(memory)] == [[asked], [replied]]
        found = memory.recall(SCOPE, ["zephyr"], window_from=0, budget_tokens=99, count_tokens=count_words)
        assert found.notes == ()
        receipt = memory.forget(SCOPE, f"turn:{asked}")
        assert receipt.verified
        # A window of two turns, one of four, and the sentence: each with its vector; the sentence was derived.
        assert (receipt.removed["chunks"], receipt.removed["embeddings"], receipt.removed["derived"]) == (3, 3, 1)
        handle.supersede([replied])
        memory.flush()
        assert keys(memory) == []
    assert memory.summaries.extractive == 0


def test_nobody_finds_what_others_tell(make_memory: MakeMemory) -> None:
    memory = make_memory(gate=-1.0)
    for user in ("u", "v"):
        with memory.open_conversation(Scope("n", user, "c")) as handle:
            say(handle, TOLD.replace("Minka", user.upper() * 3), "")
    memory.flush()
    for user in ("u", "v"):
        found = memory.search(Scope("n", user), "zephyr kites")
        assert {hit.text for hit in found if hit.text} == {TOLD.replace("Minka", user.upper() * 3)}
