"""Choosing the notes that go back into the cache: within a token budget, nothing twice, in the order of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from memstream.memory.query import is_question
from memstream.memory.summarizer import sentences
from memstream.report import Recalled
from memstream.stores.fulltext import query_terms

_PINNED_SHARE = 3  # pinned facts may take a third of the budget; what they leave goes to the other notes
_NEAR_DUPLICATE = 0.8  # share of the words of the shorter text that the longer one has too
_LEAST_SHARE = 0.2  # of the best score: weaker hits only distract

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """What one recall found.

    Attributes:
        notes: pinned facts first, the rest in chronological order.
        n_considered: number of memories searched.
        best_score: of the best candidate, whether it passed the gate or not; None without candidates.
        gated: True where there were candidates and none passed the gate.
    """

    notes: tuple[Recalled, ...] = ()
    n_considered: int = 0
    best_score: float | None = None
    gated: bool = False


def pack(
    pinned: Sequence[Recalled],
    found: Sequence[Recalled],
    *,
    max_notes: int,
    budget_tokens: int,
    count_tokens: CountTokens,
) -> tuple[Recalled, ...]:
    """Packs notes into ``budget_tokens``.

    Args:
        pinned: pinned facts, newest first; they do not count towards ``max_notes``.
        found: what passed the gate, best first.
        max_notes: the most notes besides the pinned ones.
        budget_tokens: room for all notes.
        count_tokens: number of tokens a note's text takes when it is rendered.
    """
    kept: list[_Note] = []
    room = budget_tokens // _PINNED_SHARE
    spent = 0
    for found_note in pinned:
        if spent >= room:
            break
        note = _Note(found_note, count_tokens(found_note.note))
        if spent + note.cost <= room:
            kept.append(note)
            spent += note.cost
    chosen: list[_Note] = []
    least = _LEAST_SHARE * max((found_note.why.score for found_note in found), default=0.0)
    for found_note in found:
        if len(chosen) == max_notes and not any(other.may_give_way for other in chosen):
            break
        if found_note.why.score < least:
            continue
        note = _Note(found_note)
        if any(found_note.id == other.note.id or note.says_the_same(other) for other in kept):
            continue
        twin = next((i for i, other in enumerate(chosen) if note.says_the_same(other)), None)
        if twin is not None and not note.is_better_than(chosen[twin]):
            continue
        if twin is None and len(chosen) == max_notes:
            continue
        freed = chosen[twin].cost if twin is not None else 0
        fitted = _fit(found_note, budget_tokens - spent + freed, count_tokens)
        if fitted is None:
            continue
        if twin is not None:
            del chosen[twin]
        chosen.append(_Note(*fitted))
        spent += fitted[1] - freed
    chosen.sort(key=lambda item: (item.note.time, int(item.note.id.partition(":")[2])))
    return tuple(item.note for item in (*kept, *chosen))


class _Note:
    """A note under consideration, with its words and cost in tokens."""

    def __init__(self, note: Recalled, cost: int = 0) -> None:
        self.note, self.cost = note, cost
        self._words = frozenset(query_terms(note.text, 1000))

    def says_the_same(self, other: _Note) -> bool:
        """True where the shorter text says hardly anything the longer one does not."""
        shorter = min(len(self._words), len(other._words))
        if shorter == 0:
            return self.note.text.strip() == other.note.text.strip()
        return len(self._words & other._words) >= _NEAR_DUPLICATE * shorter

    @property
    def may_give_way(self) -> bool:
        """True for a question, and for what the model said."""
        return is_question(self.note.text) or self.note.role == "assistant"

    def is_better_than(self, other: _Note) -> bool:
        """True where this tells what the other, which says the same, only asks, or is the model's repetition of."""
        mine, others = self.note, other.note
        source = mine.citation is not None or (mine.role != "assistant" and mine.time <= others.time)
        return not is_question(mine.text) and (is_question(others.text) or (others.role == "assistant" and source))


def _fit(note: Recalled, room: int, count_tokens: CountTokens) -> tuple[Recalled, int] | None:
    """The note and its cost if it fits; else its longest run of sentences that does, around the matched words."""
    cost = count_tokens(note.note)
    if cost <= room:
        return note, cost
    parts = sentences(note.text)
    if len(parts) < 2 or cost < room // 2:
        return None
    shorter = _best_run(note, parts, room, count_tokens)
    return None if shorter is None else (shorter, count_tokens(shorter.note))


def _best_run(note: Recalled, parts: Sequence[str], room: int, count_tokens: CountTokens) -> Recalled | None:
    """The run of neighbouring sentences with the most matched words, then the longest, that fits into ``room``."""
    terms = set(note.why.terms)
    best: tuple[int, int, Recalled] | None = None
    for start, stop in combinations(range(len(parts) + 1), 2):
        text = " ".join(parts[start:stop])
        value = (len(terms & set(query_terms(text, 1000))), len(text))
        if best is not None and value <= best[:2]:
            continue
        shorter = replace(note, text=text)
        if count_tokens(shorter.note) <= room:
            best = (*value, shorter)
    return None if best is None else best[2]
