"""Reading question and memory together: slower and better than comparing vectors, for the best few only."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from memstream.errors import ModelError, ModelNotFoundError
from memstream.memory.hits import Hit

_log = logging.getLogger(__name__)


class Reranker(Protocol):
    """Anything that judges how well texts answer a query. Called from several threads."""

    def score(self, query: str, texts: list[str]) -> ArrayLike:
        """Judges n texts: [n] numbers on any scale, the best text's the highest."""


def rerank(reranker: Reranker, query: str, hits: Sequence[Hit], n: int) -> list[Hit]:
    """The first ``n`` hits in the reranker's order, which they are marked with; the others after them, as they were.

    Raises:
        ModelError: what came back is not one finite number for each text.
    """
    read = list(hits[:n])
    texts = [hit.text for hit in read]
    scores = np.asarray(reranker.score(query, texts) if texts else [], dtype=np.float64)
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise ModelError(
            f"the reranker returned shape {list(scores.shape)} or a number that is not finite for {len(texts)} texts; "
            "it must give one score for each"
        )
    for hit, score in zip(read, scores.tolist(), strict=True):
        hit.rerank = score
    read.sort(key=lambda hit: -(hit.rerank or 0.0))  # stable: what it cannot tell apart stays in order
    return [*read, *hits[n:]]


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder with one output.

    Args:
        model: a folder, or a hub id such as ``cross-encoder/ms-marco-MiniLM-L6-v2``.
        device: where it runs.

    Raises:
        ModelNotFoundError: there is none, it cannot be reached within seconds, or it cannot be read.
        ModelError: it gives more than one number for a pair of texts.
    """

    def __init__(self, model: str | os.PathLike[str], *, device: str = "cpu") -> None:
        name = os.fspath(model)
        folder = Path(name).expanduser()
        local = folder.is_dir()
        if not local:
            _require(name)
        from sentence_transformers import CrossEncoder

        from memstream.models import quiet_loading

        _log.info("loading the reranker %s", name)
        try:
            with quiet_loading():
                self._model = CrossEncoder(str(folder) if local else name, device=device, local_files_only=local)
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFoundError(f"the reranker {name!r} cannot be read: {error}") from error
        if self._model.num_labels != 1:
            raise ModelError(
                f"{name!r} gives {self._model.num_labels} numbers for a pair of texts; a reranker must give one"
            )

    def score(self, query: str, texts: list[str]) -> ArrayLike:
        """Judges n texts: [n] float32, higher is better."""
        scores: ArrayLike = self._model.predict([(query, text) for text in texts], show_progress_bar=False)
        return scores


def _require(name: str) -> None:
    """Raises ModelNotFoundError unless a hub id is in the local cache, or the hub answers."""
    from memstream.models import hub

    try:
        hub.check_id(name)
        if hub.cached_commit(name, "main") is None:
            hub.require_network(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no reranker {name!r}: no such folder, and {str(error).partition(';')[0]}; give the folder of a "
            "sentence-transformers cross-encoder, or its hub id where the hub can be reached"
        ) from error
