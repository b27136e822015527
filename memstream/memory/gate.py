"""The least cosine that means something in an embedding space, from pairs that have nothing to do with each other."""

from __future__ import annotations

import numpy as np

from memstream.memory.embedder import Embedder, Embedders, embed
from memstream.memory.live_index import SearchIndex
from memstream.stores import vectors
from memstream.stores.sql import SqlStore

# Questions and statements on unrelated matters. They come with the code, not from the store, so that nobody's gate
# depends on what somebody else said.
_QUESTIONS = (
    "Where did I leave my keys?",
    "Which train goes to the harbour?",
    "How much flour does the bread need?",
    "What did the doctor say about the knee?",
    "When is the rent due?",
    "Who won the chess game yesterday?",
    "How do I reset the router?",
    "What colour should we paint the fence?",
    "Is there a way to return the shoes?",
    "Why does the engine make that noise?",
    "Which book were you reading?",
    "What time does the shop close?",
    "Can you explain how vaccines work?",
    "How are you doing today?",
    "What is the capital of Peru?",
    "Do you like jazz?",
)
_STATEMENTS = (
    "The meeting was moved to the third floor because of the noise.",
    "My sister keeps bees behind the old mill.",
    "Thanks, that is noted.",
    "The invoice number is 5521 and it was paid in May.",
    "It has been raining since we arrived at the lake.",
    "He learned the violin when he was six years old.",
    "Our cat refuses to eat anything but tuna.",
    "The update failed with an error about permissions.",
    "I usually take two spoons of sugar in my coffee.",
    "The museum shows paintings of the seventeenth century.",
    "She is allergic to penicillin.",
    "They planted tomatoes and beans along the wall.",
    "The parcel should reach Lisbon by Thursday.",
    "Prime numbers have exactly two divisors.",
    "Our team lost by a single point in the final.",
    "The ceiling lamp in the hall needs a new bulb.",
)
_QUANTILE = 0.99
_LEXICAL_GATE = -0.05  # without an embedder, two fifths of the words that were asked for let a memory in


def calibrate(embedder: Embedder) -> float:
    """The 99th percentile of the cosine (-1 to 1) over all unrelated question-statement pairs."""
    questions, statements = embed(embedder, _QUESTIONS), embed(embedder, _STATEMENTS)
    return float(np.quantile(questions @ statements.T, _QUANTILE))


class Gate:
    """The least cosine of a hit in the space that serves: as configured, as calibrated before, or calibrated now."""

    def __init__(self, store: SqlStore, index: SearchIndex, embedders: Embedders) -> None:
        self._store, self._index, self._embedders = store, index, embedders
        self._known: dict[int, float] = {}  # by space

    def value(self, configured: float | None) -> float:
        """The least cosine of a hit that holds half of the words that were asked for."""
        if not self._embedders:
            return _LEXICAL_GATE
        if configured is not None:
            return configured
        space = self._index.space
        if space is None:
            with self._store.read() as connection:
                space = vectors.find_space(connection)
            assert space is not None
        found = self._known.get(space.id, space.gate)
        if found is None:
            found = calibrate(self._embedders.of(space))
            with self._store.write() as connection:
                vectors.set_gate(connection, space.id, found)
        self._known[space.id] = found  # threads that come here at once find the same
        return found
