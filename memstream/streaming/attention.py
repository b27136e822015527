"""The attention that transformers calls inside a model's own forward.

The model's forward stays Hugging Face's. Each of its attention layers hands its rotated queries, keys and values to
``attend``, which writes the keys and values into the fixed cache and attends over the segments there. No cache object
and no mask is passed: what a token may see follows from positions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from memstream.kernels.ring_write import ring_write
from memstream.kernels.segment_attention import segment_attention
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope, Turns
from memstream.streaming.layout import Piece

NAME = "memstream"  # no mask function goes by this name, so transformers builds no mask and reads nothing on the host


@dataclass(slots=True)
class Step:
    """One forward: a piece of n new tokens in each of B rows, handed through the model's keyword arguments."""

    cache: Cache
    rows: Sequence[int]
    pieces: Sequence[Piece]
    ropes: Sequence[Rope | None]
    turns: Turns = field(default_factory=Turns)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    memstream_step: Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends one layer's new tokens over the fixed cache.

    Args:
        module: the attention layer; its ``layer_idx`` selects the storage.
        query: [B, H, n, D], rotated to the pieces' stored positions.
        key: [B, K, n, D], rotated likewise.
        value: [B, K, n, D].
        attention_mask: always None.
        scaling: factor on the scores.
        memstream_step: what this forward is about.
        sliding_window: width of a sliding layer.
        softcap: see ``segment_attention``.
        s_aux: [H] learned sink logits (gpt-oss).

    Returns:
        [B, n, H, D] and None for the weights, which are never whole in memory.
    """
    assert memstream_step is not None, "this model streams: call it through memstream.streaming.StreamingModel"
    assert attention_mask is None
    step, layer = memstream_step, int(module.layer_idx)  # type: ignore[arg-type]
    keys, values, rope = step.cache.keys[layer], step.cache.values[layer], step.ropes[layer]
    outputs = []
    for i, (row, piece) in enumerate(zip(step.rows, step.pieces, strict=True)):
        ring_write(keys, values, row, piece.writes, key[i], value[i])
        outputs.append(
            segment_attention(
                query[i],
                keys[row],
                values[row],
                piece.parts,
                position=piece.position,
                turned=lambda q, shift: step.turns(q, rope, shift),
                scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
                width=sliding_window,
                softcap=softcap,
                sink_logits=s_aux,
            )
        )
    out = torch.stack(outputs) if len(outputs) > 1 else outputs[0][None]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
