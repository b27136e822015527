"""Recall: whose memories, minus the window, gated, packed. Against brute force over random scopes."""

from __future__ import annotations

import random
import threading
from datetime import UTC, date, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream.config import RecallConfig
from memstream.errors import ConfigError
from memstream.memory import Memory, Scope, SqlStore
from memstream.memory.packing import pack
from memstream.report import Recalled, Why
from memstream.stores.fulltext import words
from tests.stores.conftest import MakeMemory, Place
from tests.stores.tiny import WORDS, TinyEmbedder, count_words, say, sentence

SCOPE = Scope("n", "u", "c")
scopes = st.builds(
    Scope, st.sampled_from(["n", "m"]), st.sampled_from([None, "u", "v"]), st.sampled_from(["a", "b", "c"])
)


def visible(said: list[tuple[Scope, int, int, str]], asking: Scope, window_from: int) -> dict[int, str]:
    """Brute force: what may be recalled, by turn id."""
    found = {}
    for scope, turn_id, sequence, text in said:
        same = (scope.namespace, scope.user) == (asking.namespace, asking.user)
        here = scope == asking
        if same and (here or asking.user is not None) and not (here and sequence >= window_from):
            found[turn_id] = text
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    exchanges=st.lists(st.tuples(scopes, st.integers(0, 10**6)), min_size=1, max_size=25),
    asking=scopes,
    window_from=st.integers(0, 12),
    word=st.sampled_from(WORDS),
)
def test_no_scope_ever_sees_another(
    backend: str, exchanges: list[tuple[Scope, int]], asking: Scope, window_from: int, word: str
) -> None:
    memory = Memory(SqlStore.open("memory"), TinyEmbedder(), RecallConfig(gate=-1.0, max_notes=64), index=backend)  # type: ignore[arg-type]
    said: list[tuple[Scope, int, int, str]] = []
    for scope, seed in exchanges:
        rng = random.Random(seed)
        with memory.open_conversation(scope) as handle:
            texts = (sentence(rng), sentence(rng))
            ids = say(handle, *texts)
            sequences = {turn.id: turn.sequence for turn in handle.turns()}
        said += [(scope, i, sequences[i], text) for i, text in zip(ids, texts, strict=True)]
    memory.flush()
    allowed = visible(said, asking, window_from)
    ranked = memory._retriever.rank(
        asking, [word], window_from=window_from, gate=lambda: -1.0, today=date(2026, 11, 30)
    )
    found = {hit.turn.id for hit in ranked.hits if hit.turn is not None}
    assert ranked.n_considered == len(allowed)
    assert {turn_id for window in ranked.windows for turn_id in window.turn_ids} <= set(allowed)
    assert found <= set(allowed)
    key = words(word)[-1]
    assert {i for i, text in allowed.items() if key in words(text)} <= found  # every turn with the word
    recall = memory.recall(asking, [word], window_from=window_from, budget_tokens=10_000, count_tokens=count_words)
    assert {int(note.id[5:]) for note in recall.notes} <= set(allowed)
    assert all(allowed[int(note.id[5:])] == note.text for note in recall.notes)
    memory.close()


def test_dense_candidates_are_the_best_of_the_scope(make_memory: MakeMemory, place: Place) -> None:
    rng = random.Random(5)
    memory = make_memory(place)
    for user in ("u", "v"):
        with memory.open_conversation(Scope("n", user, "c")) as handle:
            for _ in range(40):
                say(handle, sentence(rng), sentence(rng))
    memory.flush()
    with memory.store.read() as connection:
        rows = connection.exec_driver_sql(
            "SELECT chunks.id, chunks.text, owners.id FROM chunks JOIN owners ON owners.id = owner_id "
            "WHERE user_key = 'u'"
        ).all()
    tiny = TinyEmbedder()
    query = tiny.embed(["amber willow"])[0]
    scores = tiny.embed([row[1] for row in rows]) @ query
    memory._index.refresh()
    found = memory._index.search(query, rows[0][2], 10, [])
    got = memory._index.cosines(query[None], found)
    best = sorted(scores, reverse=True)[:10]
    assert [got[i][0] for i in found] == pytest.approx(best, abs=2e-3)  # SQL keeps float16
    without = memory._index.search(query, rows[0][2], 10, found[:4])
    assert without[:6] == found[4:]


