"""Torch reference of ``token_nll``; also the CPU path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from memstream.kernels.native import native_runs, pieces

SLICE_BYTES = 40_000_000  # of logits that are there at once; 64 x 150,000 words in float32


def token_nll(
    hidden: Tensor, targets: Tensor, weight: Tensor, *, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """See ``memstream.kernels.token_nll``."""
    return product_nll(hidden, targets, partial(linear, weight=weight, bias=bias), len(weight), softcap=softcap)


def product_nll(
    hidden: Tensor,
    targets: Tensor,
    product: Callable[[Tensor], Tensor],
    vocabulary: int,
    *,
    softcap: float | None = None,
) -> Tensor:
    """The same with the output layer as a function from [m, E] to [m, V]."""
    out = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    most = max(1, SLICE_BYTES // (vocabulary * hidden.element_size()))
    for i in range(0, len(targets), most):
        logits = product(hidden[i : i + most])
        if softcap is not None:
            logits = torch.tanh(logits.float() / softcap) * softcap
        out[i : i + most] = _of_logits(logits, targets[i : i + most])
    return out


def _of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and native_runs():
        return pieces.nll(logits, targets)
    wide = logits.float()
    return wide.logsumexp(dim=-1) - wide.gather(1, targets[:, None])[:, 0]
