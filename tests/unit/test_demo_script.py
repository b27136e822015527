"""The scripted conversation: every fact can be asked for, none can be guessed, and the small talk tells nothing."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import pytest

from memstream.demo import KINDS, MOST_FACTS, Fact, acknowledgements, exchanges, facts
from memstream.errors import ConfigError

SEEDS = range(25)
EVERY_FACT = [fact for seed in SEEDS for fact in facts(MOST_FACTS, seed)]


@pytest.fixture(scope="module")
def filler() -> list[tuple[str, str]]:
    return list(islice(exchanges(7), 2000))


def test_at_least_a_hundred_facts_of_ten_kinds() -> None:
    made = facts(100, 1)
    assert len(set(made)) == len(made) == 100
    assert Counter(fact.kind for fact in made) == dict.fromkeys(KINDS, 10)
    assert len(KINDS) == 10
    assert set(Counter(fact.kind for fact in facts(MOST_FACTS, 1)).values()) == {12}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_question_has_one_answer(seed: int) -> None:
    made = facts(MOST_FACTS, seed)
    for field in ("statement", "question", "answer"):
        assert len({getattr(fact, field).casefold() for fact in made}) == MOST_FACTS
    for fact in made:
        telling = [other for other in made if fact.answer.casefold() in other.statement.casefold()]
        assert telling == [fact]
        assert not [other for other in made if fact.answer.casefold() in other.question.casefold()]


def test_a_question_never_asks_for_the_subject_of_another_fact() -> None:
    """Strip the answers: no two statements are the same sentence, so no value can be taken for another's."""
    made = facts(MOST_FACTS, 3)
    assert len({fact.statement.replace(fact.answer, "") for fact in made}) == MOST_FACTS


def test_facts_are_short_and_asked_for() -> None:
    for fact in EVERY_FACT:
        assert fact.statement.endswith(".")
        assert fact.question.endswith("?")
        assert len(fact.statement.split()) <= 12
        assert len(fact.answer) >= 4


def test_an_answer_cannot_be_guessed() -> None:
    """No question has one answer in every script, and none has an answer that a model says by itself."""
    by_question: dict[str, Counter[str]] = {}
    for fact in EVERY_FACT:
        by_question.setdefault(fact.question, Counter())[fact.answer] += 1
    assert len(by_question) == MOST_FACTS
    shares = [counts.most_common(1)[0][1] / len(SEEDS) for counts in by_question.values()]
    assert max(shares) < 0.7  # three answers to "Which bird do I like best?"
    assert sum(shares) / len(shares) < 0.2
    common = {"blue", "red", "green", "black", "white", "paris", "london", "pizza", "pasta", "max", "teacher", "smith"}
    assert not common & {fact.answer.casefold() for fact in EVERY_FACT}


def test_the_seed_decides() -> None:
    assert facts(100, 5) == facts(100, 5)
    assert facts(100, 5) != facts(100, 6)
    assert facts(30, 5) == facts(100, 5)[:30]
    for script in (exchanges, acknowledgements):
        first, again, other = (list(islice(script(seed), 50)) for seed in (5, 5, 6))
        assert first == again != other
    random.seed(1)
    first = facts(20, 5)
    random.seed(2)
    assert facts(20, 5) == first


@pytest.mark.parametrize("n", [-1, MOST_FACTS + 1])
def test_more_facts_than_there_are_is_an_error(n: int) -> None:
    with pytest.raises(ConfigError, match=f"{n} facts.*{MOST_FACTS}"):
        facts(n, 0)


def test_small_talk_never_says_an_answer(filler: Sequence[tuple[str, str]]) -> None:
    spoken = "\n".join(f"{user}\n{reply}" for user, reply in filler).casefold()
    spoken += "\n".join(islice(acknowledgements(0), 200)).casefold()
    assert not {fact.answer for fact in EVERY_FACT if fact.answer.casefold() in spoken}
    assert not re.search(r"\d", spoken)


def test_small_talk_is_not_about_the_person(filler: Sequence[tuple[str, str]]) -> None:
    personal = re.compile(r"\b(my|mine|me|our|i am|i'm|i have|i was|i like|i live|we)\b", re.IGNORECASE)
    about = [text for user, reply in filler for text in (user, reply) if personal.search(text)]
    assert [text for text in about if "What do we know" not in text] == []


def test_small_talk_does_not_repeat_itself(filler: Sequence[tuple[str, str]]) -> None:
    assert len(set(filler)) == len(filler)
    sentences = Counter(s for user, reply in filler for s in (user, *re.split(r"(?<=\.) ", reply)))
    assert sum(n - 1 for n in sentences.values()) < 0.02 * sentences.total()


def test_every_slot_is_filled(filler: Sequence[tuple[str, str]]) -> None:
    assert not [text for exchange in filler for text in exchange if re.search(r"[{}_]|  ", text)]


def test_small_talk_yields_twenty_thousand_tokens(filler: Sequence[tuple[str, str]], smollm2: Any) -> None:
    sizes = [len(ids) for ids in smollm2.tokenizer([f"{user} {reply}" for user, reply in filler])["input_ids"]]
    assert min(sizes) >= 30
    assert max(sizes) <= 80
    assert sum(sizes[:500]) >= 20_000
    assert sum(len(f"{user} {reply}".split()) for user, reply in filler[:500]) >= 16_000


def test_acknowledgements_vary_and_tell_nothing() -> None:
    said = list(islice(acknowledgements(0), 100))
    assert all(a != b for a, b in pairwise(said))
    assert len(set(said)) >= 8


def test_a_fact_knows_its_fields() -> None:
    fact = facts(1, 0)[0]
    assert isinstance(fact, Fact)
    assert fact == Fact(kind=fact.kind, statement=fact.statement, question=fact.question, answer=fact.answer)
    assert fact.answer in fact.statement
