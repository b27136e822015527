"""Position frames: by which angles a model's rotary embedding turns a vector that moves by some positions.

Angles are computed in float64 from the model's own frequencies. The attention scaling of YaRN and LongRoPE is already
in the stored keys and in the query, so it must not be applied again: turns are pure rotations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memstream.kernels.rebase import rotate


class Rope:
    """One rotary embedding of a model, as turns by whole positions.

    Args:
        inv_freq: [R / 2] the model's frequencies, radians per position.
        interleaved: whether neighbouring components form pairs (see ``rotate``).
    """

    def __init__(self, inv_freq: Tensor, *, interleaved: bool = False) -> None:
        self.inv_freq = inv_freq.detach().to(torch.float64)
        self.interleaved = interleaved

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of a turn by ``positions`` (negative: back), each [R / 2] float32."""
        angle = self.inv_freq * positions
        return angle.cos().float(), angle.sin().float()


class Turns:
    """Turns of one forward, each computed once for all layers that share a rotary embedding."""

    def __init__(self) -> None:
        self._angles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, rope: Rope | None, positions: int) -> Tensor:
        """Rotates x [..., D] by ``positions``; a layer without rotary embedding (None) leaves it as it is."""
        if rope is None:
            return x
        key = id(rope), positions
        if key not in self._angles:
            self._angles[key] = rope.angles(positions)
        cos, sin = self._angles[key]
        return rotate(x, cos, sin, interleaved=rope.interleaved)
