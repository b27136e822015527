"""Drafts and their acceptance against plain rules on lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.streaming.draft import MOST_MATCH, Acceptance, look_up, n_agreed

texts = st.lists(st.integers(0, 3), max_size=40) | st.lists(st.sampled_from([0, 7, 55_296, 262_143]), max_size=40)


@given(texts, st.integers(1, 9))
@settings(max_examples=400, deadline=None)
def test_a_draft_is_what_followed_the_latest_of_the_longest_matches(ids: list[int], most: int) -> None:
    expected: list[int] = []
    for n in range(min(MOST_MATCH, len(ids) - 1), 2, -1):
        places = [at for at in range(len(ids) - n) if ids[at : at + n] == ids[-n:]]
        if places:
            period = ids[places[-1] + n :]
            expected = (period * n)[: min(n, most)]
            break
    assert look_up(ids, most) == expected


def test_drafts_by_hand() -> None:
    assert look_up([1, 2, 3, 4, 5, 6, 2, 3, 4], 2) == [5, 6]
    assert look_up([1, 2, 3, 4, 5, 6, 7, 2, 3, 4], 9) == [5, 6, 7]  # no longer than the match
    assert look_up([1, 2, 3, 9, 5, 1, 2, 3, 8, 1, 2, 3], 1) == [8]  # the latest
    assert look_up([6, 1, 2, 3, 9, 5, 1, 2, 3, 8, 6, 1, 2, 3], 2) == [9, 5]  # the longest
    assert look_up([1, 2, 3, 2, 3], 2) == []  # two tokens are no match
    assert look_up([7, 7, 7, 7], 4) == [7, 7, 7]  # on into itself
    assert look_up([], 4) == []
    assert look_up([5], 4) == []


@pytest.mark.parametrize(
    ("draft", "chosen", "n"),
    [([], [4], 0), ([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3], [1, 9, 3, 4], 1), ([1, 2], [2, 1, 0], 0)],
)
def test_how_many_agree(draft: list[int], chosen: list[int], n: int) -> None:
    assert n_agreed(draft, chosen) == n


drafts = st.lists(st.integers(1, 15).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=120)


@given(drafts)
@settings(max_examples=200, deadline=None)
def test_it_is_off_exactly_when_too_few_of_the_latest_were_accepted(offered: list[tuple[int, int]]) -> None:
    """Against the whole history since the last pause, counted anew each time."""
    acceptance, history, fails = Acceptance(), list[int](), 0
    for drafted, accepted in offered:
        assert acceptance.drafts()
        acceptance.note(drafted, accepted)
        history += [1] * accepted + [0] * (drafted - accepted)
        latest, pause = history[-64:], 0
        if len(latest) >= 16:
            if sum(latest) / len(latest) < 0.3:
                history, pause = [], min(32 * 2**fails, 1024)
                fails += 1
            else:
                fails = 0
        for _ in range(pause):
            assert not acceptance.drafts()


def test_what_is_never_accepted_is_hardly_ever_drafted() -> None:
    """Four tokens at a time: sixteen, then 32 plain ones, sixteen, 64, and so on, up to 1,024 in between."""
    acceptance, drafted = Acceptance(), 0
    for _ in range(10_000):
        if acceptance.drafts():
            drafted += 4
            acceptance.note(4, 0)
    # 32 + 64 + ... + 512 = 992 tokens in 5 pauses, and (10,000 - 992 - 5 x 4) / (1,024 + 4) = 8.7 more rounds
    assert drafted == (5 + 9) * 16


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    acceptance = Acceptance()
    computed = 0
    for _ in range(4):
        assert acceptance.drafts()
        acceptance.note(4, 0)
    while not acceptance.drafts():
        computed += 1
    assert computed == 32
    for _ in range(100):
        acceptance.note(4, 4)
        assert acceptance.drafts()
