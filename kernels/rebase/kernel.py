"""Triton kernel of ``rebase``."""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from memstream.kernels.tiles import quantise

BLOCK_SLOTS = 16


@triton.jit(do_not_specialize=["slot", "length", "row"])
def rebase_kernel(
    keys,
    scales,
    cos,
    sin,
    partner,
    slot,
    length,
    row,
    keys_row,
    keys_head,
    scales_row,
    scales_head,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turns BLOCK slots of one kv head in place; each vector is read whole before it is written."""
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, at = i < length, (slot + i).to(tl.int64)
    d = tl.arange(0, D_PADDED)
    inside = d < D
    mask = there[:, None] & inside[None, :]
    base = keys + row.to(tl.int64) * keys_row + head * keys_head + at[:, None] * D
    other = tl.load(partner + d, mask=inside, other=0)
    x = tl.load(base + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base + other[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + d, mask=inside, other=0.0)
    s = tl.load(sin + d, mask=inside, other=0.0)
    if INT8:
        where = scales + row.to(tl.int64) * scales_row + head * scales_head + at
        scale = tl.load(where, mask=there, other=0.0).to(tl.float32)
        x, y = x * scale[:, None], y * scale[:, None]
    turned = x * c[None, :] + y * s[None, :]
    tl.debug_barrier()  # a vector's two halves may be held by different threads: all reads come before all writes
    if INT8:
        level, new = quantise(turned)
        tl.store(base + d[None, :], level.to(tl.int8), mask=mask)
        tl.store(where, new, mask=there)
    else:
        tl.store(base + d[None, :], turned.to(keys.dtype.element_ty), mask=mask)


def launch(
    keys: Tensor,
    scales: Tensor | None,
    row: int,
    arcs: Iterable[tuple[int, int]],
    cos: Tensor,
    sin: Tensor,
    partner: Tensor,
) -> None:
    """See ``memstream.kernels.rebase``."""
    assert keys.is_contiguous()
    _, kv_heads, _, dim = keys.shape
    for slot, length in arcs:
        rebase_kernel[(triton.cdiv(length, BLOCK_SLOTS), kv_heads)](
            keys,
            scales if scales is not None else keys,
            cos,
            sin,
            partner,
            slot,
            length,
            row,
            keys.stride(0),
            keys.stride(1),
            scales.stride(0) if scales is not None else 0,
            scales.stride(1) if scales is not None else 0,
            D=dim,
            D_PADDED=triton.next_power_of_2(dim),
            INT8=scales is not None,
            BLOCK=BLOCK_SLOTS,
            num_warps=4,
            maxnreg=255,  # left to itself, the assembler spills a few bytes to fit one more block
        )
