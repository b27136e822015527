"""The chat model as a summariser, in a small cache of its own, for as long as nobody waits for a reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from memstream.config import CacheConfig, GenerationConfig
from memstream.engine import Engine
from memstream.memory import Turn
from memstream.memory.chunker import fair_share
from memstream.memory.summarizer import sentences
from memstream.streaming.generate import Decoding
from memstream.template import ChatTemplate

ASK = "Summarize this conversation in one or two short sentences. Keep all names and numbers."
CACHE_TOKENS = 768
STEP_TOKENS = 16  # computed at once: what a reply that comes in between may have to wait for
_LONGEST = GenerationConfig(max_new_tokens=64)
_POLL_S = 0.02


class ModelSummarizer:
    """Summarises exchanges with a model that others talk to. For one thread at a time.

    It computes a few tokens at once, and none while somebody waits for the model. Nothing of one summary is in the
    cache of the next.

    Args:
        engine: whose model it is; its steps and these take turns.
        template: renders what the model is asked.
        is_quiet: whether nobody talks to the model.

    Raises:
        ConfigError: the model allows no cache of this size.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, is_quiet: Callable[[], bool]) -> None:
        cache = CacheConfig(
            cache_tokens=min(CACHE_TOKENS, engine.config.total),
            memory_tokens=0,
            evict_tokens=1,
            chunk_tokens=STEP_TOKENS,
            kv_dtype=engine.config.kv_dtype,
        )
        self._engine = Engine(engine.model, cache, lock=engine.lock)
        self._template = template
        self._opening = template.opening(None)
        self._is_quiet = is_quiet
        self._stopped = threading.Event()

    @property
    def cache_bytes(self) -> int:
        """Bytes of its cache; they never change."""
        return self._engine.cache_bytes

    def __call__(self, turns: Sequence[Turn]) -> str:
        """A summary of turns in order; empty where it was stopped, or the model said no whole sentence."""
        if self._is_stopped():
            return ""
        row = self._engine.admit()
        try:
            row.layout.open_group(0)
            prompt = [*self._opening.tokens, *self._template.user(self._asked(turns), prefix=self._opening.user_prefix)]
            if self._engine.feed(row, prompt, cancelled=self._is_stopped) < len(prompt):
                return ""

            def logits() -> Tensor:
                assert row.logits is not None
                return row.logits

            decoding = Decoding(
                self._template.tokenizer,
                _LONGEST,
                stop_ids=self._template.stop_ids,
                logits=logits,
                advance=lambda token: self._engine.step([row], [token]),
                seen=lambda: row.window_ids,
                cancelled=self._is_stopped,
            )
            for _ in decoding:
                pass
        finally:
            self._engine.leave(row)
        if decoding.finish_reason == "cancelled":
            return ""
        said = sentences(decoding.text)
        return " ".join(said if decoding.finish_reason == "stop" else said[:-1])

    def _asked(self, turns: Sequence[Turn]) -> str:
        """The turns with who said them, the longest cut so that prompt and summary fit into the cache."""
        config, plain = self._engine.config, self._template.plain
        lines = [plain(f"{turn.role.capitalize()}: {' '.join(turn.text.split())}") for turn in turns]
        frame = len(self._template.user(ASK, prefix=self._opening.user_prefix)) + len(self._opening.tokens)
        room = config.total - frame - _LONGEST.max_new_tokens - config.evict_tokens - 2 * len(turns)
        share = fair_share([len(line) for line in lines], room)
        texts = [self._template.tokenizer.decode(line[:share], skip_special_tokens=True) for line in lines]
        return "\n".join((*texts, "", ASK))

    def stop(self) -> None:
        """Gives up what is being summarised, and everything after it."""
        self._stopped.set()

    def _is_stopped(self) -> bool:
        """Waits until nobody else needs the model, or until it is stopped."""
        while not self._is_quiet():
            if self._stopped.wait(_POLL_S):
                break
        return self._stopped.is_set()
