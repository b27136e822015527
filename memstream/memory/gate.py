"""The least cosine that means something in an embedding space, from pairs that have nothing to do with each other."""

from __future__ import annotations

import numpy as np

from memstream.memory.embedder import Embedder, embed

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


def calibrate(embedder: Embedder) -> float:
    """The 99th percentile of the cosine (-1 to 1) over all unrelated question-statement pairs."""
    questions, statements = embed(embedder, _QUESTIONS), embed(embedder, _STATEMENTS)
    return float(np.quantile(questions @ statements.T, _QUANTILE))
