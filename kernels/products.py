"""Products of tiles, as every kernel makes them."""

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
