"""Triton kernel of ``ring_write``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memstream.kernels.tiles import quantise

BLOCK_TOKENS = 16


@triton.jit(do_not_specialize=["n", "table_stride"])
def write_kernel(
    cache,
    scales,
    new,
    rows,
    slots,
    n,
    table_stride,
    cache_row,
    cache_head,
    scales_row,
    scales_head,
    new_batch,
    new_head,
    new_token,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK tokens of one kv head of one row: keys or values."""
    batch, head = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < n
    d = tl.arange(0, D_PADDED)
    mask = there[:, None] & (d < D)[None, :]
    source = new + batch.to(tl.int64) * new_batch + head.to(tl.int64) * new_head
    x = tl.load(source + token.to(tl.int64)[:, None] * new_token + d[None, :], mask=mask, other=0.0)
    row = tl.load(rows + batch * table_stride).to(tl.int64)
    slot = tl.load(slots + batch * table_stride + token, mask=there, other=0).to(tl.int64)
    target = cache + row * cache_row + head.to(tl.int64) * cache_head + slot[:, None] * D + d[None, :]
    if INT8:
        level, scale = quantise(x.to(tl.float32))
        tl.store(target, level.to(tl.int8), mask=mask)
        tl.store(scales + row * scales_row + head.to(tl.int64) * scales_head + slot, scale, mask=there)
    else:
        tl.store(target, x.to(cache.dtype.element_ty), mask=mask)


def launch(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    rows: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """See ``memstream.kernels.ring_write``."""
    batch, kv_heads, n, dim = new_keys.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert slots.stride(1) == 1
    assert batch == 1 or rows.stride(0) == slots.stride(0), "rows and slots must be views of one table"
    block = BLOCK_TOKENS if n > 1 else 1
    for side, scales, new in ((keys, key_scales, new_keys), (values, value_scales, new_values)):
        assert new.stride(3) == 1
        write_kernel[(triton.cdiv(n, block), batch, kv_heads)](
            side,
            scales if scales is not None else side,
            new,
            rows,
            slots,
            n,
            slots.stride(0),
            side.stride(0),
            side.stride(1),
            scales.stride(0) if scales is not None else 0,
            scales.stride(1) if scales is not None else 0,
            new.stride(0),
            new.stride(1),
            new.stride(2),
            D=dim,
            D_PADDED=triton.next_power_of_2(dim),
            INT8=scales is not None,
            BLOCK=block,
            num_warps=1 if n == 1 else 4,
        )
