"""Torch reference of ``rotate`` and ``rebase``; also the CPU path."""

from collections.abc import Iterable

from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turns vectors by one rotary angle per frequency.

    Args:
        x: [..., D]; only the first R of the D components turn (partial rotary).
        cos: [R / 2] float32.
        sin: [R / 2] float32.
        interleaved: components (0, 1), (2, 3), ... form pairs; otherwise (0, R/2), (1, R/2 + 1), ...

    Returns:
        A new tensor, [..., D] of x's type; the turning itself is done in float32.
    """
    half = cos.shape[-1]
    out = x.clone()
    turned = x[..., : 2 * half].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out[..., 0 : 2 * half : 2] = a * cos - b * sin
        out[..., 1 : 2 * half : 2] = b * cos + a * sin
    else:
        a, b = turned[..., :half], turned[..., half:]
        out[..., :half] = a * cos - b * sin
        out[..., half : 2 * half] = b * cos + a * sin
    return out


def rebase(
    keys: Tensor, row: int, arcs: Iterable[tuple[int, int]], cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None:
    """Turns stored keys in place, all by the same angle per frequency.

    Args:
        keys: [R, K, C, D], one layer's keys.
        row: which of the R rows.
        arcs: runs of slots (slot, length) to turn.
        cos: [rotary / 2] float32.
        sin: [rotary / 2] float32.
        interleaved: see ``rotate``.
    """
    for slot, length in arcs:
        run = keys[row, :, slot : slot + length]
        run.copy_(rotate(run, cos, sin, interleaved=interleaved))
