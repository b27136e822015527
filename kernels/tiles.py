"""What several kernels do with a tile."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, sums):
    """``sums + a @ b``, accumulated in float32; float32 factors are not rounded to tf32."""
    if INTERPRETED:  # whose product of bfloat16 tiles multiplies their bits (triton 3.8)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def quantise(x):
    """Rounds vectors [n, D] in float32 to levels of int8, still in float32, and float16 scales [n]."""
    scale = tl.minimum(tl.max(tl.abs(x), axis=1) / 127.0, 65504.0).to(tl.float16)
    inverse = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale.to(tl.float32), 1.0), 0.0)
    level = (x * inverse[:, None] + 12582912.0) - 12582912.0  # to the nearest, ties to even: 1.5 * 2^23
    return tl.minimum(tl.maximum(level, -127.0), 127.0), scale
