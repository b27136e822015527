"""Triton kernel of ``token_nll``: hidden states times output weights, reduced tile by tile as it is made."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstream.kernels.dispatch import arch, processors
from memstream.kernels.tiles import dot


class Settings(NamedTuple):
    """Tile sizes and launch options."""

    tokens: int
    words: int
    depth: int
    num_warps: int
    num_stages: int


def settings(dtype: torch.dtype, arch: int) -> Settings:
    """What suits a type on a card; see docs/kernels.md for why."""
    if dtype == torch.float32:
        return Settings(32, 64, 32, 4, 2)
    return Settings(64, 128, 64, 8 if arch >= 90 else 4, 3)


@triton.jit(do_not_specialize=["n", "tiles"])
def nll_kernel(
    hidden,
    weight,
    bias,
    targets,
    tops,
    sums,
    chosen,
    n,
    vocabulary,
    hidden_token,
    weight_word,
    softcap,
    tiles,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some tiles of the vocabulary for TOKENS tokens: largest logit, sum of exponentials, logit of the target."""
    split = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < n
    target = tl.load(targets + token, mask=there, other=-1)
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    mine = tl.zeros([TOKENS], tl.float32)
    depth = tl.arange(0, DEPTH)
    left = hidden + token.to(tl.int64)[:, None] * hidden_token
    for tile in range(tiles):
        word = (split * tiles + tile) * WORDS + tl.arange(0, WORDS)
        known = word < vocabulary
        right = weight + word.to(tl.int64)[None, :] * weight_word
        logits = tl.zeros([TOKENS, WORDS], tl.float32)
        for k in range(0, E, DEPTH):
            inside = k + depth < E
            a = tl.load(left + (k + depth)[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + (k + depth)[:, None], mask=inside[:, None] & known[None, :], other=0.0)
            logits = dot(a, b, logits)
        if HAS_BIAS:
            logits += tl.load(bias + word, mask=known, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
        logits = tl.where(known[None, :], logits, float("-inf"))
        mine += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), axis=1)
        new = tl.maximum(top, tl.max(logits, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(logits - safe[:, None]), axis=1)
        top = new
    where = split * n + token
    tl.store(tops + where, top, mask=there)
    tl.store(sums + where, total, mask=there)
    tl.store(chosen + where, mine, mask=there)


def launch(hidden: Tensor, targets: Tensor, weight: Tensor, *, bias: Tensor | None, softcap: float | None) -> Tensor:
    """See ``memstream.kernels.token_nll``."""
    n, depth = hidden.shape
    vocabulary = weight.shape[0]
    tokens, words, block, warps, stages = settings(hidden.dtype, arch(hidden.device))
    blocks, tiles = triton.cdiv(n, tokens), triton.cdiv(vocabulary, words)
    each = max(1, tiles * blocks // (4 * processors(hidden.device)))  # enough programs to fill the card
    splits = triton.cdiv(tiles, each)
    partial = torch.empty(3, splits, n, dtype=torch.float32, device=hidden.device)
    if n:
        assert hidden.stride(1) == weight.stride(1) == 1
        nll_kernel[(blocks, splits)](
            hidden,
            weight,
            bias if bias is not None else weight,
            targets,
            *partial,
            n,
            vocabulary,
            hidden.stride(0),
            weight.stride(0),
            softcap if softcap is not None else 0.0,
            each,
            E=depth,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap is not None,
            TOKENS=tokens,
            WORDS=words,
            DEPTH=block,
            num_warps=warps,
            num_stages=stages,
        )
    tops, sums, chosen = partial.unbind()
    return torch.logsumexp(tops + sums.log(), dim=0) - chosen.sum(dim=0)
