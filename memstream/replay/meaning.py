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
from torch import Tensor

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
_AT_ONCE = 8  # messages in one forward
_SHAPES = (MAX_TOKENS // 2, MAX_TOKENS)  # tokens that a message is padded to


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

    The headers are computed once and stay in the cache, each in front of rows of its own. A forward has one of two
    shapes, whatever is read: so what else is read at the time cannot change a message's reading, in any arithmetic.

    Args:
        model: the model, which need not be idle: this has a small cache of its own.
        tokenizer: of the model.
    """

    def __init__(self, model: StreamingModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._headers = [self._ids(header) for header in HEADERS]
        n = max(map(len, self._headers)) + MAX_TOKENS
        size = CacheConfig(sink_tokens=0, memory_tokens=0, window_tokens=n, evict_tokens=1)
        self._cache = model.new_cache(size, rows=len(HEADERS) * _AT_ONCE)
        after = [
            self._forward([i], [header] * _AT_ONCE, at=0)[:, -1:] for i, header in enumerate(self._headers)
        ]  # [messages, 1, E] each: what predicts the first token of a message
        self._after_header = torch.cat(after)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def __call__(self, messages: Sequence[str]) -> NDArray[np.float64]:
        """Returns [n] float64 in nats per token: above 0 where a message fits FATAL ERROR better than INFO."""
        ids = [self._ids(message[: 32 * MAX_TOKENS])[:MAX_TOKENS] for message in messages]
        found = np.zeros(len(ids))
        shorter = 0
        for n in _SHAPES:
            of_shape = [i for i, tokens in enumerate(ids) if shorter < len(tokens) <= n]
            for at in range(0, len(of_shape), _AT_ONCE):
                chosen = of_shape[at : at + _AT_ONCE]
                found[chosen] = self._ratios([ids[i] for i in chosen], n)
            shorter = n
        return found

    def _ratios(self, messages: Sequence[Sequence[int]], n: int) -> NDArray[np.float64]:
        """One forward: up to ``_AT_ONCE`` messages of at most n tokens after each header, padded behind."""
        padded = [[*message, *[0] * (n - len(message))] for message in messages]
        padded += [[0] * n] * (_AT_ONCE - len(messages))
        hidden = self._forward(range(len(HEADERS)), padded * len(HEADERS))
        before = torch.cat((self._after_header, hidden[:, :-1]), dim=1).flatten(0, 1)
        targets = torch.tensor(padded * len(HEADERS), device=hidden.device)
        losses = self._model.token_nll(before, targets.flatten()).view(len(HEADERS), _AT_ONCE, n).cpu().double()
        fatal, info = losses
        return np.array([float((info[i] - fatal[i])[: len(message)].mean()) for i, message in enumerate(messages)])

    def _forward(self, headers: Sequence[int], tokens: Sequence[Sequence[int]], at: int | None = None) -> Tensor:
        """Hidden states [rows, n, E] of tokens after each of some headers, or of the headers themselves ``at`` 0."""
        n = len(tokens[0])
        rows: list[int] = []
        pieces: list[Piece] = []
        for header in headers:
            first = len(self._headers[header]) if at is None else at
            rows += range(header * _AT_ONCE, (header + 1) * _AT_ONCE)
            pieces += [Piece(n, first, (Arc(first, n),), (Part(0, first + n, 0, 0),))] * _AT_ONCE
        return self._model.forward(self._cache, rows, pieces, tokens)
