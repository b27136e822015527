"""What was forgotten is in no table, no file and no cache, and the model no longer says it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memstream import Agent, CacheConfig, GenerationConfig
from memstream.memory import Scope

SECRET = "zanzibarium quixotolite"
STEMS = ("zanzibar", "quixotolit")  # as full text keeps them, and so the words themselves
EXACT = 1e-4  # float32 logits


def cells(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Every value of every column of every table, those that full text keeps for itself included."""
    with closing(sqlite3.connect(path)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert {"turn_words_data", "turn_words_content", "fact_words_data", "turns", "chunks", "derived"} <= set(tables)
        for table in tables:
            cursor = connection.execute(f'SELECT * FROM "{table}"')
            names = [column[0] for column in cursor.description]
            for row in cursor:
                for name, value in zip(names, row, strict=True):
                    yield table, name, value if isinstance(value, bytes) else str(value).encode()
        for words in ("turn_words", "fact_words"):
            connection.execute(f"CREATE VIRTUAL TABLE temp.{words}_terms USING fts5vocab(main, {words}, row)")
            for row in connection.execute(f"SELECT term FROM temp.{words}_terms"):
                yield words, "term", str(row[0]).encode()


def traces(folder: Path, needles: dict[str, bytes]) -> set[tuple[str, str]]:
    """Which needles are where: in which column of which table, in which file."""
    found = set()
    for table, column, value in cells(folder / "store.db"):
        found |= {(f"{table}.{column}", name) for name, needle in needles.items() if needle in value.lower()}
    for file in folder.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            low = data.lower()
            kind = file.name.removeprefix("store.db")
            found |= {(kind, name) for name, needle in needles.items() if needle in data or needle in low}
    return found


def needles_of(agent: Agent) -> dict[str, bytes]:
    """The bytes that would tell: words, their tokens in a saved cache, and the vectors of what was said."""
    tokenizer = agent._template.tokenizer
    needles = {stem: stem.encode() for stem in STEMS}
    for stem in (*STEMS, *map(str.upper, STEMS)):
        ids = tokenizer(stem, add_special_tokens=False)["input_ids"]
        needles[f"tokens of {stem}"] = np.array(ids, dtype="<i8").tobytes()
    with agent.memory.store.read() as connection:
        for table, key, whose in (
            ("embeddings", "chunk_id", "chunks"),
            ("turn_embeddings", "turn_id", "turns"),
        ):
            rows = connection.exec_driver_sql(
                f"SELECT {whose}.id, vector FROM {table} JOIN {whose} ON {whose}.id = {key} "
                f"WHERE text LIKE '%{SECRET.split()[0]}%'"
            )
            for number, vector in rows:
                needles[f"{table} {number}"] = bytes(vector)
                needles[f"{table} {number} in float32"] = np.frombuffer(vector, "<f2").astype("<f4").tobytes()
    assert len([name for name in needles if "embeddings" in name]) >= 6
    return needles


def forget_with_echoes(agent: Agent, user: str, memory_id: str) -> list[str]:
    """Forgets a memory and whatever quotes it; returns their ids."""
    forgotten, left = [], [memory_id]
    while left:
        receipt = agent.forget(left[0], user=user)
        assert receipt.verified
        forgotten.append(left.pop(0))
        left += [echo for echo in receipt.echoes if echo not in left]
    return forgotten


def test_what_was_told_in_every_way_is_in_no_table_and_no_file(make: Any, tmp_path: Path) -> None:
    agent = make()
    with agent.session(user="a", name="one") as chat:
        chat.add("hello", "hello")
        chat.add(f"My word is {SECRET}.", f"So it is {SECRET}!")
        for i in range(8):  # until it has left the window
            chat.add(f"filler number {i} about nothing at all", f"reply number {i} says nothing")
        fact = chat.remember(f"The word: {SECRET.upper()}")
    with agent.session(user="a", name="two") as chat:  # whose notes and reply hold it
        asked = chat.chat("which word is my word")
        assert SECRET in " ".join(note.text for note in asked.recalled).lower()
    with agent.session(user="a", name="three") as chat:
        chat.chat("which word is my word")  # so that the cache of "two" is saved, and this one is open
        agent.memory.flush()
        agent.memory._index.checkpoint()
        needles = needles_of(agent)
        before = traces(tmp_path, needles)
        places = {place for place, _ in before}
        assert {
            "turns.text", "facts.text", "chunks.text", "turn_words_content.c1", "turn_words.term",
            "fact_words_content.c1", "fact_words.term", "embeddings.vector", "turn_embeddings.vector", "-wal", "-index",
            "2.snapshot",
        } <= places  # fmt: skip
        assert {name for _, name in before} >= {
            name for name in needles if "float32" not in name and "tokens" not in name
        }
        gone = forget_with_echoes(agent, "a", "turn:3")
        assert {"turn:3", "turn:4", fact} <= set(gone)
        assert traces(tmp_path, needles) == set()
        chat.chat("what now")
        agent.memory.flush()
        assert traces(tmp_path, needles) == set()
    agent.close()
    assert traces(tmp_path, needles) == set()
    assert (tmp_path / "store.db-snapshots" / "3.snapshot").is_file()
    again = make()
    with again.session(user="a", name="one") as chat:
        reply = chat.chat("which word is my word")
        assert SECRET not in " ".join(note.text for note in reply.recalled).lower()
        assert again.memory.verify().problems == ()
    again.close()
    assert traces(tmp_path, needles) == set()


class Watch:
    """Keeps the logits [v] of the first token of each reply."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self._prompt: list[int] | None = None

    def __call__(self, ids: Any, scores: Any) -> Any:
        seen = ids[0].tolist()
        if self._prompt is None or seen[: len(self._prompt)] != self._prompt:
            self.first.append(scores[0].clone())
            self._prompt = seen
        return scores


EXCHANGES = [("hello there", "good day"), (f"my word is {SECRET}", "noted"), ("I like rivers", "so do I"),
             ("and lakes", "they are deep")]  # fmt: skip


@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("how", ["open", "elsewhere", "restarted"])
def test_after_a_forget_the_next_logits_are_those_of_one_who_never_heard(
    make: Any, tmp_path: Path, which: int, how: str
) -> None:
    """The first exchange lies among the sinks, the last at the end of the window: later keys have attended to it."""
    heard, never = Watch(), Watch()
    agent = make(logits_processors=[heard])
    fresh = make(store=tmp_path / "fresh.db", logits_processors=[never])
    for some, left_out in ((agent, None), (fresh, which)):
        with some.session(user="a", name="notes") as chat:
            chat.add("my harbour is Valparaiso", "a fine harbour")
            chat.remember("Prefers e-mail")
        some.memory.flush()
        chat = some.session(user="a", name="talk")
        for i, (user, assistant) in enumerate(EXCHANGES):
            if i != left_out:
                chat.add(user, assistant)
    talk, scope = agent.session(user="a", name="talk"), Scope("default", "a", "talk")
    if how == "open":
        talk.chat("what is the word")  # the question and its answer have seen it, and are forgotten with it
    turns = {(t.role, t.text): t.id for t in agent._residents._open[scope].handle.turns()}
    ids = [turns["user", EXCHANGES[which][0]], turns["assistant", EXCHANGES[which][1]]]
    ids += [number for (_, text), number in turns.items() if number > max(turns.values()) - 2 and how == "open"]
    if how == "restarted":
        agent.close()
        agent = make(logits_processors=[heard])
    for number in ids:
        if how == "elsewhere":
            other = make()
            assert other.forget(f"turn:{number}", user="a").verified
            other.close()
        else:
            assert agent.forget(f"turn:{number}", user="a").verified
    question = "which harbour is my harbour"
    replies = [some.chat(question, user="a", session="talk") for some in (agent, fresh)]
    notes = [[note.text for note in reply.recalled] for reply in replies]
    assert notes[0] == notes[1]
    assert "my harbour is Valparaiso" in notes[0]
    torch.testing.assert_close(heard.first[-1], never.first[-1], atol=EXACT, rtol=0)
    assert replies[0].text == replies[1].text


def test_what_the_logits_were_before_the_forget_was_something_else(make: Any, tmp_path: Path) -> None:
    """The comparison above can fail: with the words still in the window the logits differ."""
    heard, never = Watch(), Watch()
    agent = make(logits_processors=[heard])
    fresh = make(store=tmp_path / "fresh.db", logits_processors=[never])
    for some, exchanges in ((agent, EXCHANGES), (fresh, EXCHANGES[:1] + EXCHANGES[2:])):
        with some.session(user="a") as chat:
            for exchange in exchanges:
                chat.add(*exchange)
            chat.chat("which harbour is my harbour")
    assert (heard.first[-1] - never.first[-1]).abs().max() > 100 * EXACT


def test_a_reply_whose_question_was_forgotten_stays_as_it_is_stored(make: Any, tmp_path: Path) -> None:
    """An answer alone is read the same whether its question was forgotten here or was never in the store."""
    heard, never = Watch(), Watch()
    agent = make(logits_processors=[heard])
    fresh = make(store=tmp_path / "fresh.db", logits_processors=[never])
    with agent.session(user="a") as chat:
        for exchange in EXCHANGES:
            chat.add(*exchange)
        assert chat.forget("turn:3").verified
    with fresh.memory.open_conversation(Scope("default", "a", "default")) as handle:
        for i, exchange in enumerate(EXCHANGES):
            if i != 1:
                handle.begin_turn("user", exchange[0], 1)
            handle.finish_turn(handle.begin_turn("assistant", "", 0), exchange[1], 1, "complete")
    for some in (agent, fresh):
        some.chat("what now", user="a")
    torch.testing.assert_close(heard.first[-1], never.first[-1], atol=EXACT, rtol=0)


def test_the_model_no_longer_says_what_was_forgotten(tmp_path: Path, smollm2: Any) -> None:
    """SmolLM2 says a name from its window and from notes; once it is forgotten, with its echoes, it does not."""
    agent = Agent(
        "smollm2-135m",
        store=tmp_path / "store.db",
        generation=GenerationConfig(max_new_tokens=24, temperature=0.0),
        cache=CacheConfig(cache_tokens=1024),
        device="cpu",
    )
    question = "What is my cat called?"
    with agent.session(user="a", name="monday") as chat:
        chat.chat("My cat is called Zanzibar.")
        chat.chat("I like walking along the river.")
        assert "Zanzibar" in chat.chat(question).text
        with agent.session(user="a", name="friday") as later:
            told = later.chat(question)
            assert "Zanzibar" in told.text
            assert "Zanzibar" in " ".join(note.text for note in told.recalled)
            forgotten = forget_with_echoes(agent, "a", "turn:1")
            assert len(forgotten) >= 3  # what the model answered quoted it
            for session in (chat, later):
                after = session.chat(question)
                assert "zanzibar" not in (after.text + " ".join(note.text for note in after.recalled)).lower()
    agent.close()
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and b"zanzibar" in f.read_bytes().lower()]
