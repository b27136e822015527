"""What is asked: the words that carry meaning, the dates, whose words are meant, and the texts to embed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from memstream.memory.dates import Span, find_dates
from memstream.memory.embedder import Embedder, embed
from memstream.stores import fulltext
from memstream.stores.base import Vectors

_MAX_TERMS = 32
_CONTEXT_WEIGHT = 0.15  # of an earlier turn, halved for each turn further back,
_CONTEXT_WEIGHT_ALONE = 0.5  # or where the newest one says hardly anything itself
_WORD = re.compile(r"\w+(?:['’]\w+)?")
_MINE = re.compile(r"\b(?:i|i'm|i've|me|my|mine|myself|we|our|us)\b", re.IGNORECASE)
_YOURS = re.compile(r"\b(?:did|do|have|had|were|are|would|could|can) you\b|\byour\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Query:
    """One question to the memory.

    Attributes:
        terms: words (as ``fulltext.words`` makes them) and their weight: 1 in the newest turn, less in earlier ones.
        newest: the terms of the newest turn, its dates aside.
        texts: the turns, newest first, and
        weights: what each of them counts.
        undated: the newest turn without the dates it names.
        dates: what these dates stand for.
        roles: ``user`` for a question about what I said, ``assistant`` for one about what you said.
    """

    terms: dict[str, float]
    newest: frozenset[str]
    texts: tuple[str, ...]
    weights: tuple[float, ...]
    undated: str
    dates: tuple[Span, ...]
    roles: frozenset[str]

    def embed(self, embedder: Embedder, common: set[str]) -> Vectors:
        """Two unit vectors [2, d]: of the whole question, for the gate, and of what tells memories apart, for ranking.

        Args:
            embedder: called once, for all texts.
            common: terms that are all over the scope, such as the names of the speakers; they and the dates are left
                out of the second vector.
        """
        bare = _without(self.undated, common) if common else self.undated
        different = bare != self.texts[0] and bool(fulltext.query_terms(bare, 1))
        matrix = embed(embedder, (*self.texts, bare) if different else self.texts)
        weights = np.array(self.weights, dtype=np.float32)
        whole = weights @ matrix[: len(weights)]
        distinct = whole + weights[0] * (matrix[-1] - matrix[0]) if different else whole
        both = np.stack([whole, distinct])
        lengths = np.linalg.norm(both, axis=1, keepdims=True)
        return np.asarray(both / np.maximum(lengths, 1e-6), dtype=np.float32)


def make_query(query_turns: Sequence[str], *, today: date, oldest: date) -> Query | None:
    """Weighs the latest turns, newest last: the newest counts fully, earlier ones the more the less it says itself.

    Args:
        query_turns: what was said, newest last.
        today: the day of the question, from which its relative dates count.
        oldest: the day of the oldest memory, for dates without a year.

    Returns:
        None where nothing was said.
    """
    texts = [text for text in query_turns if text.strip()][::-1]
    if not texts:
        return None
    dates, undated = find_dates(texts[0], today=today, oldest=oldest)
    newest = fulltext.query_terms(undated, _MAX_TERMS)
    weight = _CONTEXT_WEIGHT if len(newest) >= 2 else _CONTEXT_WEIGHT_ALONE
    terms = dict.fromkeys(newest, 1.0)
    weights = [1.0]
    for text in texts[1:]:
        context = [term for term in fulltext.query_terms(text, _MAX_TERMS) if term not in terms]
        for term in context[: _MAX_TERMS - len(terms)]:
            terms[term] = weight / len(context)  # a long turn must not drown the newest one
        weights.append(weight)
        weight /= 2
    roles = {"user"} if _MINE.search(texts[0]) else set()
    if _YOURS.search(texts[0]):
        roles = {"assistant"}
    return Query(terms, frozenset(newest), tuple(texts), tuple(weights), undated, tuple(dates), frozenset(roles))


def is_question(text: str) -> bool:
    """True for a text that only asks."""
    return text.rstrip().rstrip("\"')").endswith(("?", "？"))


def _without(text: str, common: set[str]) -> str:
    """A text without some words."""
    left = _WORD.sub(lambda match: "" if common & set(fulltext.words(match[0])) else match[0], text)
    return " ".join(left.split())
