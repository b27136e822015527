"""Where every token of one conversation lies in the fixed cache: integers only, standard library only.

    slot   0 .. S-1      S .. S+M-1      S+M .. C-1
           sink          memory          window (a ring)

A window token has a stream index t, counted from the first token after the sinks. Its slot is ``S + M + t mod W`` and
its stored position is ``S + t - base``; neither changes until a rebase raises ``base``. Sink keys are stored at
positions 0..S-1, memory keys at S..S+m-1. Where a segment *seems* to be to the current turn is one number, the
``shift`` by which the query is rotated before it meets that segment's keys.

Source: StreamingLLM (arXiv 2309.17453, section 3.2). Deviations: eviction by whole groups, and stored keys that stay
while queries turn (docs/adr/0003).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from memstream.config import MemoryPosition


class Arc(NamedTuple):
    """A run of slots."""

    slot: int
    length: int


class Part(NamedTuple):
    """A run of keys as a query meets it.

    The keys lie in ``slot .. slot+length-1`` and are stored at positions ``position .. position+length-1``;
    the query is rotated by ``shift`` positions first.
    """

    slot: int
    length: int
    position: int
    shift: int


class Piece(NamedTuple):
    """One piece of new tokens: its first position, the slots it is written to, and the parts it attends to."""

    n: int
    position: int
    writes: tuple[Arc, ...]
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Group:
    """Tokens that leave together: one exchange, or one line. ``key`` is the owner's name for it."""

    key: Hashable
    n_tokens: int = 0
    cut: bool = False


class Gone(NamedTuple):
    """A group that left the window, or the older part of one that was cut (``whole`` False)."""

    key: Hashable
    n_tokens: int
    whole: bool


