"""An endless conversation in a fixed key/value cache that remembers, for any Hugging Face causal language model.

Names are resolved when first used (PEP 562): importing ``memstream`` imports none of torch, transformers, triton,
faiss, sqlalchemy and sentence_transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstream.agent import Agent
    from memstream.config import CacheConfig, GenerationConfig, RecallConfig
    from memstream.errors import (
        BusyError,
        CapacityError,
        ConfigError,
        ConversationBusyError,
        DimensionMismatchError,
        InputError,
        KernelUnavailableError,
        MemstreamError,
        MissingExtraError,
        ModelError,
        ModelNotFoundError,
        OverloadedError,
        ReplayError,
        StoreCorruptError,
        StoreError,
        StoreVersionError,
        UnsupportedModelError,
    )
    from memstream.replay import Replay, ReplayConfig
    from memstream.report import (
        Citation,
        EngineState,
        Evicted,
        ForgetReceipt,
        Recalled,
        Reply,
        Timings,
        ToolCall,
        Usage,
        Why,
    )
    from memstream.session import Session
    from memstream.tools import Tool

__version__ = "0.1.0"

_HOMES = {
    "memstream.agent": ("Agent",),
    "memstream.config": ("CacheConfig", "GenerationConfig", "RecallConfig"),
    "memstream.errors": (
        "BusyError",
        "CapacityError",
        "ConfigError",
        "ConversationBusyError",
        "DimensionMismatchError",
        "InputError",
        "KernelUnavailableError",
        "MemstreamError",
        "MissingExtraError",
        "ModelError",
        "ModelNotFoundError",
        "OverloadedError",
        "ReplayError",
        "StoreCorruptError",
        "StoreError",
        "StoreVersionError",
        "UnsupportedModelError",
    ),
    "memstream.replay": ("Replay", "ReplayConfig"),
    "memstream.report": (
        "Citation",
        "EngineState",
        "Evicted",
        "ForgetReceipt",
        "Recalled",
        "Reply",
        "Timings",
        "ToolCall",
        "Usage",
        "Why",
    ),
    "memstream.session": ("Session",),
    "memstream.tools": ("Tool",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "BusyError",
    "CacheConfig",
    "CapacityError",
    "Citation",
    "ConfigError",
    "ConversationBusyError",
    "DimensionMismatchError",
    "EngineState",
    "Evicted",
    "ForgetReceipt",
    "GenerationConfig",
    "InputError",
    "KernelUnavailableError",
    "MemstreamError",
    "MissingExtraError",
    "ModelError",
    "ModelNotFoundError",
    "OverloadedError",
    "RecallConfig",
    "Recalled",
    "Replay",
    "ReplayConfig",
    "ReplayError",
    "Reply",
    "Session",
    "StoreCorruptError",
    "StoreError",
    "StoreVersionError",
    "Timings",
    "Tool",
    "ToolCall",
    "UnsupportedModelError",
    "Usage",
    "Why",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
