"""How surprising each line is to a language model that has the lines before it in a fixed cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memstream.config import CacheConfig, ReplayConfig
from memstream.engine import Engine
from memstream.models import LoadedModel
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row


class Scorer:
    """Scores lines one after the other; each is a group that leaves the window as a whole.

    The first ``sinks`` lines are pinned at the start of the cache. Lines are computed many at a time, but an eviction
    happens exactly where it would if they came one at a time, so a score does not depend on ``piece_lines``.

    Args:
        loaded: the model and its tokenizer.
        replay: how many lines to pin, how many to compute at once, how long a line may be.
        cache: size of the cache; its memory has to be ``after_sinks``.

    Raises:
        ConfigError: the cache cannot pin so many lines, or it is larger than the model allows.
        UnsupportedModelError: the model cannot be streamed.
    """

    def __init__(self, loaded: LoadedModel, replay: ReplayConfig, cache: CacheConfig) -> None:
        self._pinned_line_tokens = replay.pinned_line_tokens(cache)
        self._tokenizer = loaded.tokenizer
        self._settings = replay
        self._engine = Engine(StreamingModel(loaded.model, fingerprint=loaded.fingerprint), cache)
        self._row: Row | None = None
        self._n_lines = 0
        self.n_tokens = 0  # computed
        self.n_evicted = 0  # lines that have left the window

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache, measured over its tensors."""
        cache = self._engine.cache
        return sum(tensor.numel() * tensor.element_size() for tensor in (*cache.keys, *cache.values))

    def score(self, messages: Sequence[str]) -> Iterator[float | None]:
        """Yields the mean negative log-likelihood (nats per token) of each line, in order.

        The first call must bring all the lines that are to be pinned. A line is None where nothing came before it to
        predict its only token.
        """
        lines = [self._tokens(message) for message in messages]
        if self._row is None and lines:
            n_pinned = self._settings.sinks
            lines[:n_pinned] = [line[: self._pinned_line_tokens] for line in lines[:n_pinned]]
            self._row = self._engine.admit(pinned_tokens=sum(map(len, lines[:n_pinned])))
        for start in range(0, len(lines), self._settings.piece_lines):
            yield from self._score_piece(lines[start : start + self._settings.piece_lines])

    def _tokens(self, message: str) -> list[int]:
        """Tokens of a line with its end; text that spells a control token is text."""
        head = message[: 32 * self._settings.max_line_tokens]  # no tokenizer is needed to see that the rest is too much
        ids: list[int] = self._tokenizer(head + "\n", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids[: self._settings.max_line_tokens]

    def _score_piece(self, lines: list[list[int]]) -> list[float | None]:
        assert self._row is not None
        row, layout = self._row, self._row.layout
        ids = [token for line in lines for token in line]
        ends = _ends(lines)
        scores: list[Tensor] = []
        done = line = 0
        layout.open_group(self._n_lines)
        while done < len(ids):
            row.make_room()
            n = min(layout.room(), len(ids) - done)
            scores.append(self._engine.score(row, ids[done : done + n]))
            done += n
            while line < len(ends) and ends[line] <= done:
                line += 1
                assert layout.open is not None
                after = done - ends[line - 1]
                layout.split_group(max(0, layout.open.n_tokens - after), self._n_lines + line)
        layout.close_group()
        self._n_lines += len(lines)
        self.n_tokens += len(ids)
        self.n_evicted += sum(gone.whole for gone in row.take_gone())
        found = torch.cat(scores).cpu()
        return [_mean(found[end - len(tokens) : end]) for end, tokens in zip(ends, lines, strict=True)]


def _ends(lines: Sequence[Sequence[int]]) -> list[int]:
    """Where each line ends when they follow each other."""
    ends, end = [], 0
    for line in lines:
        end += len(line)
        ends.append(end)
    return ends


def _mean(log_probabilities: Tensor) -> float | None:
    """Mean negative log-likelihood of [n] float32 log-probabilities; NaN, the start of the stream, is left out."""
    known = log_probabilities[~log_probabilities.isnan()]
    return -float(known.mean()) if len(known) else None
