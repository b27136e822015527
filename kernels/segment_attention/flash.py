"""The CPU path of ``segment_attention``: torch's own flash attention, run by run, their softmaxes merged.

No score leaves the processor's cache. Each run comes with the logarithm of its softmax's sum, by which runs weigh in
the whole (flash attention's own rule for blocks). Products are of the query's type: keys of another are converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from memstream.kernels.segment_attention.reference import Stored

_HIDDEN = -1e30  # finite, so that a query that sees nothing of a run weighs it with exactly nothing

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def takes(query: Tensor, softcap: float | None, key_scales: Tensor | None) -> bool:
    """Whether ``attend`` computes this; the reference does what it does not."""
    return query.device.type == "cpu" and softcap is None and key_scales is None


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
    products: torch.dtype,
) -> Tensor:
    """See ``reference.attend``; without ``softcap`` and scales, and with products in a type of choice."""
    rows, heads, n, dim = next(iter(turned.values())).shape
    kv_heads = keys[0].shape[1]
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for slot, length, first, shift in parts:
        nearest, farthest = position + shift - (first + length - 1), position + n - 1 + shift - first
        if width is not None and nearest >= width:
            continue
        mask = None
        if nearest < 0 or (width is not None and farthest >= width):
            mask = _mask(n, length, position + shift - first, width, heads // kv_heads, products)
        query = (
            turned[shift].to(products).reshape(rows, kv_heads, -1, dim)
        )  # grouped heads share their keys: more queries
        out, log_sum = _flash(
            query,
            keys[0][:, :, slot : slot + length].to(products),
            values[0][:, :, slot : slot + length].to(products),
            attn_mask=mask,
            scale=scaling,
        )
        outs.append(out)
        sums.append(log_sum)
    if sink_logits is not None:
        extra = sink_logits.float().view(kv_heads, -1, 1).expand(rows, kv_heads, -1, n)
        sums.append(extra.reshape(rows, kv_heads, -1))
    if len(sums) == 1:
        return outs[0].reshape(rows, heads, n, dim)
    shares = torch.softmax(torch.stack(sums, dim=-1), dim=-1)[..., None, :].unbind(-1)
    merged = outs[0] * shares[0]
    for out, share in zip(outs[1:], shares[1:], strict=False):
        merged.addcmul_(out, share)
    return merged.reshape(rows, heads, n, dim)


@lru_cache(maxsize=2)  # the layers of a forward ask for the same ones
@torch.inference_mode(False)
def _mask(n: int, length: int, ahead: int, width: int | None, grouped: int, dtype: torch.dtype) -> Tensor:
    """[grouped n, length], added to scores: what n queries see of keys that begin ``ahead`` before them."""
    distance = torch.arange(n, device="cpu")[:, None] + ahead - torch.arange(length, device="cpu")
    hidden = distance < 0 if width is None else (distance < 0) | (distance >= width)
    return torch.where(hidden, _HIDDEN, 0.0).to(dtype).repeat(grouped, 1)
