"""Triton kernel of ``segment_attention``: no mask and no rotated copy is stored, and decode reads a cached byte once.

The queries of all heads that share a kv head are packed into one tile. Part by part, the tile is turned in registers
and meets the part's keys with an online softmax. With few queries the keys are split over programs, whose results a
second kernel merges. Lengths, starts and turns are read from the device, so a captured launch serves every token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstream.kernels.dispatch import processors
from memstream.kernels.tiles import dot

LOG2_E = 1.4426950408889634
MOST_SPLITS = 64
MOST_REGISTERS = 255  # of a thread; left to itself, the assembler spills a few bytes to fit one more block


class Settings(NamedTuple):
    """Tile sizes and launch options."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def settings(dtype: torch.dtype, cache_dtype: torch.dtype, dim: int, packed: int) -> Settings:
    """What suits ``packed`` = n · H / K queries of one kv head: the largest tiles that no card has to spill.

    The limits of sm_80, sm_90 and sm_100 fall on the same tiles; docs/kernels.md has the table.
    """
    wide = triton.next_power_of_2(dim)
    int8 = cache_dtype == torch.int8
    if cache_dtype == torch.float32 != dtype:  # twice the bytes in shared memory
        return Settings(16 if packed <= 16 else 32, 32, 4 if packed <= 16 else 8, 2 if wide <= 128 else 1)
    if dtype == torch.float32:  # no tensor cores: products are unrolled, and small tiles fill the registers
        if wide <= 64:
            return Settings(16, 32, 4, 2)
        converted = cache_dtype != dtype
        return Settings(16, 16, 8 if converted or wide > 128 else 4, 1 if converted and wide > 128 else 2)
    if packed <= 16:
        return Settings(16, 32 if int8 and wide > 128 else 64, 4, 3 if wide <= 128 else 2)
    if wide <= 128:
        return Settings(64 if int8 or wide > 64 else 128, 64 if dim == wide else 32, 8, 2)
    return Settings(32, 32, 8, 2)


