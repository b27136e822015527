"""Decoding a reply token by token: sampling, stop rules, and pieces of text that are whole characters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memstream.config import GenerationConfig
from memstream.report import FinishReason

_LONGEST_CHARACTER = 4  # tokens: one a byte of UTF-8; what is still broken then stays broken


class Sampler:
    """Chooses the next token through transformers' logits processors.

    Args:
        config: how to choose.
        processors: further logits processors of the caller; they see the window and the reply so far.
    """

    def __init__(self, config: GenerationConfig, processors: Sequence[Any] = ()) -> None:
        self._greedy = config.temperature == 0.0
        self._processors = LogitsProcessorList(processors)
        if config.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if not self._greedy:
            if config.temperature != 1.0:
                self._processors.append(TemperatureLogitsWarper(config.temperature))
            if config.top_k:
                self._processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(config.top_p))
        self._random = torch.Generator()
        if config.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(config.seed)

    def __call__(self, seen: Callable[[], Sequence[int]], logits: Tensor) -> int:
        """Chooses a token id from logits [V]; ``seen`` gives the ids of the window, only when a processor asks."""
        scores = logits[None]
        if self._processors:
            scores = self._processors(torch.tensor([list(seen())], device=logits.device), scores)
        if self._greedy:
            return int(scores[0].argmax())
        weights = torch.softmax(scores[0].float(), dim=-1).cpu()
        return int(torch.multinomial(weights, 1, generator=self._random))


class TextPieces:
    """Turns tokens into pieces of text that never end inside a character.

    A token may hold part of a UTF-8 character, and a tokenizer may write a token differently after another; so text
    is cut where decoding is stable.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text has been given out
        self._context = 0  # where decoding starts, so that a token is decoded after its neighbour

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        unfinished = text.endswith("\ufffd") and len(self._ids) - self._shown < _LONGEST_CHARACTER
        if (unfinished and not final) or len(text) <= len(known):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


class StopTexts:
    """Holds back text that may be the beginning of a stop text, and cuts at one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The text that can be given out now."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._release(min(found))
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        return self._release(len(self._held) - keep)

    def finish(self) -> str:
        """What was held back, once it is sure that no stop text follows."""
        return "" if self.hit else self._release(len(self._held))

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of ``stop`` that the held text ends with."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


class Decoding:
    """One reply while it is decoded; iterate over its pieces of text, then read the result.

    Args:
        tokenizer: of the model.
        config: sampling, stop rules, limits.
        stop_ids: token ids that end the reply.
        logits: gives the current logits [V].
        advance: feeds one token, after which ``logits`` is renewed.
        seen: ids of the window, for logits processors.
        cancelled: asked before each token.
        processors: further logits processors.

    Attributes:
        text: the reply so far.
        n_tokens: tokens fed so far.
        unsaid: True where the text lacks something of these tokens: a stop text cut it, or nobody took it.
        finish_reason: why it ended; ``cancelled`` until it has.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: GenerationConfig,
        *,
        stop_ids: frozenset[int],
        logits: Callable[[], Tensor],
        advance: Callable[[int], None],
        seen: Callable[[], Sequence[int]],
        cancelled: Callable[[], bool],
        processors: Sequence[Any] = (),
    ) -> None:
        self._config = config
        self._pieces = TextPieces(tokenizer)
        self._stop_ids = stop_ids
        self._logits, self._advance, self._seen, self._cancelled = logits, advance, seen, cancelled
        self._sampler = Sampler(config, processors)
        self.text = ""
        self.n_tokens = 0
        self.unsaid = False
        self.finish_reason: FinishReason = "cancelled"

    def __iter__(self) -> Iterator[str]:
        stops = StopTexts(self._config.stop)
        deadline = time.monotonic() + self._config.timeout_s if self._config.timeout_s is not None else None
        reason: FinishReason = "length"
        while self.n_tokens < self._config.max_new_tokens:
            if self._cancelled():
                reason = "cancelled"
                break
            if deadline is not None and time.monotonic() > deadline:
                reason = "timeout"
                break
            token = self._sampler(self._seen, self._logits())
            if token in self._stop_ids:
                reason = "stop"
                break
            self._advance(token)
            self.n_tokens += 1
            self.unsaid = True
            yield from self._give(stops.push(self._pieces.push(token)))
            if stops.hit:
                reason = "stop"
                break
        yield from self._give(stops.push(self._pieces.finish()) + stops.finish())
        self.unsaid = stops.hit
        self.finish_reason = reason

    def _give(self, text: str) -> Iterator[str]:
        if text:
            self.text += text
            yield text
