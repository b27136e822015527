"""Torch reference of ``segment_attention``; also what the CPU path leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstream.kernels.rebase.reference import rotate

Stored = tuple[Tensor, Tensor | None]  # keys or values [G, K, C, D] of rows that are alike, and their scales [G, K, C]


Attend = Callable[..., Tensor]  # such as ``attend``


def attend(
    turned: dict[int, Tensor],
    keys: Stored,
    values: Stored,
    parts: Sequence[Sequence[int]],
    *,
    position: int,
    scaling: float,
    width: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of rows that are alike: one softmax over the scores of all parts, in float32.

    Args:
        turned: queries [G, H, n, D] by shift.
        keys: as stored.
        values: as stored.
        parts: of these rows, without empty ones.
        position: of the first query.
        scaling: see ``segment_attention``.
        width: likewise.
        softcap: likewise.
        sink_logits: likewise.

    Returns:
        [G, H, n, D].
    """
    some = next(iter(turned.values()))
    rows, heads, n, dim = some.shape
    device, kv_heads = some.device, keys[0].shape[1]
    grouped = heads // kv_heads * n  # grouped heads share their keys: they become rows of one product
    scores, seen = [], []
    for slot, length, first, shift in parts:
        nearest, farthest = position + shift - (first + length - 1), position + n - 1 + shift - first
        if width is not None and nearest >= width:
            continue
        run = slice(slot, slot + length)
        seen.append(run)
        queries = turned[shift].reshape(rows * kv_heads, grouped, dim)
        score = torch.bmm(queries * scaling, keys[0][:, :, run].flatten(0, 1).float().transpose(1, 2))
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
    out: Tensor | None = None,
    work: Tensor | None = None,
    **features: Any,
) -> Tensor:
    """See ``memstream.kernels.segment_attention``; ``features`` are those of ``attend_run``."""
    batch, heads, n, dim = query.shape
    if out is None:
        out = torch.empty(batch, n, heads, dim, dtype=query.dtype, device=query.device)
    for run in runs(rows, positions, parts):
        attended = attend_run(run, query, keys, values, (cos, sin, partner), scaling, **features)
        out[run.alike] = attended.transpose(1, 2)
    return out


class Run(NamedTuple):
    """Rows that lie next to each other and attend to the same slots from the same position."""

    alike: slice  # which of the B rows
    row: int  # of the cache, of the first one
    position: int
    parts: list[list[int]]


def runs(rows: Tensor, positions: Tensor, parts: Tensor) -> list[Run]:
    """The rows of a forward, those together for which one product does for all."""
    of_rows, of_positions, of_parts = rows.tolist(), positions.tolist(), parts.tolist()
    found: list[Run] = []
    first = 0
    for i in range(1, len(of_rows) + 1):
        if (
            i == len(of_rows)
            or of_rows[i] != of_rows[first] + i - first
            or of_positions[i] != of_positions[first]
            or of_parts[i] != of_parts[first]
        ):
            found.append(Run(slice(first, i), of_rows[first], of_positions[first], of_parts[first]))
            first = i
    return found


def attend_run(
    run: Run,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    turns: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    attend: Attend = attend,
    **features: Any,
) -> Tensor:
    """One run's share of ``segment_attention``, of whose tensors it takes the whole.

    Args:
        turns: cos, sin and partner.
        attend: does the products.
        features: ``width``, ``softcap``, ``sink_logits``.

    Returns:
        [G, H, n, D].
    """
    cos, sin, partner = turns
    turned = {0: query[run.alike].float()}
    for p, (_, length, _, shift) in enumerate(run.parts):
        if length and shift not in turned:
            turned[shift] = rotate(turned[0], cos[run.alike.start, p], sin[run.alike.start, p], partner)
    stored = slice(run.row, run.row + len(turned[0]))
    return attend(
        turned,
        (keys[stored], None if key_scales is None else key_scales[stored]),
        (values[stored], None if value_scales is None else value_scales[stored]),
        [part for part in run.parts if part[1]],
        position=run.position,
        scaling=scaling,
        **features,
    )
