"""Extractive summaries: whole sentences of what left the window, nothing invented. And what a model invented."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from memstream.memory.chunker import MAX_PIECES, estimated_pieces
from memstream.stores.fulltext import STOP_WORDS, query_terms, words
from memstream.stores.rows import Turn

Summarizer = Callable[[Sequence[Turn]], str]  # of turns in order, to a key to them

# After a full stop, unless it ends an initial or a title: "J.", "Dr.", "Mrs."
SENTENCE_END = r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)\s+|(?<=[。！？])"
_ENDS = re.compile(SENTENCE_END + r"|\n+")
_INSIDE = re.compile(r"(?<=[\w,;:)] )[^\W\d_][\w-]+(?:['’]\w+)?")  # a word that no sentence begins with
_NUMBER = re.compile(r"\w*\d\w*")
_NAMED_WEIGHT = 2.0  # of a name or a number: what is asked for most often
_QUESTION_WEIGHT = 0.5
_PARTS = 3  # a part of a sentence that is too long takes a third of the room

_SPELLED = """
    two three four five six seven eight nine ten eleven twelve dozen twenty thirty forty fifty hundred thousand million
    billion
"""
_NUMBER_WORDS = frozenset(_SPELLED.split())
# With which a sentence about a conversation begins.
_TELLING = """
    assistant both conversation discussion everyone neither nobody people person several somebody someone speaker
    speakers summary talk user
"""
_BEGINNINGS = STOP_WORDS | frozenset(_TELLING.split())


def sentences(text: str) -> list[str]:
    """The sentences of a text, trimmed; a point inside a word does not end one."""
    parts = (part.strip() for part in _ENDS.split(text))
    return [part for part in parts if part]


def summarise(texts: Sequence[str], max_pieces: int = MAX_PIECES - 2) -> str:
    """Picks sentences until the embedder's length is full, and keeps them in their order.

    Each time the one is picked that says most, for its length, of what none before it says. A word says more the rarer
    it is among the sentences, a name or a number twice as much; a question says half of what a statement does. A
    sentence that cannot fit is taken in parts.
    """
    candidates = [part for text in texts for sentence in sentences(text) for part in _parts(sentence, max_pieces)]
    terms = [set(query_terms(part, limit=1000)) for part in candidates]
    costs = [_cost(part) for part in candidates]
    n_with = Counter(term for found in terms for term in found)
    named = {term for part in candidates for term in _named(part)}
    weights = {
        term: math.log(1 + len(candidates) / n) * (_NAMED_WEIGHT if term in named else 1.0)
        for term, n in n_with.items()
    }
    said: set[str] = set()

    def value(i: int) -> float:
        fresh = sum(weights[term] for term in sorted(terms[i] - said))
        return fresh * (_QUESTION_WEIGHT if candidates[i].endswith(("?", "？")) else 1.0) / math.sqrt(costs[i])

    kept: list[int] = []
    left = max_pieces
    waiting = [(-value(i), i) for i in range(len(candidates)) if terms[i]]
    heapq.heapify(waiting)
    while waiting:
        known, i = heapq.heappop(waiting)
        now = -value(i)
        if known < now < 0:  # some of it has been said since it was weighed
            heapq.heappush(waiting, (now, i))
        elif now < 0 and costs[i] <= left:
            kept.append(i)
            left -= costs[i]
            said |= terms[i]
    return " ".join(candidates[i] for i in sorted(kept))


def invented(summary: str, sources: Iterable[str]) -> list[str]:
    """The numbers and the capitalised names of a summary that none of its sources says, as it writes them.

    A capital that begins a sentence may be no name: such a word counts too, unless it is one of those with which people
    tell of a conversation.
    """
    known = {word for source in sources for word in words(source)}
    found: list[str] = []
    for sentence in sentences(summary):
        for place, match in enumerate(re.finditer(r"[^\W_]+", sentence)):
            word = match[0]
            folded = words(word)
            if known.issuperset(folded) or not folded:
                continue
            number = any(char.isdigit() for char in word) or folded[0] in _NUMBER_WORDS
            telling = word == "I" or (place == 0 and folded[0] in _BEGINNINGS)
            if number or (word[0].isupper() and not telling):
                found.append(word)
    return found


def names(sentence: str) -> list[str]:
    """The words with a capital that do not begin the sentence."""
    return [word for word in _INSIDE.findall(sentence) if word[0].isupper()]


def _named(part: str) -> Iterator[str]:
    """The terms of names and numbers in a sentence."""
    for word in (*names(part), *_NUMBER.findall(part)):
        yield from query_terms(word)


def _parts(sentence: str, room: int) -> list[str]:
    """A sentence that fits into ``room`` pieces, or runs of its words (where there are none: of its characters)."""
    if _cost(sentence) <= room:
        return [sentence]
    most = max(1, room // _PARTS)
    parts: list[str] = []
    run: list[str] = []
    left = most
    pieces = (word[i : i + most] for word in sentence.split() for i in range(0, len(word), most))
    for piece in pieces:
        cost = estimated_pieces(piece)
        if cost > left:
            parts.append(" ".join(run))
            run, left = [], most
        run.append(piece)
        left -= cost
    return [*parts, " ".join(run)]


def _cost(text: str) -> int:
    return sum(estimated_pieces(word) for word in text.split())
