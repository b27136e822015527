"""Torch reference of ``ring_write``; also the CPU path."""

from collections.abc import Iterable

from torch import Tensor


def ring_write(
    keys: Tensor, values: Tensor, row: int, arcs: Iterable[tuple[int, int]], new_keys: Tensor, new_values: Tensor
) -> None:
    """Writes n new tokens into runs of slots, rounding them to the cache's type.

    Args:
        keys: [R, K, C, D], one layer's keys.
        values: [R, K, C, D].
        row: which of the R rows.
        arcs: runs of slots (slot, length), n in all, in the order of the tokens.
        new_keys: [K, n, D], already rotated to their stored positions.
        new_values: [K, n, D].
    """
    done = 0
    for slot, length in arcs:
        keys[row, :, slot : slot + length] = new_keys[:, done : done + length]
        values[row, :, slot : slot + length] = new_values[:, done : done + length]
        done += length
