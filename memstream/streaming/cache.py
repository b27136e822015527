"""The fixed key/value storage: allocated once, never grown, never moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cache:
    """Keys and values of all rows and layers.

    Bytes = 2 · L · K · D · C · itemsize · R, allocated here and never again.

    Args:
        shapes: (K, D) of each layer: kv heads and head dimension.
        rows: conversations that fit at once, R.
        cache_tokens: slots per row, C.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        *,
        rows: int,
        cache_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for kv_heads, dim in shapes:
            for side in (self.keys, self.values):
                side.append(torch.zeros(rows, kv_heads, cache_tokens, dim, dtype=dtype, device=device))

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, all rows."""
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values))

    def poison(self, row: int, slot: int, length: int) -> None:
        """Fills freed slots with NaN, so that a test sees any read of them."""
        for side in (*self.keys, *self.values):
            side[row, :, slot : slot + length] = torch.nan

    def read(self, row: int, slots: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """Copies the tokens in runs of slots (slot, length): ``keys.0`` ... [K, n, D]."""
        return {
            f"{name}.{layer}": torch.cat([t[row, :, slot : slot + length] for slot, length in slots], dim=1)
            for name, side in (("keys", self.keys), ("values", self.values))
            for layer, t in enumerate(side)
        }

    def write(self, row: int, slots: Sequence[tuple[int, int]], tokens: dict[str, Tensor]) -> None:
        """Puts back what ``read`` returned."""
        for name, side in (("keys", self.keys), ("values", self.values)):
            for layer, t in enumerate(side):
                done = 0
                for slot, length in slots:
                    t[row, :, slot : slot + length] = tokens[f"{name}.{layer}"][:, done : done + length]
                    done += length
