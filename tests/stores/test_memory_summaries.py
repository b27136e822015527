"""Summaries of what left the window: keys to turns, made once, from turns alone, by whoever was chosen."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from memstream.report import SummaryCounts
from memstream.stores.rows import Turn
from tests.stores.tiny import TinyEmbedder, count_words, say

SCOPE = Scope("n", "u", "c")
# 61 sentences of about 9 word pieces: an embedder reads 254, so every window cuts it before its last sentence.
LONG = " ".join(f"Willow number {i} is by the river." for i in range(60)) + " The kayak belongs to Varga."


@pytest.fixture
def make() -> Iterator[Callable[..., Memory]]:
    opened: list[Memory] = []

    def build(path: Path | str = "memory", **settings: Any) -> Memory:
        opened.append(Memory(SqlStore.open(path), TinyEmbedder(), RecallConfig(), index="exact", **settings))
        return opened[-1]

    yield build
    for memory in opened:
        memory.close()


def summaries(memory: Memory) -> list[tuple[str, list[int]]]:
    """Texts and sources of all summaries, checked to be keys with a vector over exactly these turns."""
    statement = (
        "SELECT derived.text, sources, chunks.text, first_sequence, last_sequence, vector IS NOT NULL "
        "FROM derived JOIN chunks ON chunks.id = chunk_id LEFT JOIN embeddings USING (chunk_id) "
        "WHERE derived.kind = 'summary' ORDER BY derived.id"
    )
    found = []
    with memory.store.read() as connection:
        sequences = dict(connection.exec_driver_sql("SELECT id, sequence FROM turns").all())
        for text, sources, key, first, last, embedded in connection.exec_driver_sql(statement):
            ids = json.loads(sources)
            assert (key, embedded) == (text, 1)
            assert (first, last) == (sequences[ids[0]], sequences[ids[-1]])
            found.append((text, ids))
    assert memory.verify().problems == ()
    return found


def test_a_summary_is_one_more_key_to_its_turns(make: Callable[..., Memory]) -> None:
    memory = make()
    with memory.open_conversation(SCOPE) as handle:
        ids = say(handle, LONG, "Noted.")
        say(handle, "amber", "basil")
        handle.evicted(ids)
        memory.flush()
        ((text, sources),) = summaries(memory)
        assert sources == list(ids)
        assert "The kayak belongs to Varga." in text
        with memory.store.read() as connection:
            windows = list(connection.exec_driver_sql("SELECT text FROM chunks WHERE kind = 'window'").scalars())
        assert windows
        assert not any("kayak" in window for window in windows)
        found = memory.recall(SCOPE, ["kayak"], window_from=None, budget_tokens=999, count_tokens=count_words)
        assert {note.text for note in found.notes} <= {turn.text for turn in handle.turns()}
        handle.evicted(ids)  # it has one
        memory.flush()
        assert len(summaries(memory)) == 1
    assert memory.summaries == SummaryCounts(extractive=1)


def test_turns_that_windows_hold_whole_need_no_summary(make: Callable[..., Memory]) -> None:
    memory = make()
    with memory.open_conversation(SCOPE) as handle:
        short, long = say(handle, "amber basil cedar.", "grove heron."), say(handle, "jolly kayak.", LONG)
        handle.evicted(short)
        handle.evicted(long)
        memory.flush()
    assert [sources for _, sources in summaries(memory)] == [list(long)]
    assert memory.summaries == SummaryCounts(extractive=1, copies=1)


def test_a_callable_summarises_every_exchange_from_its_turns(make: Callable[..., Memory]) -> None:
    asked: list[list[tuple[str, str]]] = []

    def summarizer(turns: Sequence[Turn]) -> str:
        asked.append([(turn.role, turn.text) for turn in turns])
        return f"  zephyr {len(asked)}\x00 "

    memory = make(summarizer=summarizer)
    with memory.open_conversation(SCOPE) as handle:
        first, second = say(handle, "amber", "basil"), say(handle, "cedar", LONG)
        handle.evicted(first)
        handle.evicted(second)
        memory.flush()
        assert summaries(memory) == [("zephyr 1\ufffd", list(first)), ("zephyr 2\ufffd", list(second))]
        memory.forget(SCOPE, f"turn:{first[0]}")
        memory.flush()
        found = memory.recall(SCOPE, ["zephyr"], window_from=None, budget_tokens=999, count_tokens=count_words)
        assert not [note for note in found.notes if "zephyr" in note.text]
    assert asked == [
        [("user", "amber"), ("assistant", "basil")],
        [("user", "cedar"), ("assistant", LONG)],
        [("assistant", "basil")],  # anew without what was forgotten, and never from a summary
    ]
    assert memory.summaries == SummaryCounts(chosen=3)


@pytest.mark.parametrize("broken", [ZeroDivisionError("no"), None])
def test_turns_whose_summariser_fails_get_the_extractive_one(
    make: Callable[..., Memory], broken: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    def summarizer(turns: Sequence[Turn]) -> Any:
        if broken is not None:
            raise broken
        return None  # not a text

    memory = make(summarizer=summarizer)
    with memory.open_conversation(SCOPE) as handle:
        ids = say(handle, "amber basil.", "Noted.")
        handle.evicted(ids)
        memory.flush()
        assert [turn.text for turn in handle.turns()] == ["amber basil.", "Noted."]
    assert summaries(memory) == [("amber basil. Noted.", list(ids))]
    assert memory.summaries == SummaryCounts(extractive=1, failed=1)
    assert "the summariser failed" in caplog.text


def test_what_names_something_new_is_rejected_unless_believed(
    make: Callable[..., Memory], caplog: pytest.LogCaptureFixture
) -> None:
    for believed, expected, counts in (
        (True, "Anna owes 300.", SummaryCounts(chosen=1)),
        (False, "Anna owes me money.", SummaryCounts(extractive=1, rejected=1)),
    ):
        memory = make(summarizer=lambda turns: "Anna owes 300.", summaries_believed=believed)
        with caplog.at_level(logging.INFO, logger="memstream"), memory.open_conversation(SCOPE) as handle:
            ids = say(handle, "Anna owes me money.", "")
            handle.evicted(ids)
            memory.flush()
        assert summaries(memory) == [(expected, list(ids))]
        assert memory.summaries == counts
    assert "a summary named 1 things" in caplog.text
    assert "300" not in caplog.text


def test_an_empty_summary_means_the_extractive_one(make: Callable[..., Memory]) -> None:
    memory = make(summarizer=lambda turns: " ")
    with memory.open_conversation(SCOPE) as handle:
        handle.evicted(say(handle, "amber basil.", ""))
        memory.flush()
    assert [text for text, _ in summaries(memory)] == ["amber basil."]
    assert memory.summaries == SummaryCounts(extractive=1)


def test_what_a_killed_process_did_not_summarise_is_summarised_on_the_next_open(
    make: Callable[..., Memory], tmp_path: Path
) -> None:
    memory = make(tmp_path / "a.db")
    with memory.open_conversation(SCOPE) as handle:
        long = [say(handle, f"amber{i}", LONG) for i in range(3)]
        say(handle, "cedar", "delta")
        handle.evicted(long[1])  # of the others the process did not come to tell
        begins = handle.turns()[-4].sequence  # the last long one and what follows are in the window
    memory.close()
    again = make(tmp_path / "a.db")
    with again.open_conversation(SCOPE) as handle:
        handle.window_begins(begins)
        handle.window_begins(99)  # the window moves on by itself: what leaves it is told
        again.flush()
    assert [sources for _, sources in summaries(again)] == [list(long[1]), list(long[0])]
    assert again.summaries == SummaryCounts(extractive=1)


def test_closing_does_not_wait_for_a_slow_summariser(make: Callable[..., Memory], tmp_path: Path) -> None:
    began, go = threading.Event(), threading.Event()

    def summarizer(turns: Sequence[Turn]) -> str:
        began.set()
        assert go.wait(20)
        return "zephyr"

    memory = make(tmp_path / "a.db", summarizer=summarizer)
    with memory.open_conversation(SCOPE) as handle:
        for i in range(3):
            handle.evicted(say(handle, f"amber{i}.", ""))
    assert began.wait(20)
    closing = threading.Thread(target=memory.close)
    closing.start()
    while not memory._summaries._hurried:
        assert closing.is_alive()
    go.set()
    closing.join(20)
    assert not closing.is_alive()
    assert [text for text, _ in summaries(make(tmp_path / "a.db"))] == ["zephyr", "amber1.", "amber2."]


def test_what_is_forgotten_while_it_is_summarised_is_in_no_summary(make: Callable[..., Memory]) -> None:
    began, go = threading.Event(), threading.Event()

    def summarizer(turns: Sequence[Turn]) -> str:
        began.set()
        assert go.wait(20)
        return " ".join(turn.text for turn in turns)

    memory = make(summarizer=summarizer)
    with memory.open_conversation(SCOPE) as handle:
        asked, replied = say(handle, "amber", "basil")
        handle.evicted([asked, replied])
        assert began.wait(20)
        assert memory.forget(SCOPE, f"turn:{asked}").verified
        go.set()
        memory.flush()
    assert summaries(memory) == [("basil", [replied])]
