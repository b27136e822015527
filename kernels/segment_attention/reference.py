"""Torch reference of ``segment_attention``; also the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstream.kernels.rebase.reference import rotate


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
    """See ``memstream.kernels.segment_attention``."""
    batch, heads, n, dim = query.shape
    if out is None:
        out = torch.empty(batch, n, heads, dim, dtype=query.dtype, device=query.device)
    numbers = zip(rows.tolist(), positions.tolist(), parts.tolist(), strict=True)
    for i, (row, position, own) in enumerate(numbers):
        turned: dict[int, Tensor] = {0: query[i]}
        for p, (_, length, _, shift) in enumerate(own):
            if length and shift not in turned:
                turned[shift] = rotate(turned[0], cos[i, p], sin[i, p], partner)
        attended = _row(
            turned,
            (keys[row], None if key_scales is None else key_scales[row]),
            (values[row], None if value_scales is None else value_scales[row]),
            own,
            position=position,
            scaling=scaling,
            width=width,
            softcap=softcap,
            sink_logits=sink_logits,
        )
        out[i] = attended.transpose(0, 1)
    return out


def _row(
    turned: dict[int, Tensor],
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    parts: Sequence[Sequence[int]],
    *,
    position: int,
    scaling: float,
    width: int | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """One row: queries [H, n, D] by shift, keys and values [K, C, D] with scales [K, C]. Returns [H, n, D] float32."""
    heads, n, dim = turned[0].shape
    device, kv_heads = turned[0].device, keys[0].shape[0]
    grouped = heads // kv_heads * n  # grouped heads share their keys: they become rows of one product
    queries = {shift: (q.float() * scaling).reshape(kv_heads, grouped, dim) for shift, q in turned.items()}
    scores, seen = [], []
    for slot, length, first, shift in parts:
        nearest, farthest = position + shift - (first + length - 1), position + n - 1 + shift - first
        if not length or (width is not None and nearest >= width):
            continue
        run = slice(slot, slot + length)
        seen.append(run)
        score = queries[shift] @ keys[0][:, run].float().transpose(1, 2)
        if keys[1] is not None:
            score *= keys[1][:, None, run].float()
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if nearest < 0 or (width is not None and farthest >= width):
            at = torch.arange(n, device=device)[:, None] + (position + shift - first)
            distance = at - torch.arange(length, device=device)
            hidden = distance < 0 if width is None else (distance < 0) | (distance >= width)
            score.view(kv_heads, -1, n, length).masked_fill_(hidden, -torch.inf)
        scores.append(score)
    if sink_logits is not None:
        extra = sink_logits.float().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
        scores.append(extra.reshape(kv_heads, grouped, 1))
    weights = torch.softmax(torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0], dim=-1)
    out = torch.zeros(kv_heads, grouped, dim, dtype=torch.float32, device=device)
    done = 0
    for run in seen:
        length = run.stop - run.start
        weight = weights[..., done : done + length]
        if values[1] is not None:
            weight = weight * values[1][:, None, run].float()
        out.baddbmm_(weight, values[0][:, run].float())
        done += length
    return out.view(heads, n, dim)