def test_a_scope_without_user_and_conversation_is_refused(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    for call in (
        lambda: memory.search(Scope("n"), "amber"),
        lambda: memory.remember(Scope("n"), "amber"),
        lambda: memory.recall(Scope("n"), ["a"], window_from=None, budget_tokens=9, count_tokens=count_words),
        lambda: memory.open_conversation(Scope("n", "u")),
    ):
        with pytest.raises(ConfigError):
            call()


def test_without_a_user_facts_stay_in_their_conversation(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    memory.remember(Scope("n", None, "c"), "likes amber")
    memory.remember(Scope("n", "u", "c"), "likes basil")
    assert [item.text for item in memory.memories(Scope("n", None, "c"))] == ["likes amber"]
    assert memory.memories(Scope("n", None, "d")) == []
    assert [item.text for item in memory.memories(Scope("n", "u"))] == ["likes basil"]
    assert [hit.text for hit in memory.search(Scope("n", None, "c"), "likes")] == ["likes amber"]


def test_nothing_is_recalled_for_what_has_nothing_to_do_with_it(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, gate=0.9)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber basil", "cedar delta")
    memory.flush()
    found = memory.recall(SCOPE, ["zephyr"], window_from=None, budget_tokens=50, count_tokens=count_words)
    assert (found.notes, found.gated, found.n_considered) == ((), True, 2)
    assert found.best_score is not None
    found = memory.recall(SCOPE, ["amber"], window_from=None, budget_tokens=50, count_tokens=count_words)
    assert [note.text for note in found.notes] == ["amber basil"]
    assert found.notes[0].why.terms == ("amber",)
    assert not found.gated
    empty = memory.recall(Scope("n", "w", "c"), ["amber"], window_from=None, budget_tokens=50, count_tokens=count_words)
    assert (empty.notes, empty.gated, empty.best_score, empty.n_considered) == ((), False, None, 0)


def test_recall_can_be_off(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, enabled=False)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "amber")
    memory.remember(SCOPE, "amber")
    assert memory.recall(SCOPE, ["amber"], window_from=None, budget_tokens=50, count_tokens=count_words).notes == ()
    assert memory.search(SCOPE, "amber") != []


def test_without_an_embedder_words_are_found(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, embedder=None)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "My dentists are in Lisbon", "ok")
        say(handle, "我的订单号是 48213", "好")
    for query, expected in (("dentist", "My dentists are in Lisbon"), ("订单号", "我的订单号是 48213")):
        hits = memory.search(SCOPE, query)
        assert hits[0].text == expected
        assert (hits[0].why.dense, hits[0].why.lexical_rank) == (None, 1)


def test_pinned_facts_come_first_within_their_share(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, max_notes=2)
    with memory.open_conversation(SCOPE) as handle:
        for word in ("amber river", "amber grove", "amber pearl"):
            say(handle, word, "Noted.")
    old = memory.remember(SCOPE, "basil " * 8)
    new = memory.remember(SCOPE, "cedar " * 8)
    memory.flush()
    found = memory.recall(SCOPE, ["amber"], window_from=None, budget_tokens=36, count_tokens=count_words)
    assert [note.id for note in found.notes][:1] == [new]  # 12 of 36 tokens: one of the two facts
    assert old not in [note.id for note in found.notes]
    assert [note.role for note in found.notes] == ["fact", "user", "user"]
    assert found.notes[0].why.pinned
    assert found.notes[1].time < found.notes[2].time


def test_the_budget_holds(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, max_notes=64)
    rng = random.Random(1)
    with memory.open_conversation(SCOPE) as handle:
        for _ in range(40):
            say(handle, "amber " + sentence(rng, 12))
    memory.remember(SCOPE, "basil " * 5)
    memory.flush()
    for budget in (0, 1, 13, 40, 100):
        found = memory.recall(SCOPE, ["amber"], window_from=None, budget_tokens=budget, count_tokens=count_words)
        assert sum(count_words(note.text) for note in found.notes) <= budget
    assert len(found.notes) > 3


def test_the_statement_is_preferred_to_question_and_echo(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, max_notes=1)
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "What is my dentist called?", "You did not say.")
        asked, _ = say(handle, "My dentist is called Varga.", "Noted: your dentist is called Varga.")
        say(handle, "What is my dentist called?", "Your dentist is called Varga.")
    memory.flush()
    found = memory.recall(
        SCOPE, ["What is my dentist called?"], window_from=None, budget_tokens=99, count_tokens=count_words
    )
    assert [note.id for note in found.notes] == [f"turn:{asked}"]


def test_who_said_it_first_is_preferred_to_the_model_that_repeats_it() -> None:
    def note(i: int, role: str, minute: int) -> Recalled:
        said = datetime(2026, 12, 1, 9, minute, tzinfo=UTC)
        text = f"The dentist on Main Street {i} is called Varga."
        return Recalled(id=f"turn:{i}", role=role, text=text, time=said, conversation="c", why=Why(score=3.0 - i))

    def kept(*found: Recalled) -> list[str]:
        notes = pack((), found, max_notes=1, budget_tokens=99, count_tokens=count_words)
        return [note.id for note in notes]

    assert kept(note(1, "assistant", 5), note(2, "user", 3)) == ["turn:2"]
    assert kept(note(1, "assistant", 5), note(2, "user", 7)) == ["turn:1"], "here the user repeats"
    assert kept(note(1, "user", 5), note(2, "assistant", 3)) == ["turn:1"]


