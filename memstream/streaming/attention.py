"""The attention that transformers calls inside a model's own forward.

The model's forward stays Hugging Face's. Each of its attention layers hands its rotated queries, keys and values to
``attend``, which writes the keys and values into the fixed cache and attends over the segments there. No cache object
and no mask is passed: what a token may see follows from positions alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from memstream.kernels.ring_write import ring_write
from memstream.kernels.segment_attention import segment_attention, work_floats
from memstream.streaming.step import Step

NAME = "memstream"  # no mask function goes by this name, so transformers builds no mask and reads nothing on the host


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
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    scales = {"key_scales": step.cache.key_scales[layer], "value_scales": step.cache.value_scales[layer]}
    cos, sin, partner = step.turns(step.ropes[layer])
    batch, heads, n, dim = query.shape
    given = query if step.products is None else query.to(step.products)
    ring_write(keys, values, key, value, rows=step.rows, slots=step.slots, **scales)
    attended = segment_attention(
        given,
        keys,
        values,
        rows=step.rows,
        positions=step.positions,
        parts=step.parts,
        cos=cos,
        sin=sin,
        partner=partner,
        scaling=scaling if scaling is not None else dim**-0.5,
        width=sliding_window,
        softcap=softcap,
        sink_logits=s_aux,
        out=step.buffer("attended", (batch, n, heads, dim), given.dtype),
        work=step.buffer("work", (work_floats(given, keys),), torch.float32),
        **scales,
    )
    return attended.to(query.dtype), None


AttentionInterface.register(NAME, attend)
