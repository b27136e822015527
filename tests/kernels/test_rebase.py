"""``rotate`` and ``rebase``, reference and Triton kernel, against multiplication by e^(i angle)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memstream.kernels.rebase import kernel, reference, rotate
from memstream.kernels.ring_write import dequantise, quantise
from memstream.streaming.frames import Rope
from tests.kernels.cases import DEVICE, complex_rotate, inv_freq

BOTH = pytest.mark.parametrize("rebase", [reference.rebase, kernel.launch], ids=["reference", "triton"])
SHAPES = [
    (8, 8, False),
    (12, 4, True),
    (6, 2, False),
    (64, 64, False),
    (80, 20, False),
    (96, 96, True),
    (256, 256, False),
]
ARCS, OTHERS = [(17, 3), (0, 2)], [2, 3, 9, 16]


@pytest.mark.parametrize(("dim", "rotary", "interleaved"), SHAPES)
def test_rotate_turns_only_what_the_model_turns(dim: int, rotary: int, interleaved: bool) -> None:
    x, rope = torch.randn(3, 7, dim, device=DEVICE), Rope(inv_freq(rotary), dim, interleaved=interleaved)
    got = rotate(x, *rope.turn(-37))
    torch.testing.assert_close(got.double(), complex_rotate(x, -37 * inv_freq(rotary), interleaved), atol=2e-6, rtol=0)
    assert torch.equal(got[..., rotary:], x[..., rotary:])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "rotary", "interleaved"), SHAPES)
def test_turns_its_arcs_and_nothing_else(
    rebase: Any, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype
) -> None:
    keys = torch.randn(2, 3, 20, dim, device=DEVICE).to(dtype)
    before, rope = keys.clone(), Rope(inv_freq(rotary), dim, interleaved=interleaved)
    rebase(keys, None, 1, ARCS, *rope.turn(-100))
    assert torch.equal(keys[0], before[0])
    for slot in OTHERS:
        assert torch.equal(keys[1, :, slot], before[1, :, slot])
    tolerance = {torch.float32: (1e-5, 0.0), torch.float16: (1e-4, 2e-3), torch.bfloat16: (1e-4, 2**-7)}[dtype]
    for slot in (0, 1, 17, 18, 19):
        expected = complex_rotate(before[1, :, slot], -100 * inv_freq(rotary), interleaved)
        torch.testing.assert_close(keys[1, :, slot].double(), expected, atol=tolerance[0], rtol=tolerance[1])


@BOTH
def test_int8_keys_get_new_scales(rebase: Any) -> None:
    keys, scales = quantise(torch.randn(2, 3, 20, 64, device=DEVICE))
    before, before_scales, rope = keys.clone(), scales.clone(), Rope(inv_freq(64), 64)
    rebase(keys, scales, 1, ARCS, *rope.turn(-100))
    assert torch.equal(keys[0], before[0])
    assert torch.equal(scales[0], before_scales[0])
    assert torch.equal(keys[1, :, OTHERS], before[1, :, OTHERS])
    assert torch.equal(scales[1, :, OTHERS], before_scales[1, :, OTHERS])
    for slot in (0, 1, 17, 18, 19):
        expected = complex_rotate(dequantise(before, before_scales)[1, :, slot], -100 * inv_freq(64), False)
        step = expected.abs().amax(dim=-1, keepdim=True) / 127
        assert ((dequantise(keys, scales)[1, :, slot].double() - expected).abs() <= 0.52 * step).all()
