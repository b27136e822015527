"""Position frames: by which angles a model's rotary embedding turns a vector that moves by some positions.

Angles are computed in float64 from the model's own frequencies. The attention scaling of YaRN and LongRoPE is already
in the stored keys and in the query, so it must not be applied again: turns are pure rotations.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """One rotary embedding of a model, as turns by whole positions, written out for all D components.

    Args:
        inv_freq: [R / 2] the model's frequencies, radians per position; empty for a layer without rotary embedding.
        dim: D, the head dimension; the first R components turn.
        interleaved: whether neighbouring components form pairs; otherwise d and d + R/2 do.

    Attributes:
        frequencies: [D] float64, 0 where nothing turns.
        sign: [D] float32, -1 for the first of a pair, 1 for the second.
        partner: [D] int64, the other component of each pair.
        turning: False where nothing turns at all.
    """

    def __init__(self, inv_freq: Tensor, dim: int, *, interleaved: bool = False) -> None:
        half, device = inv_freq.shape[0], inv_freq.device
        at = torch.arange(half, device=device)
        first, second = (2 * at, 2 * at + 1) if interleaved else (at, at + half)
        self.turning = half > 0
        self.frequencies = torch.zeros(dim, dtype=torch.float64, device=device)
        self.sign = torch.zeros(dim, dtype=torch.float32, device=device)
        self.partner = torch.arange(dim, device=device)
        for one, other, sign in ((first, second, -1.0), (second, first, 1.0)):
            self.frequencies[one] = inv_freq.detach().double()
            self.sign[one] = sign
            self.partner[one] = other

    def turns(self, positions: Tensor, angle: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Writes the turns by whole ``positions`` [..., 1] (negative: back) into ``cos`` and ``sin``, [..., D] float32.

        ``angle`` [..., D] float64 is overwritten. See ``memstream.kernels.rebase.rotate`` for what the tables mean.
        """
        torch.mul(self.frequencies, positions, out=angle)
        torch.cos(angle, out=cos)
        torch.sin(angle, out=sin).mul_(self.sign)

    def turn(self, positions: int) -> tuple[Tensor, Tensor, Tensor]:
        """The turn by some positions as what ``rotate`` takes: cos [D], sin [D], partner [D]."""
        cos, sin = torch.empty(2, *self.frequencies.shape, dtype=torch.float32, device=self.frequencies.device)
        self.turns(torch.tensor([positions], device=cos.device), torch.empty_like(self.frequencies), cos, sin)
        return cos, sin, self.partner
