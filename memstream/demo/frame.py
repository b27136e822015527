"""The words of the small talk: frames of one user turn and one reply, with slots that share a vocabulary.

A frame's sentences have two slots or more, so that thousands of different ones can be made. No digits, nothing in the
first person, nothing a person would want to be remembered.
"""

from __future__ import annotations

from typing import NamedTuple


class Frame(NamedTuple):
    """One subject of small talk.

    Attributes:
        user: templates of the user's turn.
        reply: groups of templates; a reply takes one sentence of each group, in this order.
        slots: slot name -> the phrases that fit it. A name that ends in ``2`` takes another phrase of the same list.
    """

    user: tuple[str, ...]
    reply: tuple[tuple[str, ...], ...]
    slots: dict[str, tuple[str, ...]]


def phrases(text: str) -> tuple[str, ...]:
    """Splits a list at its commas."""
    return tuple(phrase.strip() for phrase in text.split(","))
