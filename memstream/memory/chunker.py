"""Windows of turns: the keys under which a conversation is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memstream.stores.rows import Turn

WINDOW_TURNS = 4
STRIDE_TURNS = 2
MAX_PIECES = 256  # word pieces all-MiniLM-L6-v2 reads, of which two are its own marks
_CHARS_PER_PIECE = 4  # ASCII words are cut about here at most; other letters are counted one by one


@dataclass(frozen=True, slots=True)
class Window:
    """A run of neighbouring turns of one conversation, as sequences inclusive, and the text to embed."""

    first: int
    last: int
    text: str


def windows(turns: Sequence[Turn]) -> list[Window]:
    """Windows of 4 turns, stride 2, that together hold every turn once at least; a short run is one window."""
    found: list[Window] = []
    start = 0
    while start < len(turns):
        part = turns[start : start + WINDOW_TURNS]
        found.append(Window(part[0].sequence, part[-1].sequence, window_text([turn.text for turn in part])))
        if start + WINDOW_TURNS >= len(turns):
            break
        start += STRIDE_TURNS
    return found


def window_text(texts: Sequence[str], max_pieces: int = MAX_PIECES - 2) -> str:
    """Joins texts, the longest cut first, so that the embedder reads something of each of them."""
    costs = [[estimated_pieces(word) for word in text.split()] for text in texts]
    share = fair_share([sum(cost) for cost in costs], max_pieces)
    return "\n".join(_cut(text, cost, share) for text, cost in zip(texts, costs, strict=True)).strip()


def estimated_pieces(word: str) -> int:
    """At least about as many word pieces as a tokenizer makes of a word."""
    if word.isascii() and word.isalnum():
        return (len(word) + _CHARS_PER_PIECE - 1) // _CHARS_PER_PIECE
    n_ascii = sum(char.isascii() and char.isalnum() for char in word)
    return (n_ascii + _CHARS_PER_PIECE - 1) // _CHARS_PER_PIECE + (len(word) - n_ascii)


def fair_share(needs: Sequence[int], room: int) -> int:
    """The most pieces any text may take so that all fit into ``room``; short texts leave their rest to long ones."""
    share, left = room, room
    for i, need in enumerate(sorted(needs)):
        share = left // (len(needs) - i)
        if need > share:
            return max(1, share)
        left -= need
    return room


def _cut(text: str, costs: Sequence[int], share: int) -> str:
    """The beginning of a text that takes at most ``share`` pieces, by whole words where there are any."""
    if sum(costs) <= share:
        return text
    kept: list[str] = []
    for word, cost in zip(text.split(), costs, strict=True):
        if cost > share:
            kept.append(word[:share])
            break
        share -= cost
        kept.append(word)
    return " ".join(kept)
