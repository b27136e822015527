"""Extractive summaries: whole sentences of what left the window, nothing invented."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from memstream.memory.chunker import MAX_PIECES, estimated_pieces
from memstream.stores.fulltext import query_terms

# After a full stop, unless it ends an initial or a title: "J.", "Dr.", "Mrs."
SENTENCE_END = r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)\s+|(?<=[。！？])"
_ENDS = re.compile(SENTENCE_END + r"|\n+")


def sentences(text: str) -> list[str]:
    """The sentences of a text, trimmed; a point inside a word does not end one."""
    parts = (part.strip() for part in _ENDS.split(text))
    return [part for part in parts if part]


def summarise(texts: Sequence[str], max_pieces: int = MAX_PIECES - 2) -> str:
    """Picks the sentences with the most informative words, in their order, until the embedder's length is full.

    A word tells more the rarer it is among the sentences; questions tell less than statements. Texts that fit whole
    are kept whole.
    """
    candidates = [sentence for text in texts for sentence in sentences(text)]
    terms = [query_terms(sentence, limit=1000) for sentence in candidates]
    n_with = Counter(term for found in terms for term in set(found))

    def weight(i: int) -> float:
        informative = sum(math.log(1 + len(candidates) / n_with[term]) for term in terms[i])
        question = 0.5 if candidates[i].endswith(("?", "？")) else 1.0
        return question * informative / math.sqrt(1 + len(terms[i]))

    kept: list[int] = []
    left = max_pieces
    for i in sorted(range(len(candidates)), key=lambda i: (-weight(i), i)):
        cost = sum(estimated_pieces(word) for word in candidates[i].split())
        if terms[i] and cost <= left:
            kept.append(i)
            left -= cost
    return " ".join(candidates[i] for i in sorted(kept))
