"""The template miner: alike lines together, unlike ones apart, and bounds in every direction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memstream.replay.templates import MAX_WORDS, TemplateMiner


def test_lines_that_differ_in_numbers_share_a_template() -> None:
    miner = TemplateMiner(100)
    first, new = miner.add("generating core.17")
    second, again = miner.add("generating core.4711")
    assert (new, again) == (True, False)
    assert first is second
    assert (first.text, first.n_lines) == ("generating core.<*>", 2)


def test_words_that_differ_become_a_mask() -> None:
    miner = TemplateMiner(100)
    miner.add("connection from alice closed by peer")
    template, new = miner.add("connection from bob closed by peer")
    assert (template.text, new) == ("connection from <*> closed by peer", False)


def test_another_message_is_another_template() -> None:
    miner = TemplateMiner(100)
    made = [miner.add(text)[0].id for text in ("disk sda failed", "disk sda is full now", "user alice logged in")]
    assert len(set(made)) == len(miner) == 3


def test_the_template_not_seen_for_longest_leaves() -> None:
    miner = TemplateMiner(2)
    kept, _ = miner.add("alpha one")
    miner.add("beta two three")
    assert miner.add("alpha one") == (kept, False)
    miner.add("gamma four five six")
    assert len(miner) == 2
    assert miner.add("alpha one") == (kept, False)
    assert miner.add("beta two three")[1]


def test_a_line_of_many_words_is_compared_by_its_beginning() -> None:
    miner = TemplateMiner(100)
    words = [f"w{'x' * i}" for i in range(MAX_WORDS)]
    template, _ = miner.add(" ".join([*words, "a"]))
    assert miner.add(" ".join([*words, "b", "c"])) == (template, False)
    assert len(template.words) == MAX_WORDS


@given(st.lists(st.text("abcd1 ", max_size=30), max_size=300), st.integers(1, 12))
def test_templates_and_nodes_are_bounded_whatever_comes(messages: list[str], most: int) -> None:
    miner = TemplateMiner(most)
    for message in messages:
        template, new = miner.add(message)
        assert template.text.split() == template.words
        assert len(miner) <= most
        assert miner.n_nodes <= 3 * most
        assert miner.add(message) == (template, False)
        assert new == (template.n_lines == 2)


def test_a_leaf_compares_a_bounded_number_of_templates() -> None:
    miner = TemplateMiner(10_000)
    letters = "abcdefghijklmnopqrst"
    often = "same start often seen often seen"
    kept, _ = miner.add(often)
    for a in letters:
        for b in letters:
            miner.add(f"same start {a}{b} {b}{a} {a} {a}{a}{b}")
            assert miner.add(often) == (kept, False)
    assert len(miner) <= 100


def test_many_first_words_share_a_node() -> None:
    miner = TemplateMiner(10_000)
    letters = "abcdefghijklmnopqrst"
    for a in letters:
        for b in letters:
            miner.add(f"{a}{b} {b}{a} end")
    assert len(miner) <= len(letters) ** 2
    assert miner.n_nodes <= 1 + 101 + 101 * 101
    assert miner.n_nodes < 1 + 2 * len(letters) ** 2
