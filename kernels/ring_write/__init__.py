"""Writing new keys and values into their slots, in the cache's type."""

from __future__ import annotations

from torch import Tensor

from memstream.kernels.dispatch import triton_runs
from memstream.kernels.ring_write import reference
from memstream.kernels.ring_write.reference import dequantise, quantise

__all__ = ["dequantise", "quantise", "ring_write"]


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
    """Writes n new tokens of each of B rows into their slots, rounded to the cache's type.

    Args:
        keys: [R, K, C, D], one layer's keys.
        values: [R, K, C, D].
        new_keys: [B, K, n, D], already rotated to their stored positions.
        new_values: [B, K, n, D].
        rows: [B] int32, which of the R rows each one is; a view of one table with the other int32 tensors.
        slots: [B, n] int32, where each token goes; no slot twice.
        key_scales: [R, K, C] float16 where the cache is int8, else None.
        value_scales: [R, K, C] float16 where the cache is int8, else None.

    Raises:
        KernelUnavailableError: Triton was asked for and cannot run here.
    """
    if triton_runs(keys):
        from memstream.kernels.ring_write.kernel import launch as write
    else:
        write = reference.ring_write
    write(
        keys,
        values,
        new_keys,
        new_values,
        rows=rows,
        slots=slots,
        key_scales=key_scales,
        value_scales=value_scales,
    )
