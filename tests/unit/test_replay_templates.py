"""The template miner: alike lines together, unlike ones apart, and bounds in every direction."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from memstream.replay.templates import MAX_WORDS, TemplateMiner


def test_lines_that_differ_in_numbers_share_a_template() -> None:
    miner = TemplateMiner(100)
    first, new, changed, n_before = miner.add("generating core.17")
    second, *again = miner.add("generating core.4711")
    assert (new, changed, n_before) == (True, False, 0)
    assert again == [False, False, 1]
    assert first is second
    assert (first.text, first.n_lines) == ("generating core.<*>", 2)


def test_words_that_differ_become_a_mask() -> None:
    miner = TemplateMiner(100)
    miner.add("connection from alice closed by peer")
    seen = miner.add("connection from bob closed by peer")
    assert (seen.template.text, seen.new, seen.changed) == ("connection from <*> closed by peer", False, True)
    assert not miner.add("connection from eve closed by peer").changed


def test_another_message_is_another_template() -> None:
    miner = TemplateMiner(100)
    made = [miner.add(text).template.id for text in ("disk sda failed", "disk sda is full now", "user alice logged in")]
    assert len(set(made)) == len(miner) == 3


def test_the_template_not_seen_for_longest_leaves() -> None:
    miner = TemplateMiner(2)
    kept = miner.add("alpha one").template
    miner.add("beta two three")
    assert miner.add("alpha one").template is kept
    miner.add("gamma four five six")
    assert len(miner) == 2
    assert miner.add("alpha one").template is kept
    again = miner.add("beta two three")
    assert (again.new, again.n_before) == (False, 1)  # it left its count behind


def test_counts_of_dropped_templates_are_bounded() -> None:
    miner = TemplateMiner(1)
    for i in range(12):  # words without digits, of different numbers
        miner.add(" ".join("abcdefghijklm"[: i + 1]))
    assert miner.add("a").new  # eleven were dropped, the ten latest are known
    assert not miner.add("a b c d e").new


def test_an_earlier_run_is_asked_before_a_template_is_new() -> None:
    miner = TemplateMiner(10, lambda text: {"disk sd<*> failed": 7}.get(text, 0))
    seen = miner.add("disk sd7 failed")
    assert (seen.new, seen.n_before, seen.template.n_lines) == (False, 7, 8)
    assert miner.add("disk is full").new


@given(st.lists(st.text("abcd1 ", max_size=30), max_size=120), st.integers(1, 6), st.integers(0, 120))
def test_a_restored_miner_goes_on_as_if_nothing_had_happened(messages: list[str], most: int, at: int) -> None:
    whole, first = TemplateMiner(most), TemplateMiner(most)
    expected = [(seen.template.id, seen.template.text, *seen[1:]) for seen in map(whole.add, messages)]
    found = [(seen.template.id, seen.template.text, *seen[1:]) for seen in map(first.add, messages[:at])]
    second = TemplateMiner(most)
    second.restore(json.loads(json.dumps(first.state())))
    found += [(seen.template.id, seen.template.text, *seen[1:]) for seen in map(second.add, messages[at:])]
    assert found == expected


def test_a_line_of_many_words_is_compared_by_its_beginning() -> None:
    miner = TemplateMiner(100)
    words = [f"w{'x' * i}" for i in range(MAX_WORDS)]
    template = miner.add(" ".join([*words, "a"])).template
    assert miner.add(" ".join([*words, "b", "c"])).template is template
    assert len(template.words) == MAX_WORDS


@given(st.lists(st.text("abcd1 ", max_size=30), max_size=300), st.integers(1, 12))
def test_templates_and_nodes_are_bounded_whatever_comes(messages: list[str], most: int) -> None:
    miner = TemplateMiner(most)
    for message in messages:
        template, new, _, n_before = miner.add(message)
        assert template.text.split() == template.words
        assert len(miner) <= most
        assert miner.n_nodes <= 3 * most
        assert miner.add(message) == (template, False, False, n_before + 1)
        assert new == (n_before == 0)


def test_a_leaf_compares_a_bounded_number_of_templates() -> None:
    miner = TemplateMiner(10_000)
    letters = "abcdefghijklmnopqrst"
    often = "same start often seen often seen"
    kept = miner.add(often).template
    for a in letters:
        for b in letters:
            miner.add(f"same start {a}{b} {b}{a} {a} {a}{a}{b}")
            assert miner.add(often).template is kept
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
