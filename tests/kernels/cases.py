"""Inputs as a real stream makes them, and the same answers worked out in float64 with complex numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memstream.kernels.ring_write import dequantise, quantise
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.layout import Layout, Piece
from memstream.streaming.step import Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def complex_rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Rotation as multiplication by e^(i angle), in float64: another way to the same thing."""
    half = angle.shape[-1]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    if interleaved:
        z = torch.complex(turned[..., 0::2].contiguous(), turned[..., 1::2].contiguous()) * torch.exp(1j * angle)
        out = torch.stack((z.real, z.imag), dim=-1).flatten(-2)
    else:
        z = torch.complex(turned[..., :half].contiguous(), turned[..., half:].contiguous()) * torch.exp(1j * angle)
        out = torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((out, rest), dim=-1)


def inv_freq(rotary: int) -> Tensor:
    """Frequencies of the usual kind, [rotary / 2]."""
    return (10000.0 ** -(torch.arange(0, rotary, 2, device=DEVICE) / max(rotary, 1))).double()


@dataclass(kw_only=True)
class Attention:
    """One call of ``segment_attention`` in a cache that a stream of B rows has filled; all else is poisoned.

    Row 0 is empty but for its piece; the others are past the ring's end, with memory, each with lengths of its own.
    """

    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    n: int = 1
    rows: int = 3
    rotary: int | None = None
    interleaved: bool = False
    width: int | None = None
    softcap: float | None = None
    sinks: bool = False
    before_turn: bool = True
    slots: int = 75
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        draw = random.Random(self.seed)
        rotary = self.dim if self.rotary is None else self.rotary
        self.inv_freq = inv_freq(rotary)
        self.rope = Rope(self.inv_freq, self.dim, interleaved=self.interleaved)
        kv_dtype = self.kv_dtype or self.dtype
        self.cache = Cache(
            [(self.kv_heads, self.dim)], rows=self.rows + 1, cache_tokens=self.slots, dtype=kv_dtype, device=DEVICE
        )
        for row in range(self.rows + 1):
            self.cache.poison(row, 0, self.slots)
        self.pieces = [self._piece(draw, row) for row in range(self.rows)]
        self.used = draw.sample(range(self.rows + 1), self.rows)
        for row, piece in zip(self.used, self.pieces, strict=True):
            for slot, length, _, _ in piece.parts:
                self._fill(row, slot, length)
        self.query = torch.randn(self.rows, self.n, self.heads, self.dim, device=DEVICE).to(self.dtype).transpose(1, 2)
        self.sink_logits = torch.randn(self.heads, device=DEVICE) if self.sinks else None
        self.step = Step(self.cache, [self.rope], rows=self.rows, n=self.n)
        self.step.fill(self.used, self.pieces, [[0] * self.n] * self.rows)
        self.step.prepare()

    def _piece(self, draw: random.Random, row: int) -> Piece:
        """The piece of n tokens that ends a stream of this row's own."""
        layout = Layout(
            cache_tokens=self.slots,
            sink_tokens=3,
            memory_tokens=9,
            evict_tokens=4,
            memory_position="before_turn" if self.before_turn else "after_sinks",
        )
        layout.append(3)
        tokens = 0 if row == 0 else draw.randint(70, 200)
        while tokens > 0:
            layout.open_group(tokens)
            for _ in range(draw.randint(1, 9)):
                if not layout.room():
                    layout.evict()
                layout.append(1)
                tokens -= 1
            layout.close_group()
        layout.memory = 0 if row == 0 else draw.randint(1, 9)
        layout.open_group("turn")
        before = 0 if row == 0 else draw.randint(0, 5)
        while layout.room() < before + self.n:
            layout.evict_tokens = before + self.n - layout.room() + layout.evict_tokens
            self._free(layout)
        if before:
            layout.append(before)
        return layout.append(self.n)

    def _free(self, layout: Layout) -> None:
        """Evicts closed groups until there is room for the piece."""
        while layout.closed and layout.room() < layout.evict_tokens:
            layout.start += layout.closed.popleft().n_tokens

    def _fill(self, row: int, slot: int, length: int) -> None:
        for side, scales in ((self.cache.keys, self.cache.key_scales), (self.cache.values, self.cache.value_scales)):
            new = torch.randn(self.kv_heads, length, self.dim, device=DEVICE)
            if scales[0] is None:
                side[0][row, :, slot : slot + length] = new.to(side[0].dtype)
            else:
                levels, scale = quantise(new)
                side[0][row, :, slot : slot + length] = levels
                scales[0][row, :, slot : slot + length] = scale

    @property
    def arguments(self) -> dict[str, Any]:
        """What both implementations take."""
        cos, sin, partner = self.step.turns(self.rope)
        return {
            "query": self.query,
            "keys": self.cache.keys[0],
            "values": self.cache.values[0],
            "rows": self.step.rows,
            "positions": self.step.positions,
            "parts": self.step.parts,
            "cos": cos,
            "sin": sin,
            "partner": partner,
            "scaling": 0.3,
            "width": self.width,
            "softcap": self.softcap,
            "sink_logits": self.sink_logits,
            "key_scales": self.cache.key_scales[0],
            "value_scales": self.cache.value_scales[0],
        }

    def _wide(self, side: list[Tensor], scales: list[Tensor | None], row: int) -> Tensor:
        wide = side[0][row] if scales[0] is None else dequantise(side[0][row], scales[0][row])
        return wide.double()

    def expected(self) -> Tensor:
        """[B, n, H, D] float64: every key of every part with its distance, in one plain softmax."""
        out = torch.empty(self.rows, self.n, self.heads, self.dim, dtype=torch.float64, device=DEVICE)
        for i, (row, piece) in enumerate(zip(self.used, self.pieces, strict=True)):
            keys = self._wide(self.cache.keys, self.cache.key_scales, row)
            values = self._wide(self.cache.values, self.cache.value_scales, row)
            for head in range(self.heads):
                kv = head * self.kv_heads // self.heads
                scores, seen = [], []
                for slot, length, first, shift in piece.parts:
                    q = complex_rotate(self.query[i, head], shift * self.inv_freq, self.interleaved)
                    score = q @ keys[kv, slot : slot + length].T * 0.3
                    if self.softcap is not None:
                        score = self.softcap * torch.tanh(score / self.softcap)
                    at = torch.arange(self.n, device=DEVICE)[:, None] + piece.position + shift - first
                    distance = at - torch.arange(length, device=DEVICE)
                    hidden = distance < 0
                    if self.width is not None:
                        hidden |= distance >= self.width
                    scores.append(score.masked_fill(hidden, -torch.inf))
                    seen.append(values[kv, slot : slot + length])
                if self.sink_logits is not None:
                    scores.append(self.sink_logits[head].double().expand(self.n, 1))
                    seen.append(torch.zeros(1, self.dim, dtype=torch.float64, device=DEVICE))
                out[i, :, head] = torch.softmax(torch.cat(scores, dim=1), dim=1) @ torch.cat(seen)
        return out
