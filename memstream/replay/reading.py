"""What the models find out about lines: loaded when the first line needs them, so that a wrong name is told at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memstream.config import CacheConfig, WeightsChoice
from memstream.errors import ModelNotFoundError
from memstream.memory.embedder import Embedder, SentenceTransformerEmbedder
from memstream.replay.config import ReplayConfig
from memstream.replay.templates import Template

if TYPE_CHECKING:
    from memstream.models import LoadedModel
    from memstream.replay.meaning import EmbeddedMeaning
    from memstream.replay.scorer import Reading, Scorer

_log = logging.getLogger(__name__)


class Readers:
    """The language model and the embedder.

    Args:
        model: name of the model, or one already loaded.
        device: where it runs.
        weights: the form it holds its weights in; see ``load_model``.
        config: how lines are read.
        cache: size of the key/value cache.
        embedder: None takes the default one, if it is installed.

    Attributes:
        loading_s: seconds that loading took.
        cache_bytes_start: bytes of the cache when it was made.
        scorer: None until it was needed.
        embedder: the embedder, once it was looked for; None where there is none.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str,
        weights: WeightsChoice,
        config: ReplayConfig,
        cache: CacheConfig,
        embedder: Embedder | None,
    ) -> None:
        self._model, self._device, self._weights = model, device, weights
        self._config, self._cache = config, cache
        self.embedder = embedder
        self._embedded: EmbeddedMeaning | None = None
        self.scorer: Scorer | None = None
        self.loading_s = 0.0
        self.cache_bytes_start = 0

    def score(self, readings: Sequence[Reading]) -> list[float | None]:
        """Surprise of each line, in order."""
        return list(self._loaded().score(readings)) if readings else []

    def understand(self, templates: Sequence[tuple[Template, str]]) -> None:
        """Works out the meaning of templates from their first lines."""
        if not templates:
            return
        scorer = self._loaded()
        messages = [message for _, message in templates]
        found = scorer.meaning(messages)
        if self._embedded is not None:
            found = found + self._embedded(messages)
        for (template, _), meaning in zip(templates, found, strict=True):
            template.meaning = round(float(meaning), 4)  # what batches change lies below

    def save(self, path: Path) -> None:
        """Writes the cache to a file."""
        assert self.scorer is not None
        self.scorer.save(path)

    def restore(self, path: Path) -> None:
        """Goes on with a cache from a file.

        Raises:
            ReplayError: the file does not fit this model and these settings.
        """
        self._loaded().restore(path)

    def _loaded(self) -> Scorer:
        if self.scorer is None:
            from memstream.models import load_model
            from memstream.replay.meaning import EmbeddedMeaning
            from memstream.replay.scorer import Scorer

            began = time.monotonic()
            model = self._model
            if isinstance(model, str):
                model = load_model(model, device=self._device, weights=self._weights)
            self.scorer = Scorer(model, self._config, self._cache)
            self.cache_bytes_start = self.scorer.cache_bytes
            if self.embedder is None:
                try:
                    self.embedder = SentenceTransformerEmbedder()
                except ModelNotFoundError as error:
                    _log.warning("without an embedder, the meaning of a line is the language model's alone: %s", error)
            if self.embedder is not None:
                self._embedded = EmbeddedMeaning(self.embedder)
            self.loading_s += time.monotonic() - began
        return self.scorer
