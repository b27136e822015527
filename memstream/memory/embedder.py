"""Turning text into unit vectors. Neither torch nor sentence-transformers is imported before the first text."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memstream.errors import DimensionMismatchError, ModelNotFoundError, StoreError
from memstream.models import DEFAULT_EMBEDDER, find_embedder
from memstream.stores import vectors
from memstream.stores.base import Vectors
from memstream.stores.vectors import SpaceInfo

_log = logging.getLogger(__name__)
_BATCH = 8  # a query waits for at most one such batch of the background's


class Embedder(Protocol):
    """Anything that turns texts into vectors. Called from several threads.

    Attributes:
        name: for people.
        fingerprint: equal only where the vectors are interchangeable.
        dimension: of each vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: list[str]) -> Vectors:
        """Embeds n texts: float32 [n, dimension], rows of length 1."""


def embed(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """Embeds texts and checks what came back.

    Raises:
        DimensionMismatchError: vectors of another shape than promised.
        StoreError: vectors that are not finite or not of length 1.
    """
    matrix = np.asarray(embedder.embed(list(texts)), dtype=np.float32)
    if matrix.shape != (len(texts), embedder.dimension):
        raise DimensionMismatchError(
            f"{embedder.name} returned shape {list(matrix.shape)}; expected [{len(texts)}, {embedder.dimension}]"
        )
    lengths = np.linalg.norm(matrix, axis=1)
    if not np.isfinite(lengths).all() or (np.abs(lengths - 1.0) > 0.01).any():
        raise StoreError(f"{embedder.name} returned vectors that are not finite or not of length 1")
    return matrix


class Embedders:
    """The embedders a process has for one store: that of its vectors, and while it reindexes the next one too.

    Args:
        first: None searches words only.
    """

    def __init__(self, first: Embedder | None) -> None:
        self._known: dict[str, Embedder] = {} if first is None else {first.fingerprint: first}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, embedder: Embedder) -> None:
        """Knows one more."""
        self._known = {**self._known, embedder.fingerprint: embedder}

    def keep(self, embedder: Embedder) -> None:
        """Knows no other from now on."""
        self._known = {embedder.fingerprint: embedder}

    def of(self, space: SpaceInfo) -> Embedder:
        """The embedder whose vectors are in a space.

        Raises:
            DimensionMismatchError: this process has none such: the store was made, or made anew, with another.
        """
        found = self._known.get(space.fingerprint)
        if found is None:
            found = list(self._known.values())[-1]
            vectors.check_space(space, found.name, found.fingerprint, found.dimension)
        return found


class SentenceTransformerEmbedder:
    """A sentence-transformers folder on disk, all-MiniLM-L6-v2 by default; loaded at the first text.

    Args:
        folder: of the model; None finds the default one.
        device: where it runs.

    Raises:
        ModelNotFoundError: the folder holds no sentence-transformers model.
    """

    def __init__(self, folder: Path | None = None, *, device: str = "cpu") -> None:
        self._name = DEFAULT_EMBEDDER if folder is None else folder.name
        self._folder = find_embedder() if folder is None else folder
        self._device = device
        self._model: Any = None
        self._lock = threading.Lock()  # fast tokenizers cannot be used by two threads at once
        self._fingerprint: str | None = None
        try:
            pooling = json.loads((self._folder / "1_Pooling" / "config.json").read_text())
            self._dimension = int(pooling["word_embedding_dimension"])
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFoundError(f"{self._folder} is not a sentence-transformers model: {error}") from error

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self._name

    @property
    def dimension(self) -> int:
        """Of each vector."""
        return self._dimension

    @property
    def fingerprint(self) -> str:
        """Of weights, vocabulary and settings: 32 hexadecimal digits."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            for pattern in ("model*.safetensors", "pytorch_model*.bin", "*.json", "*/*.json", "vocab.txt"):
                for file in sorted(self._folder.glob(pattern)):
                    digest.update(f"{file.relative_to(self._folder)} {file.stat().st_size}\n".encode())
                    with file.open("rb") as opened:
                        while block := opened.read(1 << 20):
                            digest.update(block)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def embed(self, texts: list[str]) -> Vectors:
        """Embeds n texts: float32 [n, dimension], rows of length 1; what exceeds the model's length is not read."""
        parts = [self._embed_batch(texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)]
        return np.concatenate(parts) if parts else np.empty((0, self._dimension), dtype=np.float32)

    def _embed_batch(self, texts: list[str]) -> Vectors:
        with self._lock:
            if self._model is None:
                from sentence_transformers import SentenceTransformer

                from memstream.models import quiet_loading

                _log.info("loading the embedder %s", self.name)
                with quiet_loading():
                    self._model = SentenceTransformer(str(self._folder), device=self._device, local_files_only=True)
            matrix = self._model.encode(
                texts, batch_size=_BATCH, convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(matrix, dtype=np.float32)
