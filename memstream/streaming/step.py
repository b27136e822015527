"""One forward as the kernels see it: integer tables on the device, filled from pieces on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.layout import Piece

PARTS = 5  # sink, memory, and three: of window and turn, the ring's end cuts one in two


class Step:
    """A forward of n new tokens in each of B rows.

    All numbers lie in one int32 table per row, so that filling it is one copy to the device, and a captured graph finds
    the numbers of the next token where it found those of the last.

    Args:
        cache: where keys and values are written and read.
        ropes: the rotary embedding of each layer; equal ones are one object.
        rows: B.
        n: new tokens in each row.
        products: type of the queries, and so of attention's products; None: as they come.

    Attributes:
        tokens: [B, n] int64 on the device.
        rows: [B] int32, rows of the cache.
        positions: [B] int32, stored position of the first new token.
        parts: [B, PARTS, 4] int32, what they attend to; unused ones have length 0.
        slots: [B, n] int32, where they are written.
        position_ids: [B, n] int64, stored positions of all new tokens.
    """

    def __init__(
        self, cache: Cache, ropes: Sequence[Rope], *, rows: int, n: int, products: torch.dtype | None = None
    ) -> None:
        device = cache.keys[0].device
        self.cache, self.ropes, self.products = cache, ropes, products
        self._host = torch.zeros(rows, 2 + 4 * PARTS + 2 * n, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._table = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        self.rows, self.positions = self._table[:, 0], self._table[:, 1]
        self.parts = self._table[:, 2 : 2 + 4 * PARTS].view(rows, PARTS, 4)
        self.slots = self._table[:, 2 + 4 * PARTS : 2 + 4 * PARTS + n]
        self._ids = self._table[:, 2 + 4 * PARTS + n :]
        self._steps = torch.arange(n, device=device)
        self.tokens, self.position_ids = torch.empty(2, rows, n, dtype=torch.int64, device=device)
        dim = cache.keys[0].shape[-1]
        self._turns = {
            rope: torch.empty(2, rows, PARTS, dim, dtype=torch.float32, device=device) for rope in set(ropes)
        }
        self._angle = torch.empty(rows, PARTS, dim, dtype=torch.float64, device=device)
        self._buffers: dict[str, Tensor] = {}

    def fill(self, rows: Sequence[int], pieces: Sequence[Piece], tokens: Sequence[Sequence[int]]) -> None:
        """Writes the numbers of the next forward, and copies them to the device."""
        table = []
        for row, piece, ids in zip(rows, pieces, tokens, strict=True):
            assert len(piece.parts) <= PARTS
            parts = [number for part in piece.parts for number in part]
            slots = [slot for first, length in piece.writes for slot in range(first, first + length)]
            table.append([row, piece.position, *parts, *[0] * (4 * PARTS - len(parts)), *slots, *ids])
        self._host.copy_(torch.tensor(table, dtype=torch.int32))
        if self._table is not self._host:
            self._table.copy_(self._host)

    def prepare(self) -> None:
        """Derives on the device what a forward reads besides the table: ids, positions, turns."""
        self.tokens.copy_(self._ids)
        torch.add(self.positions[:, None], self._steps, out=self.position_ids)
        shifts = self.parts[..., 3:]
        for rope, (cos, sin) in self._turns.items():
            rope.turns(shifts, self._angle, cos, sin)

    def turns(self, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """How queries turn towards each part: cos [B, PARTS, D], sin [B, PARTS, D], partner [D]."""
        cos, sin = self._turns[rope]
        return cos, sin, rope.partner

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this step's own that every layer overwrites: made once, so it stays where it is."""
        found = self._buffers.get(name)
        if found is None:
            found = self._buffers[name] = torch.empty(*shape, dtype=dtype, device=self._table.device)
        assert found.shape == torch.Size(shape)
        return found
