"""Turning vectors by a rotary position: stored keys on a rebase, queries towards a segment."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from memstream.kernels.dispatch import triton_runs
from memstream.kernels.rebase import reference
from memstream.kernels.rebase.reference import rotate

__all__ = ["rebase", "rotate"]


def rebase(
    keys: Tensor,
    scales: Tensor | None,
    row: int,
    arcs: Iterable[tuple[int, int]],
    cos: Tensor,
    sin: Tensor,
    partner: Tensor,
) -> None:
    """Turns stored keys in place, all by the same angle per pair of components.

    Args:
        keys: [R, K, C, D], one layer's keys.
        scales: [R, K, C] float16 where the keys are int8, else None.
        row: which of the R rows.
        arcs: runs of slots (slot, length) to turn.
        cos: [D] float32, see ``rotate``.
        sin: [D] float32.
        partner: [D].

    Raises:
        KernelUnavailableError: Triton was asked for and cannot run here.
    """
    if triton_runs(keys):
        from memstream.kernels.rebase.kernel import launch

        launch(keys, scales, row, arcs, cos, sin, partner)
    else:
        reference.rebase(keys, scales, row, arcs, cos, sin, partner)
