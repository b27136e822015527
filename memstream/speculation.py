"""Speculative decoding: where a reply repeats what its row holds, several of its tokens are computed in one forward."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from memstream.batching import Batch
from memstream.streaming.draft import Acceptance, look_up, n_agreed
from memstream.streaming.row import Row


class Speculation:
    """Feeds the tokens of one conversation's replies, some of them before they are chosen.

    For greedy choices. Along with the token that was chosen go those that followed the same words before. Where the
    model would have chosen them too, they stay; the others are taken back at once. So the row holds what it would hold
    without, and perhaps the next tokens already.

    Args:
        batch: steps rows.

    Attributes:
        drafted: tokens of the latest reply that were guessed.
        accepted: those of them that the model chose too.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._acceptance = Acceptance()
        self._ahead: deque[tuple[int, Tensor]] = deque()  # tokens that will be chosen, and the logits after them
        self.drafted = self.accepted = 0

    def begin(self) -> None:
        """Begins a reply."""
        self._ahead.clear()
        self.drafted = self.accepted = 0

    def advance(self, row: Row, token: int, most: int) -> None:
        """Feeds the chosen token, the likeliest by the row's ``logits``, and renews them.

        Args:
            row: of the conversation.
            token: the token.
            most: tokens drafted at most; 0 drafts none.
        """
        if self._ahead:
            known, row.logits = self._ahead.popleft()
            assert known == token
            return
        draft = self._draft(row, token, most)
        logits = self._batch.step(row, token, draft)
        if len(logits) == 1:
            return
        accepted = n_agreed(draft, logits.argmax(dim=-1).tolist())
        engine = self._batch.engine
        engine.retract(row, len(draft) - accepted)
        engine.counts.add(tokens=accepted)
        row.logits = logits[0]
        self._ahead.extend(zip(draft[:accepted], logits[1:], strict=False))
        self._acceptance.note(len(draft), accepted)
        self.drafted += len(draft)
        self.accepted += accepted

    def end(self, row: Row) -> None:
        """Takes back what the reply did not come to say."""
        self._batch.engine.retract(row, len(self._ahead))
        self._ahead.clear()

    def _draft(self, row: Row, token: int, most: int) -> list[int]:
        most = min(most, self._batch.engine.spare(row))
        if most < 1 or not self._batch.steps_alone or not self._acceptance.drafts():
            return []
        return look_up([*row.sink_ids, *row.memory_ids, *row.window_ids, token], most)