@triton.jit(do_not_specialize=["n", "table_stride"])
def attention_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    partial,
    tops,
    sums,
    rows,
    positions,
    parts,
    cos,
    sin,
    partner,
    sink_logits,
    n,
    table_stride,
    scaling,
    softcap,
    width,
    query_batch,
    query_head,
    query_token,
    cache_row,
    cache_head,
    scales_row,
    scales_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    INT8: tl.constexpr,
    HAS_WIDTH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """QUERIES packed queries of one kv head of one row, over one of SPLITS shares of the keys."""
    tile, split = tl.program_id(0), tl.program_id(2)
    batch, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    packed = tile * QUERIES + tl.arange(0, QUERIES)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    there = packed < n * GROUP
    first_token = tile * QUERIES // GROUP
    last_token = tl.minimum((tile * QUERIES + QUERIES - 1) // GROUP, n - 1)
    d = tl.arange(0, D_PADDED)
    inside = d < D

    source = (
        query + batch.to(tl.int64) * query_batch + head.to(tl.int64) * query_head + token.to(tl.int64) * query_token
    )
    mask = there[:, None] & inside[None, :]
    other = tl.load(partner + d, mask=inside, other=0)

    row = tl.load(rows + batch * table_stride).to(tl.int64)
    position = tl.load(positions + batch * table_stride)
    own_parts = parts + batch * table_stride
    key_base = keys + row * cache_row + kv_head.to(tl.int64) * cache_head
    value_base = values + row * cache_row + kv_head.to(tl.int64) * cache_head
    scale_base = row * scales_row + kv_head.to(tl.int64) * scales_head

    low, high = 0, 0
    if SPLITS > 1:
        whole = 0
        for p in range(PARTS):
            whole += tl.load(own_parts + 4 * p + 1)
        share = tl.cdiv(tl.cdiv(whole, SPLITS), KEYS) * KEYS
        low, high = split * share, tl.minimum(split * share + share, whole)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, D_PADDED], tl.float32)
    before = 0
    for p in range(PARTS):
        slot = tl.load(own_parts + 4 * p)
        length = tl.load(own_parts + 4 * p + 1)
        ahead = position + tl.load(own_parts + 4 * p + 3) - tl.load(own_parts + 4 * p + 2)
        # Key j is seen by token i when 0 <= ahead + i - j < width.
        start, end = 0, tl.minimum(length, ahead + last_token + 1)
        if HAS_WIDTH:
            start = tl.maximum(start, ahead + first_token - width + 1)
        if SPLITS > 1:
            start, end = tl.maximum(start, low - before), tl.minimum(end, high - before)
        if start < end:
            c = tl.load(cos + (batch * PARTS + p) * D + d, mask=inside, other=0.0)
            s = tl.load(sin + (batch * PARTS + p) * D + d, mask=inside, other=0.0)
            # Read anew for every part, from the nearest cache, and turned with its partners inside the registers.
            x = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
            y = tl.gather(x, tl.broadcast_to(other[None, :], [QUERIES, D_PADDED]), axis=1)
            turned = (x.to(tl.float32) * c[None, :] + y.to(tl.float32) * s[None, :]).to(query.dtype.element_ty)
            for j in range(start, end, KEYS):
                key = j + tl.arange(0, KEYS)
                here = key < end
                at = (slot + key).to(tl.int64)
                k = tl.load(key_base + at[None, :] * D + d[:, None], mask=here[None, :] & inside[:, None], other=0.0)
                if INT8:
                    k = k.to(tl.float32)
                score = dot(turned, k.to(query.dtype.element_ty), tl.zeros([QUERIES, KEYS], tl.float32)) * scaling
                if INT8:
                    score *= tl.load(key_scales + scale_base + at, mask=here, other=0.0).to(tl.float32)[None, :]
                if HAS_SOFTCAP:
                    score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
                distance = ahead + token[:, None] - key[None, :]
                seen = here[None, :] & (distance >= 0)
                if HAS_WIDTH:
                    seen = seen & (distance < width)
                score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
                new = tl.maximum(top, tl.max(score, axis=1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                weight = tl.exp2(score - safe[:, None])
                fade = tl.exp2(top - safe)
                total = total * fade + tl.sum(weight, axis=1)
                v = tl.load(value_base + at[:, None] * D + d[None, :], mask=here[:, None] & inside[None, :], other=0.0)
                if INT8:
                    v = v.to(tl.float32)
                    weight *= tl.load(value_scales + scale_base + at, mask=here, other=0.0).to(tl.float32)[None, :]
                weight = weight.to(query.dtype.element_ty)
                result = dot(weight, v.to(query.dtype.element_ty), result * fade[:, None])
                top = new
        before += length

    heads = KV_HEADS * GROUP
    place = (batch * n + token) * heads + head
    if SPLITS > 1:
        at_split = place.to(tl.int64) * SPLITS + split
        tl.store(tops + at_split, top, mask=there)
        tl.store(sums + at_split, total, mask=there)
        tl.store(partial + at_split[:, None] * D + d[None, :], result, mask=mask)
    else:
        if HAS_SINKS:
            extra = tl.load(sink_logits + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(top, extra)
            fade = tl.exp2(top - new)
            total = total * fade + tl.exp2(extra - new)
            result = result * fade[:, None]
        result = result / tl.where(there, total, 1.0)[:, None]
        tl.store(out + place.to(tl.int64)[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_kernel(
    partial,
    tops,
    sums,
    out,
    sink_logits,
    heads,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merges the shares of one query."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PADDED)
    inside = d < D
    top = tl.load(tops + place * SPLITS + split)
    highest = tl.max(top, axis=0)
    extra = 0.0
    if HAS_SINKS:
        extra = tl.load(sink_logits + place % heads).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, extra)
    fade = tl.exp2(top - highest)
    total = tl.sum(tl.load(sums + place * SPLITS + split) * fade, axis=0)
    if HAS_SINKS:
        total += tl.exp2(extra - highest)
    shares = tl.load(partial + (place * SPLITS + split)[:, None] * D + d[None, :], mask=inside[None, :], other=0.0)
    result = tl.sum(shares * fade[:, None], axis=0) / total
    tl.store(out + place * D + d, result.to(out.dtype.element_ty), mask=inside)


def splits(packed: int, batch: int, kv_heads: int, slots: int, keys: int, n_processors: int) -> int:
    """Over how many programs the keys of one tile are split: a power of two that fills the card.

    It depends on the cache's size, never on how full it is, so that a captured launch stays right.
    """
    if packed > 16:
        return 1
    wanted: int = triton.next_power_of_2(triton.cdiv(n_processors, batch * kv_heads))
    tiles: int = triton.next_power_of_2(triton.cdiv(slots, keys))
    return min(MOST_SPLITS, wanted, tiles)


class Plan(NamedTuple):
    """How one call is launched."""

    settings: Settings
    splits: int
    work_floats: int


def plan(query: Tensor, keys: Tensor) -> Plan:
    """Settings, splits, and room for the shares: of each, weighted values [D], their largest score and their sum."""
    batch, heads, n, dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    packed = n * heads // kv_heads
    chosen = settings(query.dtype, keys.dtype, dim, packed)
    shares = splits(packed, batch, kv_heads, slots, chosen.keys, processors(query.device))
    return Plan(chosen, shares, batch * n * heads * shares * (dim + 2) if shares > 1 else 0)


def launch(
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
    width: int | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    out: Tensor | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """See ``memstream.kernels.segment_attention``."""
    batch, heads, n, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    assert query.stride(3) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert parts.stride()[1:] == (4, 1)
    assert batch == 1 or rows.stride(0) == positions.stride(0) == parts.stride(0), "they must be views of one table"
    chosen, shares, work_floats = plan(query, keys)
    if out is None:
        out = torch.empty(batch, n, heads, dim, dtype=query.dtype, device=query.device)
    if work is None:
        work = torch.empty(work_floats, dtype=torch.float32, device=query.device)
    assert out.is_contiguous()
    assert work.numel() >= work_floats
    each = work_floats // (dim + 2)
    partial, tops, sums = work[: each * dim], work[each * dim : each * (dim + 1)], work[each * (dim + 1) :]
    padded = max(16, triton.next_power_of_2(dim))  # the least depth of a product
    scales = key_scales.stride() if key_scales is not None else (0, 0)
    attention_kernel[(triton.cdiv(n * group, chosen.queries), batch * kv_heads, shares)](
        query,
        keys,
        values,
        key_scales if key_scales is not None else keys,
        value_scales if value_scales is not None else values,
        out,
        partial,
        tops,
        sums,
        rows,
        positions,
        parts,
        cos,
        sin,
        partner,
        sink_logits if sink_logits is not None else cos,
        n,
        rows.stride(0),
        scaling,
        softcap if softcap is not None else 0.0,
        width if width is not None else 0,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        keys.stride(0),
        keys.stride(1),
        scales[0],
        scales[1],
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        D_PADDED=padded,
        PARTS=parts.shape[1],
        INT8=key_scales is not None,
        HAS_WIDTH=width is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sink_logits is not None,
        SPLITS=shares,
        QUERIES=chosen.queries,
        KEYS=chosen.keys,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        maxnreg=MOST_REGISTERS,
    )
    if shares > 1:
        merge_kernel[(batch * n * heads,)](
            partial,
            tops,
            sums,
            out,
            sink_logits if sink_logits is not None else cos,
            heads,
            D=dim,
            D_PADDED=padded,
            HAS_SINKS=sink_logits is not None,
            SPLITS=shares,
            num_warps=4,
        )
    return out
