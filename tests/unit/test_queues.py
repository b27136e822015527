"""Who comes next, and how many may wait."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.errors import OverloadedError
from memstream.queues import Place, Waiting


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=40))
def test_whoever_came_first_of_those_who_stayed_is_next(moves: list[int | None]) -> None:
    """None joins the line; a number leaves it, from that place counted round."""
    waiting = Waiting()
    line: list[tuple[ExitStack, Place]] = []
    for move in moves:
        if move is None:
            stack = ExitStack()
            line.append((stack, stack.enter_context(waiting.in_line())))
        elif line:
            line.pop(move % len(line))[0].close()
        assert [place.is_next() for _, place in line] == [i == 0 for i in range(len(line))]
    for stack, _ in line:
        stack.close()


def test_whoever_becomes_next_is_woken() -> None:
    waiting = Waiting()
    with ExitStack() as ahead:
        ahead.enter_context(waiting.in_line())
        with waiting.in_line() as behind:
            assert not behind.called.is_set()
            ahead.close()
            assert behind.called.is_set()


def test_no_more_wait_than_may() -> None:
    waiting = Waiting(2)
    with waiting.counted(), waiting.counted():
        assert waiting.n == 2
        with pytest.raises(OverloadedError, match="2 turns wait already, and max_waiting is 2"), waiting.counted():
            raise AssertionError("it was let in")
        assert waiting.n == 2
    assert waiting.n == 0
    with pytest.raises(ZeroDivisionError), waiting.counted():
        raise ZeroDivisionError
    assert waiting.n == 0
    with pytest.raises(OverloadedError, match="max_waiting is 0"), Waiting(0).counted():
        raise AssertionError("it was let in")
