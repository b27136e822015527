"""How surprising each line is to a language model that has the lines before it in a fixed cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.errors import ReplayError
from memstream.models import LoadedModel
from memstream.replay.config import ReplayConfig
from memstream.replay.meaning import LikelihoodMeaning
from memstream.replay.normalise import MASK, mask
from memstream.streaming import snapshot
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row

_VARIABLE = "*"  # what the model reads in place of what varies


@dataclass(frozen=True, slots=True)
class Reading:
    """A message to read, and the dictionary of frequent templates to put into the memory segment before it, if any."""

    message: str
    dictionary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Token ids of a line, and which of them are the same in every line of its kind."""

    ids: list[int]
    constant: list[bool]


class Scorer:
    """Scores lines one after the other; each is a group that leaves the window as a whole.

    The first ``sinks`` lines are pinned at the start of the cache. Lines are computed many at a time, but an eviction
    happens exactly where it would if they came one at a time, so a score does not depend on ``piece_lines``.

    Args:
        loaded: the model and its tokenizer.
        replay: how many lines to pin, how many to compute at once, how long a line may be.
        cache: size of the cache; its memory has to be ``after_sinks``.

    Attributes:
        meaning: how much a message reads like a failure to the same model.

    Raises:
        ConfigError: the cache cannot pin so many lines, or it is larger than the model allows.
        UnsupportedModelError: the model cannot be streamed.
    """

    def __init__(self, loaded: LoadedModel, replay: ReplayConfig, cache: CacheConfig) -> None:
        self._pinned_line_tokens = replay.pinned_line_tokens(cache)
        self._tokenizer = loaded.tokenizer
        self._settings, self._cache = replay, cache
        model = StreamingModel(loaded.model, fingerprint=loaded.fingerprint)
        self._engine = Engine(model, cache)
        self.meaning = LikelihoodMeaning(model, loaded.tokenizer)
        self._row: Row | None = None
        self._n_lines = 0
        self.n_tokens = 0  # computed
        self.n_evicted = 0  # lines that have left the window

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache, measured over its tensors."""
        return self._engine.cache_bytes

    def score(self, readings: Sequence[Reading]) -> Iterator[float | None]:
        """Yields the surprise of each line, in order: mean negative log-likelihood in nats over its constant tokens.

        The first call must bring all the lines that are to be pinned. A line is None where it has no constant token,
        or nothing came before it to predict its only one.
        """
        lines = [self._tokens(reading.message) for reading in readings]
        if self._row is None and lines:
            n_pinned, most = self._settings.sinks, self._pinned_line_tokens
            lines[:n_pinned] = [_Tokens(line.ids[:most], line.constant[:most]) for line in lines[:n_pinned]]
            self._row = self._engine.admit(pinned_tokens=sum(len(line.ids) for line in lines[:n_pinned]))
        start = 0
        while start < len(lines):
            if readings[start].dictionary:
                self._set_dictionary(readings[start].dictionary)
            end = start + 1
            while end < len(lines) and end - start < self._settings.piece_lines and not readings[end].dictionary:
                end += 1
            yield from self._score_piece(lines[start:end])
            start = end

    def _set_dictionary(self, templates: Sequence[str]) -> None:
        assert self._row is not None
        row = self._row
        if row.layout.sinks < row.layout.sink_tokens:
            return  # the stream is younger than its sinks
        ids: list[int] = []
        for template in templates:
            ids += self._tokens(template).ids
        self.n_tokens += self._engine.set_memory(row, ids[: row.layout.memory_room])

    def _tokens(self, message: str) -> _Tokens:
        """Tokens of a line with its end; what varies is one character; text that spells a control token is text."""
        text, variable = "", []
        most = 32 * self._settings.max_line_tokens  # no tokenizer is needed to see that the rest is too much
        for i, part in enumerate(mask(message[:most]).split(MASK)):
            if i:
                variable.append(len(text))
                text += _VARIABLE
            text += part
        encoded = self._tokenizer(
            text + "\n", add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        at = set(variable)
        constant = [at.isdisjoint(range(first, last)) for first, last in encoded["offset_mapping"]]
        n = self._settings.max_line_tokens
        return _Tokens(encoded["input_ids"][:n], constant[:n])

    def _score_piece(self, lines: list[_Tokens]) -> list[float | None]:
        assert self._row is not None
        row, layout = self._row, self._row.layout
        ids = [token for line in lines for token in line.ids]
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
        return [
            _mean(found[end - len(tokens.ids) : end], tokens.constant) for end, tokens in zip(ends, lines, strict=True)
        ]

    def save(self, path: Path) -> None:
        """Writes the cache and all counts to a file, for ``restore``.

        Raises:
            StoreError: the disk refused.
        """
        assert self._row is not None
        tensors, plain = snapshot.take(self._engine.cache, self._row)
        counts = {"n_lines": self._n_lines, "n_tokens": self.n_tokens, "n_evicted": self.n_evicted}
        snapshot.save(path, tensors, {**plain, "counts": counts}, fingerprint=self._fingerprint())

    def restore(self, path: Path) -> None:
        """Goes on from what ``save`` wrote, bit for bit; nothing may have been scored yet.

        Raises:
            ReplayError: the file is absent, damaged, or was written with another model or cache.
        """
        found = snapshot.load(path, fingerprint=self._fingerprint())
        if found is None:
            raise ReplayError(
                f"{path} does not hold the cache of this model and these settings; give those of the earlier run, or "
                "another --state folder to start anew"
            )
        tensors, plain = found
        self._row = self._engine.admit(pinned_tokens=plain["sink_tokens"])
        snapshot.put(self._engine.cache, self._row, tensors, plain)
        counts = plain["counts"]
        self._n_lines, self.n_tokens, self.n_evicted = counts["n_lines"], counts["n_tokens"], counts["n_evicted"]

    def _fingerprint(self) -> str:
        model = self._engine.model
        return snapshot.fingerprint(model.fingerprint, self._cache, model.kv_dtype(self._cache))


def _ends(lines: Sequence[_Tokens]) -> list[int]:
    """Where each line ends when they follow each other."""
    ends, end = [], 0
    for line in lines:
        end += len(line.ids)
        ends.append(end)
    return ends


def _mean(log_probabilities: Tensor, constant: Sequence[bool]) -> float | None:
    """Mean negative log-likelihood of [n] float32 log-probabilities over the tokens that count.

    NaN, the start of the stream, is left out.
    """
    known = log_probabilities[torch.tensor(constant) & ~log_probabilities.isnan()]
    return -float(known.mean()) if len(known) else None
