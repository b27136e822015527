"""Endless scripted small talk, and the short answers to a person who tells something."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator

from memstream.demo import everyday, pastimes
from memstream.demo.frame import Frame

FRAMES = (*everyday.FRAMES, *pastimes.FRAMES)
REMEMBERED_SENTENCES = 30_000  # about 10,000 exchanges, half a million tokens
REDRAWS = 20

_SLOT = re.compile(r"{(\w+?)(2?)}")
_ACKNOWLEDGEMENTS = (
    "Thanks, I will remember that.",
    "Good to know, I will keep that in mind.",
    "All right, I have made a note of it.",
    "Thank you for telling me.",
    "Understood, I will not forget it.",
    "That is useful to know, thank you.",
    "Okay, noted for later.",
    "I see, thanks for letting me know.",
    "Great, I will keep it in mind.",
    "Thank you, I have written that down.",
)


def exchanges(seed: int) -> Iterator[tuple[str, str]]:
    """Yields small talk without end: a user turn and a reply, 30 to 80 tokens together.

    No exchange is like one of the latest 10,000, and a sentence that was used lately is drawn again. The text holds no
    digits, no personal statements, and no answer of ``facts``.

    Args:
        seed: the same seed gives the same exchanges.
    """
    chooser = random.Random(seed)
    recent = _Recent()
    order: list[Frame] = []
    while True:
        order = order or chooser.sample(FRAMES, len(FRAMES))
        frame = order.pop()
        drawn = _fill(frame, chooser)
        redraws = 0
        # All sentences at once can only be old while thousands of others are not, so this ends.
        while recent.all(drawn) or (recent.any(drawn) and redraws < REDRAWS):
            drawn = _fill(frame, chooser)
            redraws += 1
        recent.add(drawn)
        yield drawn[0], " ".join(drawn[1:])


def acknowledgements(seed: int) -> Iterator[str]:
    """Yields what an assistant says to a person who tells a fact: without end, never the same twice in a row."""
    chooser = random.Random(seed)
    last = ""
    while True:
        last = chooser.choice([text for text in _ACKNOWLEDGEMENTS if text != last])
        yield last


class _Recent:
    """The sentences used lately."""

    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._known: set[str] = set()

    def all(self, sentences: list[str]) -> bool:
        return self._known.issuperset(sentences)

    def any(self, sentences: list[str]) -> bool:
        return not self._known.isdisjoint(sentences)

    def add(self, sentences: list[str]) -> None:
        for sentence in sentences:
            if sentence not in self._known:
                self._known.add(sentence)
                self._order.append(sentence)
        while len(self._order) > REMEMBERED_SENTENCES:
            self._known.discard(self._order.popleft())


def _fill(frame: Frame, chooser: random.Random) -> list[str]:
    """The user's turn and the sentences of the reply, with one choice of words for all of them."""
    words: dict[str, str] = {}
    for name, phrases in frame.slots.items():
        words[name], words[name + "2"] = chooser.sample(phrases, 2)
    templates = [chooser.choice(frame.user), *(chooser.choice(group) for group in frame.reply)]
    return [_SLOT.sub(lambda match: words[match[1] + match[2]], template) for template in templates]
