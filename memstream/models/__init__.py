"""Where models come from: names, wheels, GGUF files, folders, the hub. Loads them; judges nothing about streaming.

Importing this package pulls in neither torch nor transformers; ``load_model`` does when it is first looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memstream.models.catalog import CATALOG, DEFAULT_EMBEDDER, DEFAULT_MODEL
from memstream.models.listing import ModelStatus, check_model, list_models
from memstream.models.wheels import find_embedder, pull

if TYPE_CHECKING:
    from memstream.models.load import LoadedModel, fingerprint_of, load_model, quiet_loading, read_config

__all__ = [
    "CATALOG",
    "DEFAULT_EMBEDDER",
    "DEFAULT_MODEL",
    "LoadedModel",
    "ModelStatus",
    "check_model",
    "find_embedder",
    "fingerprint_of",
    "list_models",
    "load_model",
    "pull",
    "quiet_loading",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "fingerprint_of", "load_model", "quiet_loading", "read_config"):
        from memstream.models import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
