"""A row's whole state, in memory or as one safetensors file: filled slots, counters, ids, group marks, last logits.

Restoring it goes on bit for bit, without prefill. A snapshot belongs to one model and one cache shape; its fingerprint
says which, and nothing is restored into another.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from memstream.config import CacheConfig
from memstream.errors import StoreError
from memstream.streaming.cache import Cache
from memstream.streaming.layout import Group
from memstream.streaming.row import Row

FORMAT = "1"
State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and the plain data that goes with them
_COUNTERS = ("sinks", "memory", "start", "end", "base")


def fingerprint(model: str, cache: CacheConfig, dtype: torch.dtype) -> str:
    """Names what a snapshot can be restored into: weights, cache shape and type."""
    shape = f"{cache.total},{cache.sink_tokens},{cache.memory_tokens},{cache.evict_tokens},{cache.memory_position}"
    return f"{FORMAT}:{model}:{shape}:{dtype}"


def n_bytes(state: State) -> int:
    """Bytes of a state's tensors; a file takes a few thousand more."""
    return sum(tensor.nbytes for tensor in state[0].values())


def take(cache: Cache, row: Row) -> State:
    """Copies a row's state: tensors, and the plain data that goes with them. Group keys must be JSON values."""
    layout = row.layout
    tensors = cache.read(row.index, _filled(row))
    if row.logits is not None:
        tensors["logits"] = row.logits.clone()  # which may be a part of those of several rows
    tensors["sink_ids"] = torch.tensor(row.sink_ids, dtype=torch.int64)
    tensors["memory_ids"] = torch.tensor(row.memory_ids, dtype=torch.int64)
    tensors["window_ids"] = torch.tensor(list(row.window_ids), dtype=torch.int64)
    plain = {
        "counters": {name: getattr(layout, name) for name in _COUNTERS},
        "sink_tokens": layout.sink_tokens,
        "groups": [[group.key, group.n_tokens, group.cut] for group in layout.closed],
        "open": [layout.open.key, layout.open.n_tokens, layout.open.cut] if layout.open else None,
    }
    return tensors, plain


def put(cache: Cache, row: Row, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Puts a state into a fresh row of the same shape."""
    layout = row.layout
    assert layout.sink_tokens == plain["sink_tokens"], "admit the row with the snapshot's pinned tokens"
    for name in _COUNTERS:
        setattr(layout, name, plain["counters"][name])
    layout.closed = deque(Group(*group) for group in plain["groups"])
    layout.open = Group(*plain["open"]) if plain["open"] else None
    row.sink_ids = tensors["sink_ids"].tolist()
    row.memory_ids = tensors["memory_ids"].tolist()
    row.window_ids = deque(tensors["window_ids"].tolist())
    row.logits = tensors["logits"].to(cache.keys[0].device, copy=True) if "logits" in tensors else None
    cache.write(row.index, _filled(row), tensors)


def save(path: Path, tensors: dict[str, Tensor], plain: dict[str, Any], *, fingerprint: str) -> None:
    """Writes a state whole or not at all; the file is readable by its owner only.

    Raises:
        StoreError: the disk refused.
    """
    metadata = {"fingerprint": fingerprint, "state": json.dumps(plain)}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        os.chmod(partial, 0o600)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise StoreError(f"cannot write the snapshot {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, *, fingerprint: str) -> State | None:
    """Reads a state; None where the file is absent, damaged, or made for something else."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != fingerprint:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["state"])  # noqa: SIM118
    except (FileNotFoundError, safetensors.SafetensorError, KeyError, ValueError):
        return None


def _filled(row: Row) -> Sequence[tuple[int, int]]:
    """The row's filled runs of slots: sinks, memory, window in stream order."""
    layout = row.layout
    runs = [(0, layout.sinks), (layout.sink_tokens, layout.memory), *layout.window_arcs()]
    return [(slot, length) for slot, length in runs if length]