def test_recall_and_indexing_do_not_wait_for_each_other_for_ever(make_memory: MakeMemory, place: Place) -> None:
    """A recall holds no transaction while it waits for the index, nor the index while it waits for a transaction."""
    memory = make_memory(place)
    rng = random.Random(2)

    def work(user: int) -> None:
        scope = Scope("n", f"u{user}", "c")
        with memory.open_conversation(scope) as handle:
            for _ in range(15):
                say(handle, sentence(rng), sentence(rng))
                memory.recall(scope, [sentence(rng, 2)], window_from=None, budget_tokens=50, count_tokens=count_words)

    threads = [threading.Thread(target=work, args=(user,), daemon=True) for user in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    memory.flush()
    assert memory.verify().problems == ()


def test_a_date_that_is_asked_for_speaks_for_what_was_said_then(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, embedder=None)
    ids = {}
    with memory.open_conversation(SCOPE) as handle:
        for month in range(1, 13):
            when = datetime(2025, month, 3, 9, tzinfo=UTC)
            ids[month] = handle.begin_turn("user", f"We went to the lake, trip {month}", 7, when)
            handle.finish_turn(handle.begin_turn("assistant", "", 0, when), "Nice.", 1, "complete")
        told = handle.begin_turn("user", "Two weeks ago we went to the lake", 7, datetime(2026, 1, 20, tzinfo=UTC))
        handle.finish_turn(handle.begin_turn("assistant", "", 0), "Nice.", 1, "complete")
    memory.flush()

    def asked(question: str) -> tuple[str, tuple[str, ...]]:
        hit = memory.search(SCOPE, question)[0]
        return hit.id, hit.why.boosts

    assert asked("What did we do at the lake in May 2025?") == (f"turn:{ids[5]}", ("date", "speaker"))
    assert asked("Tell us about the lake on 3 September 2025") == (f"turn:{ids[9]}", ("date", "speaker"))
    assert memory.search(SCOPE, "What happened at the lake on 0001-01-01, or on 9999-12-31?")
    assert asked("What happened at the lake on 6 January 2026?") == (f"turn:{told}", ("date",))


def test_whose_words_are_asked_for_speaks_for_them(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place, max_notes=1)
    with memory.open_conversation(SCOPE) as handle:
        asked, replied = say(handle, "amber river", "amber grove")
        ann, bob = say(handle, "Ann: velvet willow", "Bob: velvet maple")
    memory.flush()
    best = [memory.search(SCOPE, text)[0] for text in ("amber, what did I say?", "amber, what did you say?")]
    assert [hit.id for hit in best] == [f"turn:{asked}", f"turn:{replied}"]
    best = [memory.search(SCOPE, text)[0] for text in ("What velvet does Ann have?", "What velvet does Bob have?")]
    assert [hit.id for hit in best] == [f"turn:{ann}", f"turn:{bob}"]
    assert best[0].why.boosts == ("speaker",)


def test_the_gate_weighs_words_by_how_rare_they_are(make_memory: MakeMemory, place: Place) -> None:
    """Without an embedder: 0.5 x the share of the question's words must reach 0.2.

    In a scope of so few turns words are weighed as in one of 100: one that is in a turn counts
    ln(1 + 99.5 / 1.5) = 4.21, in two 3.70, in none 5.31.
    """
    memory = make_memory(place, embedder=None)
    for name, text in (
        ("a", "My dentist Varga lives in Lisbon"),
        ("b", "The river is in Lisbon"),
        ("c", "Order 48213"),
    ):
        with memory.open_conversation(Scope("n", "u", name)) as handle:
            say(handle, text)

    def recalled(question: str) -> set[str]:
        found = memory.recall(SCOPE, [question], window_from=None, budget_tokens=99, count_tokens=count_words)
        return {note.text for note in found.notes}

    assert recalled("Which river?") == {"The river is in Lisbon"}
    assert recalled("Lisbon weather tomorrow") == set()  # 3.70 of 14.32: 0.13
    assert recalled("river bank") == {"The river is in Lisbon"}  # 4.21 of 9.52: 0.22
    both = {"My dentist Varga lives in Lisbon", "The river is in Lisbon"}
    assert recalled("dentist Varga Lisbon") == both  # the second, 0.15, comes in with the first
    assert recalled("parcel number 48213 still delayed somewhere") == {"Order 48213"}  # an identifier
