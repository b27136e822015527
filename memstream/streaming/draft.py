"""Guesses at the next tokens of a text that repeats itself, and whether guessing pays: integers only.

Source: prompt lookup decoding (Saxena 2023), which drafts what followed an earlier occurrence of the latest tokens.
Deviations: the longest match counts, a draft is no longer than it, and goes on into itself.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence

LEAST_MATCH = 3  # tokens that must have occurred before
MOST_MATCH = 16  # longer ones are as good
_CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"

LEAST_ACCEPTED = 0.3  # share of the counted tokens below which drafting costs more than it brings
COUNTED = 64  # latest drafted tokens
JUDGED_FROM = 16  # so many of them
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 1024  # tokens decoded plainly before drafting is tried again


def look_up(ids: Sequence[int], most: int) -> list[int]:
    """Drafts what follows ``ids``: what followed the latest of the longest earlier occurrences of their end.

    The more of it occurred before, the surer is what followed: a draft has as many tokens as the match.

    Args:
        ids: of a text, the newest last.
        most: tokens drafted at most.

    Returns:
        The draft, empty where the end never occurred before.
    """
    text = array("I", ids).tobytes().decode(_CODEC, "surrogatepass")  # a character a token: strings are searched fast
    at, matched = len(text), 0
    for n in range(LEAST_MATCH, min(MOST_MATCH, len(text) - 1) + 1):
        found = text.rfind(text[-n:], 0, at + matched if matched else len(text) - 1)
        if found < 0:
            break
        at, matched = found, n
    following = list(ids[at + matched :])
    for i in range(min(most, matched) - len(following)):
        following.append(following[i])
    return following[: min(most, matched)]


def n_agreed(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many drafted tokens, from the first on, are those that were chosen at their places."""
    return next((i for i, (one, other) in enumerate(zip(draft, chosen, strict=False)) if one != other), len(draft))


class Acceptance:
    """Whether drafting pays, by the share of the latest drafted tokens that the model chose too.

    Below ``LEAST_ACCEPTED`` it is off for a pause, and is then tried anew. The pause doubles each time in a row that it
    comes to this again.
    """

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=COUNTED)
        self._pause = SHORTEST_PAUSE
        self._left = 0  # tokens of the pause

    def drafts(self) -> bool:
        """Whether to draft along with the next token; asked once for each that is computed."""
        if self._left:
            self._left -= 1
            return False
        return True

    def note(self, drafted: int, accepted: int) -> None:
        """Counts a draft, and how many of its tokens were chosen."""
        self._latest.extend([True] * accepted + [False] * (drafted - accepted))
        if len(self._latest) < JUDGED_FROM:
            return
        if sum(self._latest) >= LEAST_ACCEPTED * len(self._latest):
            self._pause = SHORTEST_PAUSE
            return
        self._latest.clear()
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
