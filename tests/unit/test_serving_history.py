"""Where a request goes on from what is stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.serving.history import Plan, Said, compare


def turns(*texts: str) -> list[Said]:
    """User and assistant in turn."""
    return [Said("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


FOUR = turns("u1", "a1", "u2", "a2")
CASES = {
    "the first turn": ([], turns("u1"), 0, ["u1"]),
    "only the new turn": (FOUR, turns("u3"), 4, ["u3"]),
    "all of it and the new turn": (FOUR, turns("u1", "a1", "u2", "a2", "u3"), 4, ["u3"]),
    "white space does not count": (FOUR, turns("u1 ", "a1", "\nu2", "a2", "u3"), 4, ["u3"]),
    "the last reply again": (FOUR, turns("u1", "a1", "u2"), 2, ["u2"]),
    "the last turn edited": (FOUR, turns("u1", "a1", "u2 edited"), 2, ["u2 edited"]),
    "an earlier turn edited, the rest dropped": (turns("u1", "a1", *"cdefgh"), turns("u1", "a1", "C"), 2, ["C"]),
    "the first reply edited": (FOUR, turns("u1", "A1", "u3"), 0, ["u1", "A1", "u3"]),
    "the old was dropped by the client": (FOUR, turns("u2", "a2", "u3"), 4, ["u3"]),
    "dropped and edited": (turns("u1", "a1", "u2", "a2", "u3", "a3"), turns("u2", "a2", "u3!"), 4, ["u3!"]),
    "the client knows more": (turns("u1", "a1"), turns("u1", "a1", "u2", "a2", "u3"), 2, ["u2", "a2", "u3"]),
    "a history from elsewhere": (FOUR, turns("x1", "y1", "x2"), 4, ["x1", "y1", "x2"]),
    "said twice: the later one, so that nothing is lost": (turns(*"abab"), turns(*"abc"), 4, ["c"]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_where_both_agree(name: str) -> None:
    stored, sent, keep, new = CASES[name]
    plan = compare(stored, sent)
    assert plan.keep == keep
    assert [said.text for said in plan.new] == new


def test_of_a_cut_reply_the_client_may_know_less_or_more() -> None:
    stored = [Said("user", "u1"), Said("assistant", "the reply as far", cut=True)]
    for known in ("the reply", "the reply as far as it went"):
        assert compare(stored, turns("u1", known, "u2")) == Plan(2, (Said("user", "u2"),))
    assert compare(stored, turns("u1", "another", "u2")).keep == 0


def test_a_turn_that_was_never_answered_is_asked_once() -> None:
    cut = [*FOUR, Said("user", "u3"), Said("assistant", "", cut=True)]
    for stored in (cut, cut[:-1]):
        assert compare(stored, turns("u3")) == Plan(4, (Said("user", "u3"),))
        assert compare(stored, [*FOUR, Said("user", "u3")]) == Plan(4, (Said("user", "u3"),))
        both = compare(stored, [*FOUR, Said("user", "u3"), Said("user", "u4")])
        assert both == Plan(4, (Said("user", "u3\n\nu4"),))
        assert compare(stored, turns("u4")) == Plan(len(stored), (Said("user", "u4"),))
    answered = [*cut, Said("user", "u4"), Said("assistant", "a4")]
    again = [*FOUR, Said("user", "u3"), Said("user", "u4"), Said("assistant", "a4"), Said("user", "u5")]
    assert compare(answered, again) == Plan(8, (Said("user", "u5"),))


words = st.sampled_from(["a", "b", "c", "d"])
conversation = st.lists(words, max_size=12).map(lambda texts: turns(*texts[: len(texts) // 2 * 2]))


@given(conversation, words)
def test_whoever_sends_everything_again_has_only_the_new_turn_taken_in(stored: list[Said], new: str) -> None:
    assert compare(stored, [*stored, Said("user", new)]) == Plan(len(stored), (Said("user", new),))


@given(conversation, conversation, words)
def test_what_is_kept_and_what_is_new_make_up_what_was_sent(stored: list[Said], sent: list[Said], new: str) -> None:
    asked = [*sent, Said("user", new)]
    keep, taken = compare(stored, asked)
    assert taken[-1] == asked[-1]
    known = asked[: len(asked) - len(taken)]
    assert list(taken) == asked[len(known) :]
    assert stored[keep - len(known) : keep] == known
    assert keep % 2 == 0


@given(conversation, st.integers(0, 5), words)
def test_whoever_drops_the_old_loses_nothing(stored: list[Said], dropped: int, new: str) -> None:
    unique = [Said(said.role, f"{said.text} {i}") for i, said in enumerate(stored)]
    assert compare(unique, [*unique[2 * dropped :], Said("user", new)]).keep == len(stored)
