"""What passes between a model and its tools: kept, found, forgotten and carried over, but nobody's words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from memstream.config import RecallConfig
from memstream.memory import ConversationHandle, Memory, Part, Scope, SqlStore, Turn
from tests.stores.conftest import MakeMemory, Place
from tests.stores.tiny import TinyEmbedder, count_words

SCOPE, OTHER = Scope("n", "u", "c"), Scope("n", "u", "d")
CALL = '<tool_call>{"name": "kites", "arguments": {"owner": "Minka"}}</tool_call>'
TOOL = "The weather stayed dry. My sister Minka has 12 zephyr kites."
SAID = [("user", "kites of Minka"), ("call", CALL), ("tool", TOOL), ("assistant", "She has some.")]


def live(handle: ConversationHandle) -> list[int]:
    """A question, a call, its result and the answer."""
    ids = []
    for role, text in SAID:
        if role in ("user", "tool"):
            ids.append(handle.begin_turn(role, text, 1))
        else:
            ids.append(handle.begin_turn("assistant", "", 0))
            handle.finish_turn(ids[-1], text, 1, "complete", role=role)
    return ids


def recalled(memory: Memory, query: str) -> list[str]:
    found = memory.recall(OTHER, [query], window_from=None, budget_tokens=100, count_tokens=count_words)
    return [note.role for note in found.notes]


def test_results_are_found_and_not_recalled(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, max_notes=8, gate=0.0)
    with memory.open_conversation(SCOPE) as handle:
        ids = live(handle)
        assert [(turn.role, turn.text) for turn in handle.turns()] == SAID
    memory.flush()
    for query in ("zephyr", "kites of Minka", "name arguments owner"):
        assert set(recalled(memory, query)) <= {"user", "assistant"}
    assert "user" in recalled(memory, "kites of Minka")
    found = {memory.id: memory.role for memory in memory.search(SCOPE, "zephyr kites Minka owner")}
    assert (found[f"turn:{ids[1]}"], found[f"turn:{ids[2]}"]) == ("call", "tool")
    assert [item.role for item in memory.memories(SCOPE)] == [role for role, _ in SAID], "a list shows all there is"
    with memory.store.read() as connection:
        told = connection.exec_driver_sql("SELECT text FROM chunks WHERE kind = 'fact'").all()
    assert told == [], "no sentence of theirs is a key of its own"
    assert memory.forget(SCOPE, f"turn:{ids[2]}").verified
    assert "tool" not in {memory.role for memory in memory.search(SCOPE, "zephyr kites Minka owner")}
    assert memory.verify().problems == ()


def test_roles_are_carried_over(make_memory: MakeMemory) -> None:
    memory, copy, file = make_memory(), make_memory(), io.BytesIO()
    with memory.open_conversation(SCOPE) as handle:
        live(handle)
    memory.flush()
    memory.export_to(file, Part())
    copy.import_from(io.BytesIO(file.getvalue()))
    with copy.open_conversation(SCOPE) as handle:
        assert [(turn.role, turn.text) for turn in handle.turns()] == SAID


@pytest.mark.parametrize("evicted", [True, False])
def test_summaries_are_of_what_was_said(tmp_path: Path, evicted: bool) -> None:
    asked: list[list[Turn]] = []

    def summarizer(turns: object) -> str:
        asked.append(list(turns))  # type: ignore[call-overload]
        return f"summary {len(asked)}"

    def opened() -> Memory:
        store = SqlStore.open(tmp_path / "a.db")
        return Memory(store, TinyEmbedder(), RecallConfig(), index="exact", summarizer=summarizer)

    memory = opened()
    with memory.open_conversation(SCOPE) as handle:
        ids = live(handle)
        if evicted:
            handle.evicted(ids[:2])
            handle.evicted(ids[2:])
    memory.flush()
    memory.close()
    memory = opened()
    with memory.open_conversation(SCOPE) as handle:
        handle.window_begins(4)  # what the process before did not come to
        memory.flush()
    assert [[turn.role for turn in turns] for turns in asked] in ([["user"], ["assistant"]], [["assistant"], ["user"]])
    assert memory.verify().problems == ()
    memory.close()
