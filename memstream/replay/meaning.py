"""How much a message reads like a failure: once per template, by two models that know language, none that knows logs.

Two readings are added. The embedder's: how near the message is to general sentences about failures, less how near it
is to sentences about normal operation. The language model's: the log-likelihood ratio of the message after a header
that says FATAL ERROR and after one that says INFO, in nats per token. Neither is told to do anything by the message:
both only read it, so a message that gives orders changes nothing but its own score.

The sentences were written down before any labelled log was looked at (docs/adr/0021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memstream.config import CacheConfig
from memstream.memory.embedder import Embedder, embed
from memstream.replay.normalise import MASK, mask
from memstream.streaming.layout import Arc, Part, Piece
from memstream.streaming.model import StreamingModel

FAILURE = (
    "The operation failed with an error.",
    "A fatal error occurred and the program was aborted.",
    "The process crashed and terminated unexpectedly.",
    "The connection was lost or refused.",
    "The request timed out without a response.",
    "A hardware fault was detected.",
    "Data could not be read or written.",
    "Data was lost or is corrupted.",
    "The system ran out of memory or disk space.",
    "Access was denied.",
    "The service is unavailable.",
    "An unexpected exception was thrown.",
)
NORMAL = (
    "The operation completed successfully.",
    "The service was started.",
    "The connection was established.",
    "The request was received and served.",
    "Data was read, written and copied.",
    "The file was created or deleted as planned.",
    "The configuration was loaded.",
    "A user logged in.",
    "A scheduled job has finished.",
    "Routine status information and statistics.",
    "An error was detected and corrected automatically.",
    "Waiting for the next request.",
)
HEADERS = ("FATAL ERROR: ", "INFO: ")
MAX_TOKENS = 16  # of a message, after a header
_NEAREST = 3  # sentences of each kind that count
_AT_ONCE = 16  # messages in one forward


class EmbeddedMeaning:
    """The embedder's reading.

    Args:
        embedder: turns texts into unit vectors.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._failure, self._normal = embed(embedder, FAILURE), embed(embedder, NORMAL)

    def __call__(self, messages: Sequence[str]) -> NDArray[np.float64]:
        """Returns [n] float64, between -2 and 2: above 0 where a message is nearer to failures."""
        matrix = embed(self._embedder, [" ".join(mask(m).replace(MASK, " ").split()) or m for m in messages])
        nearest = [
            np.sort(matrix @ kind.T, axis=1)[:, -_NEAREST:].mean(axis=1) for kind in (self._failure, self._normal)
        ]
        return np.asarray(nearest[0] - nearest[1], dtype=np.float64)


class LikelihoodMeaning:
    """The language model's reading.

    Args:
        model: the model, which need not be idle: this has a small cache of its own.
        tokenizer: of the model.
    """

    def __init__(self, model: StreamingModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._headers = [self._ids(header) for header in HEADERS]
        self._n = max(map(len, self._headers)) + MAX_TOKENS
        size = CacheConfig(sink_tokens=0, memory_tokens=0, window_tokens=self._n, evict_tokens=1)
        self._cache = model.new_cache(size, rows=2 * _AT_ONCE)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def __call__(self, messages: Sequence[str]) -> NDArray[np.float64]:
        """Returns [n] float64 in nats per token: above 0 where a message fits FATAL ERROR better than INFO."""
        ids = [self._ids(message[: 32 * MAX_TOKENS])[:MAX_TOKENS] for message in messages]
        parts = [self._ratios(ids[at : at + _AT_ONCE]) for at in range(0, len(ids), _AT_ONCE)]
        return np.concatenate([np.empty(0), *parts])

    def _ratios(self, messages: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """One forward: every message after each header, in a row of its own, padded behind."""
        rows = [[*header, *message] for header in self._headers for message in messages]
        n = max(map(len, rows))
        piece = Piece(n, 0, (Arc(0, n),), (Part(0, n, 0, 0),))
        padded = [[*row, *[0] * (n - len(row))] for row in rows]
        hidden = self._model.forward(self._cache, range(len(rows)), [piece] * len(rows), padded)
        starts = [len(header) for header in self._headers for _ in messages]
        counted = [hidden[i, start - 1 : len(row) - 1] for i, (row, start) in enumerate(zip(rows, starts, strict=True))]
        targets = [token for row, start in zip(rows, starts, strict=True) for token in row[start:]]
        losses = self._model.token_nll(torch.cat(counted), torch.tensor(targets, device=hidden.device)).cpu()
        sizes = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        means = [float(part.double().mean()) if len(part) else 0.0 for part in torch.split(losses, sizes)]
        fatal, info = means[: len(messages)], means[len(messages) :]
        return np.subtract(info, fatal)
