"""Torch reference of ``segment_attention``; also the CPU path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    scaled = query.float() * scaling
    for alike, row, position, own in _alike(rows.tolist(), positions.tolist(), parts.tolist()):
        turned = {0: scaled[alike]}
        for p, (_, length, _, shift) in enumerate(own):
            if length and shift not in turned:
                turned[shift] = rotate(turned[0], cos[alike.start, p], sin[alike.start, p], partner)
        stored = slice(row, row + len(turned[0]))
        attended = _attend(
            turned,
            (keys[stored], None if key_scales is None else key_scales[stored]),
            (values[stored], None if value_scales is None else value_scales[stored]),
            [part for part in own if part[1]],
            position=position,
            width=width,
            softcap=softcap,
            sink_logits=sink_logits,
        )
        out[alike] = attended.transpose(1, 2)
    return out


def _alike(
    rows: Sequence[int], positions: Sequence[int], parts: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[slice, int, int, Sequence[Sequence[int]]]]:
    """Rows that lie next to each other and attend to the same slots from the same position: one product does for all.

    Yields which of the B rows they are, and the row of the cache, position and parts of the first.
    """
    first = 0
    for i in range(1, len(rows) + 1):
        if (
            i == len(rows)
            or rows[i] != rows[first] + i - first
            or positions[i] != positions[first]
            or parts[i] != parts[first]
        ):
            yield slice(first, i), rows[first], positions[first], parts[first]
            first = i


def _attend(
    turned: dict[int, Tensor],
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    parts: Sequence[Sequence[int]],
    *,
    position: int,
    width: int | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Rows that are alike: scaled queries [G, H, n, D] by shift, keys and values [G, K, C, D] with scales [G, K, C].

    Returns [G, H, n, D] float32.
    """
    rows, heads, n, dim = turned[0].shape
    device, kv_heads = turned[0].device, keys[0].shape[1]
    grouped = heads // kv_heads * n  # grouped heads share their keys: they become rows of one product
    scores, seen = [], []
    for slot, length, first, shift in parts:
        nearest, farthest = position + shift - (first + length - 1), position + n - 1 + shift - first
        if width is not None and nearest >= width:
            continue
        run = slice(slot, slot + length)
        seen.append(run)
        queries = turned[shift].reshape(rows * kv_heads, grouped, dim)
        score = torch.bmm(queries, keys[0][:, :, run].flatten(0, 1).float().transpose(1, 2))
        if keys[1] is not None:
            score *= keys[1][:, :, run].flatten(0, 1)[:, None].float()
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if nearest < 0 or (width is not None and farthest >= width):
            at = torch.arange(n, device=device)[:, None] + (position + shift - first)
            distance = at - torch.arange(length, device=device)
            hidden = distance < 0 if width is None else (distance < 0) | (distance >= width)
            score.view(rows * kv_heads, -1, n, length).masked_fill_(hidden, -torch.inf)
        scores.append(score)
    if sink_logits is not None:
        extra = sink_logits.float().view(kv_heads, -1, 1).expand(rows, kv_heads, -1, n)
        scores.append(extra.reshape(rows * kv_heads, grouped, 1))
    weights = torch.softmax(torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0], dim=-1)
    out: Tensor | None = None
    done = 0
    for run in seen:
        weight = weights[..., done : done + run.stop - run.start]
        done += run.stop - run.start
        if values[1] is not None:
            weight = weight * values[1][:, :, run].flatten(0, 1)[:, None].float()
        value = values[0][:, :, run].flatten(0, 1).float()
        out = torch.bmm(weight, value) if out is None else out.baddbmm_(weight, value)
    assert out is not None, "a token sees at least itself"
    return out.view(rows, heads, n, dim)
