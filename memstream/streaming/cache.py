"""The fixed key/value storage: it never grows with what is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Cache:
    """Keys and values of all rows and layers.

    Bytes = 2 · L · K · C · R · (D · itemsize, plus 2 for the scale of int8), allocated here and by ``resize``.

    Args:
        shapes: (K, D) of each layer: kv heads and head dimension.
        rows: conversations that fit at once, R.
        cache_tokens: slots per row, C.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        keys: of each layer, [R, K, C, D].
        values: of each layer, [R, K, C, D].
        key_scales: of each layer, [R, K, C] float16 where the type is int8, else None.
        value_scales: likewise.
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
        self.dtype = dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_scales: list[Tensor | None] = []
        self.value_scales: list[Tensor | None] = []
        for kv_heads, dim in shapes:
            for side, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
                slots = (rows, kv_heads, cache_tokens)
                side.append(torch.zeros(*slots, dim, dtype=dtype, device=device))
                scales.append(torch.zeros(slots, dtype=torch.float16, device=device) if dtype == torch.int8 else None)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that is stored, each with rows, kv heads and slots as its first dimensions."""
        for name in ("keys", "values", "key_scales", "value_scales"):
            for layer, tensor in enumerate(getattr(self, name)):
                if tensor is not None:
                    yield f"{name}.{layer}", tensor

    @property
    def bytes(self) -> int:
        """Bytes of everything that is stored, all rows."""
        return sum(t.untyped_storage().nbytes() for _, t in self._tensors())

    def move(self, row: int, to: int) -> None:
        """Copies all of a row over another one."""
        for _, t in self._tensors():
            t[to] = t[row]

    def resize(self, rows: int) -> None:
        """Makes the storage anew with another number of rows, one tensor at a time; the first rows keep what they hold.

        Where memory runs out in the middle, every row that is both in the old and in the new storage is whole.
        """
        sides: tuple[list[Any], ...] = (self.keys, self.values, self.key_scales, self.value_scales)
        for side in sides:
            for layer, old in enumerate(side):
                if old is not None and len(old) != rows:
                    new, kept = old.new_zeros(rows, *old.shape[1:]), min(rows, len(old))
                    new[:kept] = old[:kept]
                    side[layer] = new

    def poison(self, row: int, slot: int, length: int) -> None:
        """Fills freed slots with NaN, so that a test sees any read of them; int8 ones through their scales."""
        for _, t in self._tensors():
            if t.dtype != torch.int8:
                t[row, :, slot : slot + length] = torch.nan

    def read(self, row: int, slots: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """Copies the tokens in runs of slots (slot, length): ``keys.0`` ... [K, n, D]."""
        return {
            name: torch.cat([t[row, :, slot : slot + length] for slot, length in slots], dim=1)
            for name, t in self._tensors()
        }

    def write(self, row: int, slots: Sequence[tuple[int, int]], tokens: dict[str, Tensor]) -> None:
        """Puts back what ``read`` returned."""
        for name, t in self._tensors():
            done = 0
            for slot, length in slots:
                t[row, :, slot : slot + length] = tokens[name][:, done : done + length]
                done += length
