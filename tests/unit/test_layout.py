"""The layout against a plain list of tokens that is evicted by the written rules."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.streaming.layout import Layout


class Naive:
    """The same rules on plain lists: groups are lists of token numbers, and nothing is clever."""

    def __init__(self, sink: int, window: int, evict: int) -> None:
        self.sink, self.window, self.evict = sink, window, min(evict, window)
        self.sinks: list[int] = []
        self.groups: list[tuple[int, list[int]]] = []
        self.open = False
        self.left: list[tuple[int, int]] = []

    def size(self) -> int:
        return sum(len(tokens) for _, tokens in self.groups)

    def append(self, token: int) -> None:
        if len(self.sinks) < self.sink:
            self.sinks.append(token)
            return
        if self.size() == self.window:
            while len(self.groups) > 1 and self.window - self.size() < self.evict:
                key, tokens = self.groups.pop(0)
                if tokens:
                    self.left.append((key, len(tokens)))
            if self.size() == self.window:
                key, tokens = self.groups[0]
                self.left.append((key, min(self.evict, len(tokens))))
                self.groups[0] = key, tokens[self.evict :]
        self.groups[-1][1].append(token)

    def tokens(self) -> list[int]:
        return [token for _, tokens in self.groups for token in tokens]


shapes = st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(2, 24), st.integers(1, 12))
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=14)


def _layout(shape: tuple[int, int, int, int], position: str) -> Layout:
    sink, memory, window, evict = shape
    return Layout(
        cache_tokens=sink + memory + window,
        sink_tokens=sink,
        memory_tokens=memory,
        evict_tokens=evict,
        memory_position=position,  # type: ignore[arg-type]
    )


@given(shapes, lengths, st.integers(1, 9), st.sampled_from(["before_turn", "after_sinks"]), st.data())
@settings(max_examples=150, deadline=None)
def test_every_slot_has_one_owner_and_positions_follow_the_rules(shape, turns, chunk, position, data) -> None:
    layout, naive = _layout(shape, position), Naive(shape[0], shape[2], shape[3])
    slots: dict[int, tuple[int, int]] = {}  # slot -> (token, stored position)
    token, gone = 0, []
    limit = shape[0] + shape[2] + data.draw(st.integers(0, 30))
    for key, n in enumerate(turns):
        layout.open_group(key)
        naive.groups.append((key, []))
        planned = layout.plan(n)
        closed = [group.key for group in layout.closed]
        left = n
        while left:
            if layout.room() == 0:
                gone += layout.evict()
            take = min(layout.room(), chunk, left)
            back, arcs = layout.rebase(limit, take)
            for slot, length in arcs:
                for s in range(slot, slot + length):
                    slots[s] = slots[s][0], slots[s][1] - back
            piece = layout.append(take)
            written = [s for slot, length in piece.writes for s in range(slot, slot + length)]
            assert len(written) == take
            for i, slot in enumerate(written):
                slots[slot] = token + i, piece.position + i
                naive.append(token + i)
            assert piece.position + take <= max(limit, shape[0] + shape[2])
            token, left = token + take, left - take

            expected = naive.sinks + naive.tokens()
            attended = [s for part in piece.parts for s in range(part.slot, part.slot + part.length)]
            assert max(Counter(attended).values()) == 1
            assert sorted(slots[s][0] for s in attended) == sorted(expected)
            for part in piece.parts:
                for i in range(part.length):
                    assert slots[part.slot + i][1] == part.position + i
            # Distances, seen from the piece's first token: the order in which the retained tokens are seen.
            seen = {
                slots[part.slot + i][0]: piece.position + part.shift - (part.position + i)
                for part in piece.parts
                for i in range(part.length)
            }
            first = token - take
            assert all(seen[t] == expected.index(first) - i for i, t in enumerate(expected))
        kept = {group.key for group in layout.closed}
        assert planned == [key for key in closed if key not in kept]
        layout.close_group()
    assert layout.window == len(naive.tokens())
    assert [(g.key, g.n_tokens) for g in gone] == naive.left


@pytest.mark.parametrize("position", ["before_turn", "after_sinks"])
def test_memory_is_seen_where_its_position_says(position: str) -> None:
    layout = _layout((2, 4, 10, 1), position)
    layout.append(2)
    layout.open_group("old")
    layout.append(3)
    layout.close_group()
    layout.memory = 4
    layout.open_group("new")
    piece = layout.append(2)
    where = {
        part.slot + i: piece.position + part.shift - (part.position + i)
        for part in piece.parts
        for i in range(part.length)
    }
    where = {slot: where[slot] for slot in (0, 2, 6, 9)}
    # Distance from the turn's first token to the first token of each segment.
    if position == "before_turn":  # sink sink | w w w | m m m m | turn
        assert where == {0: 9, 2: 4, 6: 7, 9: 0}
    else:  # sink sink | m m m m | w w w turn
        assert where == {0: 9, 2: 7, 6: 3, 9: 0}


def test_a_failed_piece_is_taken_back() -> None:
    layout = _layout((2, 0, 8, 1), "after_sinks")
    layout.append(2)
    layout.open_group("a")
    layout.append(3)
    before = layout.window, layout.open.n_tokens
    layout.append(4)
    layout.retract(4)
    assert (layout.window, layout.open.n_tokens) == before
    fresh = _layout((2, 0, 8, 1), "after_sinks")
    fresh.append(2)
    fresh.retract(2)
    assert fresh.sinks == 0


def test_groups_that_are_taken_back_leave_no_trace() -> None:
    layout, twin = _layout((2, 0, 20, 4), "after_sinks"), _layout((2, 0, 20, 4), "after_sinks")
    for one in (layout, twin):
        one.append(2)
    for key, n in enumerate((7, 6, 5, 9, 3)):
        for one in (layout, twin):
            one.open_group(key)
            for _ in range(n):
                if one.room() == 0:
                    one.evict()
                one.append(1)
            one.close_group()
        room, undone = layout.room(), 0
        while layout.room() > 1:
            layout.open_group(f"undone {undone}")
            layout.append(2)
            layout.close_group()
            undone += 1
        assert layout.take_back(undone) == 2 * undone
        assert layout.room() == room
        assert (layout.start, layout.end, layout.base, layout.closed) == (twin.start, twin.end, twin.base, twin.closed)


def test_one_token_groups_are_the_papers_eviction() -> None:
    layout = _layout((4, 0, 8, 1), "after_sinks")
    layout.append(4)
    for t in range(50):
        layout.open_group(t)
        if layout.room() == 0:
            assert [g.key for g in layout.evict()] == [t - 8]
        layout.append(1)
        layout.close_group()
        assert layout.window == min(t + 1, 8)
