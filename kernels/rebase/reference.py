"""Torch reference of ``rotate`` and ``rebase``; also the CPU path."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from memstream.kernels.ring_write.reference import dequantise, quantise


def rotate(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> Tensor:
    """Turns vectors by one rotary angle per pair of components: ``x[d] cos[d] + x[partner[d]] sin[d]``.

    Whole, partial and interleaved rotary embeddings differ only in these three tables.

    Args:
        x: [..., D].
        cos: [D] float32; 1 where nothing turns.
        sin: [D] float32, negative for the first of a pair; 0 where nothing turns.
        partner: [D], the other component of the pair, or the component itself.

    Returns:
        A new tensor, [..., D] of x's type; the turning itself is done in float32.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.index_select(-1, partner), sin).to(x.dtype)


def rebase(
    keys: Tensor,
    scales: Tensor | None,
    row: int,
    arcs: Iterable[tuple[int, int]],
    cos: Tensor,
    sin: Tensor,
    partner: Tensor,
) -> None:
    """See ``memstream.kernels.rebase``."""
    for slot, length in arcs:
        run = keys[row, :, slot : slot + length]
        if scales is None:
            run.copy_(rotate(run, cos, sin, partner))
        else:
            run_scales = scales[row, :, slot : slot + length]
            turned, turned_scales = quantise(rotate(dequantise(run, run_scales), cos, sin, partner))
            run.copy_(turned)
            run_scales.copy_(turned_scales)
