"""Attention of new tokens over the segments of a fixed cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from memstream.kernels.dispatch import triton_runs
from memstream.kernels.segment_attention import flash, reference
from memstream.kernels.segment_attention.reference import Attend, Run, runs

__all__ = ["Run", "on_cpu", "runs", "segment_attention", "work_floats"]


def on_cpu(query: Tensor, softcap: float | None, key_scales: Tensor | None) -> Attend:
    """What attends where Triton does not run."""
    if flash.takes(query, softcap, key_scales):
        return partial(flash.attend, products=torch.float32 if query.dtype == torch.float16 else query.dtype)
    return reference.attend


def work_floats(query: Tensor, keys: Tensor) -> int:
    """How many float32 numbers ``segment_attention`` needs as ``work`` for tensors of these shapes."""
    if triton_runs(keys):
        from memstream.kernels.segment_attention.kernel import plan

        return plan(query, keys).work_floats
    return 0


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    parts: Tensor,
    cos: Tensor,
    sin: Tensor,
    partner: Tensor,
    scaling: float,
    width: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """Attends n queries in each of B rows to runs of their row's slots, each run through its own turn of the query.

    A key at stored position k is seen by a query at position b through a part with shift d when
    ``0 <= b + d - k < width``: that is causality, and the band of a sliding layer, in one rule.
    Slots outside the parts are never read. Rows may differ in everything but n.

    Args:
        query: [B, H, n, D], of row i rotated to positions ``positions[i] .. positions[i]+n-1``. On the CPU products
            are of its type; those of float16 in float32.
        keys: [R, K, C, D], one layer's keys; those of the new tokens are already in their slots.
        values: [R, K, C, D].
        rows: [B] int32, which of the R rows each one is; a view of one table with the other int32 tensors.
        positions: [B] int32, position of the first query.
        parts: [B, P, 4] int32, runs (slot, length, stored position of the first, shift); unused ones have length 0.
        cos: [B, P, D] float32, by which the query turns towards each part, see ``rebase.rotate``.
        sin: [B, P, D] float32.
        partner: [D].
        scaling: factor on the scores.
        width: positions a sliding layer sees, itself included; None: all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sink_logits: [H], one learned extra logit per head that takes part in the softmax and has no value.
        key_scales: [R, K, C] float16 where the cache is int8, else None.
        value_scales: [R, K, C] float16 where the cache is int8, else None.
        out: where the result goes; None: a new tensor.
        work: [``work_floats``] float32 for shares of a result; None: a new tensor.

    Returns:
        ``out``, [B, n, H, D] of the query's type, contiguous.

    Raises:
        KernelUnavailableError: Triton was asked for and cannot run here.
    """
    if triton_runs(keys):
        from memstream.kernels.segment_attention.kernel import launch as attend
    else:
        attend = partial(reference.segment_attention, attend=on_cpu(query, softcap, key_scales))
    return attend(
        query,
        keys,
        values,
        rows=rows,
        positions=positions,
        parts=parts,
        cos=cos,
        sin=sin,
        partner=partner,
        scaling=scaling,
        width=width,
        softcap=softcap,
        sink_logits=sink_logits,
        key_scales=key_scales,
        value_scales=value_scales,
        out=out,
        work=work,
    )
