"""Words of any language, queries of any text, windows, summaries, packing: worked out by hand."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.memory import SqlStore
from memstream.memory.chunker import MAX_PIECES, estimated_pieces, window_text, windows
from memstream.memory.dates import find_dates
from memstream.memory.packing import pack
from memstream.memory.postings import Postings
from memstream.memory.query import Query, is_question, make_query
from memstream.memory.summarizer import invented, sentences, summarise
from memstream.report import Recalled, Why
from memstream.stores import fulltext
from memstream.stores.rows import Turn

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Varga's order #48213-B", ["dr", "varga", "s", "order", "48213", "b"]),
        ("Straße ÉCOLE naïve", ["strasse", "ecole", "naive"]),
        ("订单号", ["订", "单", "号", "订单", "单号"]),
        ("東京へ行く OK", ["東", "京", "へ", "行", "く", "東京", "京へ", "へ行", "行く", "ok"]),
        ("서울", ["서", "울", "서울"]),
        ("ｶﾞ ＡＢＣ", ["ガ", "abc"]),
        ("हिन्दी", ["हिन्दी"]),
        ("snake_case \x00 \U0001f600 \"'*():^-", ["snake", "case"]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert fulltext.words(text) == expected


def test_query_terms_leave_out_what_says_nothing() -> None:
    assert fulltext.query_terms("What is my dentist called? My DENTIST!") == ["dentist"]
    assert fulltext.query_terms("我的订单号") == ["我的", "的订", "订单", "单号"]
    assert fulltext.query_terms("猫") == ["猫"]
    assert fulltext.query_terms("who are you") == []
    assert len(fulltext.query_terms(" ".join(f"w{i}" for i in range(500)))) == 32


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text())
def test_no_text_is_a_syntax_error_and_its_words_are_found(text: str, other: str) -> None:
    store = SqlStore.open("memory")
    with store.write() as connection:
        connection.exec_driver_sql("INSERT INTO owners (id, namespace, user_key) VALUES (1, 'n', 'u')")
        connection.exec_driver_sql("INSERT INTO facts VALUES (1, 1, NULL, '', '2026-01-01 00:00:00')")
        fulltext.add_fact(connection, 1, 1, None, text)
        for term in fulltext.query_terms(text) + fulltext.words(text):
            assert fulltext.newest_with(connection, "fact_words", ["o1"], term, 9) == [1]
            assert fulltext.newest_with(connection, "fact_words", ["o11"], term, 9) == []
        for term in fulltext.query_terms(other):
            fulltext.newest_with(connection, "fact_words", ["o1"], term, 9)
    store.close()


def query_of(*turns: str) -> Query:
    made = make_query(turns, today=date(2026, 11, 30), oldest=date(2025, 6, 1))
    assert made is not None
    return made


def test_context_weighs_less_than_the_newest_turn() -> None:
    query = query_of("The river is high", "amber", "Where is my dentist, please? In Lisbon?")
    assert query.terms["dentist"] == query.terms["lisbon"] == 1.0
    assert sum(query.terms[t] for t in ("amber", "river", "high")) == pytest.approx(0.15 + 0.075)
    assert query.newest == {"dentist", "lisbon"}
    assert query_of("Lisbon", "And there?").terms == {"lisbon": 0.5}
    assert make_query(["", "  "], today=date(2026, 1, 1), oldest=date(2026, 1, 1)) is None


def test_whose_words_are_asked_for() -> None:
    assert query_of("What is my dentist called?").roles == {"user"}
    assert query_of("What did you suggest to me?").roles == {"assistant"}
    assert query_of("When does the train leave?").roles == set()


class Letters:
    """Counts the letters a to z: a vector worked out by hand."""

    name = fingerprint = "letters"
    dimension = 26

    def embed(self, texts: list[str]) -> Any:
        counts = np.array([[text.lower().count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_the_vector_for_ranking_leaves_out_dates_and_what_is_all_over_the_scope() -> None:
    whole, distinct = query_of("Did Ann's cat eat on 1 May 2026?").embed(Letters(), {"ann"})
    np.testing.assert_allclose(whole, Letters().embed(["Did Ann's cat eat on 1 May 2026?"])[0], atol=1e-6)
    np.testing.assert_allclose(distinct, Letters().embed(["Did cat eat?"])[0], atol=1e-6)
    whole, distinct = query_of("Ann?").embed(Letters(), {"ann"})  # nothing would be left
    np.testing.assert_array_equal(whole, distinct)


TODAY, OLDEST = date(2026, 11, 30), date(2025, 6, 1)  # a Monday


@pytest.mark.parametrize(
    ("text", "spans", "rest"),
    [
        ("What was on 1 May, 2023?", ["2023-05-01"], "What was?"),
        ("Sent on May 1st 2023.", ["2023-05-01"], "Sent ."),
        ("Sent 2023-05-01", ["2023-05-01"], "Sent"),
        ("the first weekend of August 2023", ["2023-08-01 2023-08-31"], "the first weekend"),
        ("in february 2024", ["2024-02-01 2024-02-29"], ""),
        ("on the 5th of May", ["2025-05-05", "2026-05-05"], ""),
        ("since August", ["2025-08-01 2025-08-31", "2026-08-01 2026-08-31"], ""),
        ("on 29 February", [], "on 29 February"),  # in no year since the oldest memory
        ("on 31 February 2026", ["2026-02-01 2026-02-28"], "on 31"),
        ("in 2025", ["2025-01-01 2025-12-31"], ""),
        ("yesterday", ["2026-11-29"], ""),
        ("last Monday", ["2026-11-23"], ""),
        ("last weekend", ["2026-11-28 2026-11-29"], ""),
        ("last week", ["2026-11-23 2026-11-29"], ""),
        ("last month", ["2026-10-01 2026-10-31"], ""),
        ("last year", ["2025-01-01 2025-12-31"], ""),
        ("two weeks ago", ["2026-11-13 2026-11-19"], ""),
        ("May I march in 2 minutes? I sat there, Mark.", [], "May I march in 2 minutes? I sat there, Mark."),
        ("order 48213 of 1200 pieces", [], "order 48213 of 1200 pieces"),
    ],
)
def test_dates(text: str, spans: list[str], rest: str) -> None:
    found, left = find_dates(text, today=TODAY, oldest=OLDEST)
    expected = [span.split() for span in spans]
    assert [(str(span.first), str(span.last)) for span in found] == [(span[0], span[-1]) for span in expected]
    assert left == rest


@pytest.mark.parametrize("text", ["What happened on 0001-01-01?", "on 9999-12-31", "and on 31 December 9999?"])
def test_a_day_at_the_end_of_the_calendar_is_no_date(text: str) -> None:
    found, _ = find_dates(text, today=TODAY, oldest=OLDEST)
    assert all(OLDEST.year <= span.first.year <= TODAY.year for span in found)  # the days around it can be asked for


def test_a_long_text_of_little_words_is_read_in_no_time() -> None:
    text = "in the " * 100_000
    assert find_dates(text, today=TODAY, oldest=OLDEST) == ([], text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789 ,-maychfeblst/ofonedawkr", max_size=60), st.dates(), st.dates())
def test_any_text_may_name_dates(text: str, today: date, oldest: date) -> None:
    for span in find_dates(text, today=today, oldest=oldest)[0]:
        assert span.first <= span.last
        assert span.distance(span.first) == span.distance(span.last) == 0


@pytest.mark.parametrize(("text", "expected"), [("Who?", True), ("谁？ ", True), ('"Who?"', True), ("I know.", False)])
def test_questions(text: str, expected: bool) -> None:
    assert is_question(text) is expected


def turn(sequence: int, text: str) -> Turn:
    return Turn(sequence + 1, sequence, "user", text, 1, START, "complete", 1)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, []),
        (1, [(0, 0)]),
        (4, [(0, 3)]),
        (5, [(0, 3), (2, 4)]),
        (6, [(0, 3), (2, 5)]),
        (7, [(0, 3), (2, 5), (4, 6)]),
    ],
)
def test_windows(n: int, expected: list[tuple[int, int]]) -> None:
    made = windows([turn(i, f"t{i}") for i in range(n)])
    assert [(w.first, w.last) for w in made] == expected
    for window in made:
        assert window.text == "\n".join(f"t{i}" for i in range(window.first, window.last + 1))


def test_a_window_reads_something_of_every_turn() -> None:
    long = " ".join(["amber"] * 1000)
    text = window_text(["start here", long, "middle here", long])
    lines = text.split("\n")
    assert (lines[0], lines[2]) == ("start here", "middle here")
    assert len(lines[1].split()) == len(lines[3].split()) == (MAX_PIECES - 2 - 3 - 3) // 2 // 2
    assert sum(estimated_pieces(word) for word in text.split()) <= MAX_PIECES - 2
    assert sum(estimated_pieces(word) for word in text.split()) > MAX_PIECES - 12


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=600), min_size=1, max_size=4))
def test_a_window_never_exceeds_the_embedder(texts: list[str]) -> None:
    cut = window_text(texts)
    assert sum(estimated_pieces(word) for word in cut.split()) <= MAX_PIECES - 2


def test_summaries_are_sentences_of_the_text() -> None:
    texts = ["Hello! My dentist is Dr. Varga in Lisbon. Is it raining?", "amber " * 400 + "."]
    summary = summarise(texts)
    assert "My dentist is Dr. Varga in Lisbon." in summary
    assert all(part in " ".join(texts) for part in sentences(summary))
    assert sum(estimated_pieces(word) for word in summary.split()) <= MAX_PIECES - 2
    assert summarise(["", "?!"]) == ""


def test_a_summary_says_what_is_rare_and_nothing_twice() -> None:
    texts = ["The weather is nice. The weather is lovely.", "My cat is called Minka. Her name is Minka."]
    # A piece for each four letters begun and for each other sign: 1 + 1 + 1 + 2 + 3.
    assert summarise(texts, 8) == "My cat is called Minka."
    # Then what is new: the weather, once, and not the cat again.
    assert summarise(texts, 8 + 6) == "The weather is nice. My cat is called Minka."


def test_a_name_or_a_number_counts_twice_and_a_question_half() -> None:
    assert summarise(["The code is plain. The code is 4711."], 6) == "The code is 4711."
    assert summarise(["We met a baker. We met in Porto."], 6) == "We met in Porto."
    assert summarise(["Is the river wide? The river is wide."], 6) == "The river is wide."


def test_a_text_without_sentences_is_summarised_in_parts() -> None:
    endless = " ".join(f"word{i}" for i in range(500))  # two pieces each
    summary = summarise([endless])
    assert 200 <= sum(estimated_pieces(word) for word in summary.split()) <= MAX_PIECES - 2
    assert set(summary.split()) <= set(endless.split())
    assert (
        200
        <= sum(estimated_pieces(word) for word in summarise(["".join(map(chr, range(0x4E00, 0x4F00)))]).split())
        <= MAX_PIECES - 2
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=900), max_size=4), st.integers(1, 80))
def test_a_summary_never_exceeds_its_length(texts: list[str], room: int) -> None:
    assert sum(estimated_pieces(word) for word in summarise(texts, room).split()) <= room


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("Anna paid 300 for the Boat.", []),
        ("Anna paid 301 for three boats.", ["301", "three"]),
        ("They talked about Anna.", []),
        ("The user said Anna has a boat.", []),
        ("Maria paid. Anna did not.", ["Maria"]),
        ("Anna went to Porto, and I know Varga.", ["Porto", "Varga"]),
        ("anna's boat cost ３００", []),  # full-width digits are the same number
        ("", []),
    ],
)
def test_what_a_summary_invents(summary: str, expected: list[str]) -> None:
    assert invented(summary, ["I am Anna.", "My boat cost 300, paid in full."]) == expected


def test_sentences() -> None:
    assert sentences("I met Dr. Varga. He came! 好的。再见\nJ. R. Smith left at 3.45 pm.") == [
        "I met Dr. Varga.", "He came!", "好的。", "再见", "J. R. Smith left at 3.45 pm.",
    ]  # fmt: skip


def note(number: int, text: str, score: float, role: str = "user") -> Recalled:
    time = START + timedelta(minutes=number)
    return Recalled(id=f"turn:{number}", role=role, text=text, time=time, conversation="c", why=Why(score=score))


def packed(found: list[Recalled], **options: Any) -> list[int]:
    options = {"max_notes": 3, "budget_tokens": 100, "count_tokens": lambda text: len(text.split()), **options}
    return [int(kept.id[5:]) for kept in pack([], found, **options)]


def test_packing_is_chronological_and_bounded() -> None:
    found = [note(9, "amber basil", 3.0), note(2, "cedar delta", 2.5), note(5, "ember fjord", 2.0)]
    assert packed(found) == [2, 5, 9]
    assert packed(found, max_notes=2) == [2, 9]
    assert packed(found, budget_tokens=4) == [2, 9]
    assert packed(found, budget_tokens=1) == []
    assert packed([*found, note(1, "grove heron", 0.5)], max_notes=9) == [2, 5, 9]  # far below the best


def test_near_duplicates_leave_one_and_the_statement_stays() -> None:
    question = note(1, "What is my dentist called?", 3.0)
    echo = note(4, "Noted, your dentist is called Varga.", 2.9, role="assistant")
    fact = note(3, "My dentist is called Varga.", 2.8)
    assert packed([question, fact, echo]) == [3]
    assert packed([fact, echo, question]) == [3]
    assert packed([echo]) == [4]
    assert packed([note(1, "amber basil cedar delta", 3.0), note(2, "amber ember fjord grove", 2.9)]) == [1, 2]


def test_a_note_too_long_for_the_budget_gives_its_best_sentences() -> None:
    text = "Filler " * 30 + ". The amber key is under the pot. " + "Filler " * 30 + "."
    long = Recalled(
        id="turn:1", role="user", text=text, time=START, conversation="c", why=Why(score=1.0, terms=("amber",))
    )
    (kept,) = pack([], [long], max_notes=3, budget_tokens=10, count_tokens=lambda text: len(text.split()))
    assert kept.text == "The amber key is under the pot."
    assert pack([], [note(1, "word " * 50, 1.0)], max_notes=3, budget_tokens=10, count_tokens=len) == ()


def test_once_the_notes_are_full_no_more_are_read() -> None:
    class Unread(Recalled):
        def __getattribute__(self, name: str) -> Any:
            assert name != "text", "read although nothing more can get in"
            return super().__getattribute__(name)

    unread = Unread(id="turn:9", role="user", text="", time=START, conversation="c", why=Why(score=0.9))
    found = [note(1, "amber basil", 1.0), note(2, "cedar delta", 0.95)]
    options: dict[str, Any] = {"budget_tokens": 99, "count_tokens": len}
    assert [kept.id for kept in pack([], [*found, unread], max_notes=2, **options)] == ["turn:1", "turn:2"]
    with pytest.raises(AssertionError, match="read although"):
        pack([], [*found, unread], max_notes=3, **options)
    asks, tells = note(3, "cedar delta?", 0.95), note(4, "cedar delta", 0.5)
    assert [kept.id for kept in pack([], [found[0], asks, tells], max_notes=2, **options)] == ["turn:1", "turn:4"]


@settings(deadline=None)
@given(
    postings=st.lists(st.lists(st.integers(1, 30), max_size=12, unique=True), max_size=5),
    ids=st.lists(st.integers(1, 30), max_size=12, unique=True),
    seed=st.integers(0, 99),
)
def test_the_best_texts_hold_the_words_that_weigh_most(postings: list[list[int]], ids: list[int], seed: int) -> None:
    weights = np.random.default_rng(seed).integers(1, 9, len(postings)).astype(np.float64)
    found = Postings(postings)
    expected = [[i in mine for mine in postings] for i in ids]
    assert found.held(np.array(ids, dtype=np.int64)).tolist() == expected
    weight = {i: sum(w for w, mine in zip(weights, postings, strict=True) if i in mine) for i in chain(*postings)}
    best = sorted(weight, key=lambda i: (-weight[i], -i))[:4]
    assert found.best(weights, 4).tolist() == best
