"""Torch reference of ``ring_write`` and of the int8 form of keys and values; also the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127.0
LARGEST_SCALE = 65504.0  # of float16


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds vectors to int8 with one scale each.

    Args:
        x: [..., D].

    Returns:
        [..., D] int8 and [...] float16 scales; the rounding uses the scale as it is stored.
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=-1) / LEVELS).clamp(max=LARGEST_SCALE).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)  # all zeros, or too small to tell from it
    return (wide * inverse[..., None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


def dequantise(x: Tensor, scales: Tensor) -> Tensor:
    """What int8 vectors [..., D] with scales [...] stand for, in float32."""
    return x.float() * scales.float()[..., None]


def ring_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    rows: Tensor,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """See ``memstream.kernels.ring_write``."""
    for i, row in enumerate(rows.tolist()):
        where = slots[i].long()
        for side, scales, new in ((keys, key_scales, new_keys[i]), (values, value_scales, new_values[i])):
            if scales is None:
                side[row].index_copy_(1, where, new.to(side.dtype))
            else:
                levels, scale = quantise(new)
                side[row].index_copy_(1, where, levels)
                scales[row].index_copy_(1, where, scale)
