"""Torch reference of ``segment_attention``; also the CPU path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Parts = Sequence[tuple[int, int, int, int]]


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: Parts,
    *,
    position: int,
    turned: Callable[[Tensor, int], Tensor],
    scaling: float,
    width: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attends n queries of one row to runs of its slots, each through its own rotation of the query.

    A key at stored position k is seen by a query at position b through a part with shift d when
    ``0 <= b + d - k < width``: that is causality, and the band of a sliding layer, in one rule.
    Slots outside the parts are never read.

    Args:
        query: [H, n, D], rotated to positions ``position .. position+n-1``.
        keys: [K, C, D], one row of one layer; the piece's own keys are already in their slots.
        values: [K, C, D].
        parts: runs (slot, length, stored position of the first, shift).
        position: position of the first query.
        turned: rotates a query tensor [H, n, D] by a number of positions.
        scaling: factor on the scores.
        width: positions a sliding layer sees, itself included; None: all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sink_logits: [H], one learned extra logit per head that takes part in the softmax and has no value.

    Returns:
        [H, n, D] of the query's type.
    """
    heads, n, dim = query.shape
    kv_heads = keys.shape[0]
    rows = heads // kv_heads * n  # grouped heads share their keys: they become rows of one product
    queries: dict[int, Tensor] = {}
    scores, seen = [], []
    for slot, length, first, shift in parts:
        nearest, farthest = position + shift - (first + length - 1), position + n - 1 + shift - first
        if width is not None and nearest >= width:
            continue
        seen.append((slot, length))
        if shift not in queries:
            q = query if shift == 0 else turned(query, shift)
            queries[shift] = (q.float() * scaling).reshape(kv_heads, rows, dim)
        score = queries[shift] @ keys[:, slot : slot + length].float().transpose(1, 2)
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if nearest < 0 or (width is not None and farthest >= width):
            at = torch.arange(n, device=query.device)[:, None] + (position + shift - first)
            distance = at - torch.arange(length, device=query.device)
            hidden = distance < 0 if width is None else (distance < 0) | (distance >= width)
            score.view(kv_heads, -1, n, length).masked_fill_(hidden, -torch.inf)
        scores.append(score)
    if sink_logits is not None:
        extra = sink_logits.float().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        scores.append(extra.reshape(kv_heads, rows, 1))
    weights = torch.softmax(torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0], dim=-1)
    out = torch.zeros(kv_heads, rows, dim, dtype=torch.float32, device=query.device)
    done = 0
    for slot, length in seen:
        out.baddbmm_(weights[..., done : done + length], values[:, slot : slot + length].float())
        done += length
    return out.view(heads, n, dim).to(query.dtype)