class Layout:
    """Bookkeeping of one row: which tokens are where, what leaves next, and at which shifts queries meet them.

    Args:
        cache_tokens: slots of the row, C.
        sink_tokens: slots pinned at the start, S; the first S tokens of the stream go there.
        memory_tokens: slots for recalled text, M. The window has the rest, W = C - S - M.
        evict_tokens: an eviction frees at least this many slots where whole groups allow it.
        memory_position: where memory seems to be: ``before_turn`` or ``after_sinks``.
    """

    def __init__(
        self,
        *,
        cache_tokens: int,
        sink_tokens: int,
        memory_tokens: int,
        evict_tokens: int,
        memory_position: MemoryPosition,
    ) -> None:
        self.sink_tokens = sink_tokens
        self.memory_room = memory_tokens
        self.window_room = cache_tokens - sink_tokens - memory_tokens
        self.evict_tokens = min(evict_tokens, self.window_room)
        self.memory_position = memory_position
        assert self.window_room >= 1
        self.sinks = 0  # sink slots filled
        self.memory = 0  # memory tokens that queries see
        self.start = 0  # stream index of the oldest window token
        self.end = 0  # stream index of the next window token
        self.base = 0  # stream index that is stored at position S
        self.closed: deque[Group] = deque()
        self.open: Group | None = None

    @property
    def window(self) -> int:
        """Tokens in the window, the current turn included."""
        return self.end - self.start

    @property
    def held(self) -> int:
        """Tokens in the row: sinks, memory and window."""
        return self.sinks + self.memory + self.window

    @property
    def turn(self) -> int:
        """Stream index of the first retained token of the current turn (the open group)."""
        return self.end - (self.open.n_tokens if self.open else 0)

    def position(self, t: int) -> int:
        """Stored position of the window token with stream index ``t``."""
        return self.sink_tokens + t - self.base

    # Groups

    def open_group(self, key: Hashable) -> None:
        """Begins a group; window tokens appended from now on belong to it."""
        assert self.open is None, "close the open group first"
        self.open = Group(key)

    def close_group(self) -> None:
        """Ends the open group: from now on it leaves the window as a whole."""
        assert self.open is not None
        if self.open.n_tokens:
            self.closed.append(self.open)
        self.open = None

    def split_group(self, n_tokens: int, key: Hashable) -> None:
        """Closes the first ``n_tokens`` of the open group as a group of their own; the rest goes on under ``key``.

        So that several groups can be computed in one piece. Where memory seems to be must not depend on the turn.
        """
        assert self.open is not None
        assert 0 <= n_tokens <= self.open.n_tokens
        assert self.memory_position == "after_sinks"
        rest = self.open.n_tokens - n_tokens
        self.open.n_tokens = n_tokens
        self.close_group()
        self.open = Group(key, rest)

    # Room and eviction

    def room(self) -> int:
        """How many tokens can be appended before something has to leave."""
        if self.sinks < self.sink_tokens:
            return self.sink_tokens - self.sinks
        return self.window_room - self.window

    def evict(self) -> list[Gone]:
        """Frees slots of a full window: whole closed groups, oldest first, until ``evict_tokens`` are free.

        The open group is cut from its old end, and only when it is alone in the window.
        """
        assert self.room() == 0
        gone: list[Gone] = []
        while self.closed and self.room() < self.evict_tokens:
            group = self.closed.popleft()
            self.start += group.n_tokens
            gone.append(Gone(group.key, group.n_tokens, not group.cut))
        if self.room() == 0:
            assert self.open is not None, "window tokens always belong to a group"
            n = min(self.evict_tokens, self.open.n_tokens)
            self.open.n_tokens -= n
            self.open.cut = True
            self.start += n
            gone.append(Gone(self.open.key, n, False))
        return gone

    def plan(self, n: int) -> list[Hashable]:
        """Keys of the closed groups that will have left once ``n`` more tokens are appended. Changes nothing."""
        n -= min(n, self.sink_tokens - self.sinks)
        free = self.window_room - self.window
        leaving: list[Hashable] = []
        waiting = iter(self.closed)
        while n > free:
            n, free = n - free, 0
            while free < self.evict_tokens and (group := next(waiting, None)):
                free += group.n_tokens
                leaving.append(group.key)
            if not free:  # only the open group is left, and it is cut
                break
        return leaving

    # Pieces

    def append(self, n: int) -> Piece:
        """Takes room for ``n`` tokens (at most ``room()``) and tells where they go and what they attend to."""
        assert 0 < n <= self.room()
        if self.sinks < self.sink_tokens:
            first = self.sinks
            self.sinks += n
            return Piece(n, first, (Arc(first, n),), (Part(0, self.sinks, 0, 0),))
        assert self.open is not None, "open a group first"
        first = self.end
        self.end += n
        self.open.n_tokens += n
        return Piece(n, self.position(first), tuple(self._arcs(first, self.end)), self._parts())

    def retract(self, n: int) -> None:
        """Takes back the last ``n`` appended tokens, whose computation failed."""
        if self.open is None or self.open.n_tokens < n:
            self.sinks -= n
        else:
            self.end -= n
            self.open.n_tokens -= n

    def take_back(self, n_groups: int) -> int:
        """Takes back the newest closed groups, with no token of theirs among the sinks; returns how many tokens."""
        assert self.open is None, "close the open group first"
        n = sum(self.closed.pop().n_tokens for _ in range(n_groups))
        self.end -= n
        return n

    def memory_piece(self, done: int, n: int) -> Piece:
        """Tells where ``n`` tokens of recalled text go, after ``done`` of them, with only the sinks in front."""
        assert 0 < n <= self.memory_room - done
        assert self.sinks == self.sink_tokens, "memory needs the sinks in front of it"
        slot = self.sink_tokens + done
        parts = [Part(0, self.sink_tokens, 0, 0)] if self.sink_tokens else []
        parts.append(Part(self.sink_tokens, done + n, self.sink_tokens, 0))
        return Piece(n, slot, (Arc(slot, n),), tuple(parts))

    def rebase(self, limit: int, n: int) -> tuple[int, tuple[Arc, ...]]:
        """Lowers stored positions when ``n`` more tokens would pass ``limit``.

        Returns:
            By how many positions the keys in the returned arcs have to be turned back; 0 for nothing to do.
        """
        if self.position(self.end + n) <= limit or self.base == self.start:
            return 0, ()
        back = self.start - self.base
        self.base = self.start
        return back, self.window_arcs()

    def window_arcs(self) -> tuple[Arc, ...]:
        """Slots of the whole window, oldest token first."""
        return tuple(self._arcs(self.start, self.end))

    def _arcs(self, first: int, end: int) -> list[Arc]:
        """Slots of the window tokens with stream index ``first .. end-1``: one run, or two around the ring's end."""
        if first == end:
            return []
        origin, ring = self.sink_tokens + self.memory_room, self.window_room
        at = first % ring
        head = min(end - first, ring - at)
        arcs = [Arc(origin + at, head)]
        if head < end - first:
            arcs.append(Arc(origin, end - first - head))
        return arcs

    def _parts(self) -> tuple[Part, ...]:
        """What the current turn attends to, segment by segment, in storage order."""
        sink, m, start, turn = self.sink_tokens, self.memory, self.start, self.turn
        w, b0 = turn - start, self.position(turn)
        if self.memory_position == "before_turn":  # sink, window, memory, turn
            shifts = sink + w + m - b0, sink + m - b0, m
        else:  # sink, memory, window, turn
            shifts = sink + m + w - b0, sink + m + w - b0, 0
        parts: list[Part] = []
        if sink:
            parts.append(Part(0, sink, 0, shifts[0]))
        if m:
            parts.append(Part(sink, m, sink, shifts[1]))
        for first, end, shift in ((start, turn, shifts[2]), (turn, self.end, 0)):
            t = first
            for slot, length in self._arcs(first, end):
                parts.append(Part(slot, length, self.position(t), shift))
                t += length
        return tuple(_joined(parts))


def _joined(parts: list[Part]) -> list[Part]:
    """Joins neighbours that are one run in slots and in positions and share their shift."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            last
            and last.shift == part.shift
            and last.slot + last.length == part.slot
            and last.position + last.length == part.position
        ):
            joined[-1] = Part(last.slot, last.length + part.length, last.position, last.shift)
        else:
            joined.append(part)
    return joined
