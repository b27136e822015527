"""Torch reference of ``token_nll``; also the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

SLICE_TOKENS = 64  # 64 x 150,000 words in float32 are 38 MB


def token_nll(
    hidden: Tensor, targets: Tensor, weight: Tensor, *, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """See ``memstream.kernels.token_nll``."""
    out = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    for i in range(0, len(targets), SLICE_TOKENS):
        logits = linear(hidden[i : i + SLICE_TOKENS], weight, bias).float()
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        chosen = logits.gather(1, targets[i : i + SLICE_TOKENS, None])[:, 0]
        out[i : i + SLICE_TOKENS] = logits.logsumexp(dim=-1) - chosen
    return out
