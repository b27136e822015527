"""One conversation's state in the cache: what is where, which tokens they are, and the last logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from memstream.streaming.layout import Gone, Layout


@dataclass(slots=True)
class Row:
    """State of one row.

    Attributes:
        index: which row of the cache.
        layout: where its tokens lie.
        sink_ids: token ids of the sinks.
        memory_ids: token ids of the memory segment.
        window_ids: token ids of the window, oldest first.
        logits: [V] float32 logits that follow the last token, or None before the first.
        gone: groups that have left since the owner last looked (see ``take_gone``).
    """

    index: int
    layout: Layout
    sink_ids: list[int] = field(default_factory=list)
    memory_ids: list[int] = field(default_factory=list)
    window_ids: deque[int] = field(default_factory=deque)
    logits: Tensor | None = None
    gone: list[Gone] = field(default_factory=list)

    def make_room(self) -> int:
        """Evicts from a full window, as the layout decides, and notes what left. Returns how many groups did."""
        if self.layout.room() > 0:
            return 0
        left = self.layout.evict()
        for gone in left:
            for _ in range(gone.n_tokens):
                self.window_ids.popleft()
        self.gone += left
        return len(left)

    def note(self, tokens: Sequence[int], position: int) -> None:
        """Notes the ids of a computed piece; a piece that starts among the sinks lies there whole."""
        if position < self.layout.sink_tokens and len(self.sink_ids) < self.layout.sink_tokens:
            self.sink_ids.extend(tokens)
        else:
            self.window_ids.extend(tokens)

    def take_gone(self) -> list[Gone]:
        """Groups that left the window since the last call, oldest first."""
        gone, self.gone = self.gone, []
        return gone
