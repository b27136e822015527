"""``ring_write`` and the int8 form, reference and Triton kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memstream.kernels.ring_write import dequantise, kernel, quantise, reference
from memstream.streaming.cache import Cache
from tests.kernels.cases import DEVICE

BOTH = pytest.mark.parametrize("write", [reference.ring_write, kernel.launch], ids=["reference", "triton"])


def poisoned(kv_heads: int, slots: int, dim: int, dtype: torch.dtype) -> Cache:
    cache = Cache([(kv_heads, dim)], rows=4, cache_tokens=slots, dtype=dtype, device=DEVICE)
    for row in range(4):
        cache.poison(row, 0, slots)
    return cache


def new_tokens(n: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[2, K, n, D] as a model hands them over: not contiguous."""
    return torch.randn(2, n, kv_heads, dim, device=DEVICE).to(dtype).transpose(1, 2)


@BOTH
@pytest.mark.parametrize("dim", [6, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.int8),
    ],
)
def test_writes_its_slots_and_nothing_else(
    write: Any, dtype: torch.dtype, kv_dtype: torch.dtype, n: int, dim: int
) -> None:
    cache = poisoned(3, 40, dim, kv_dtype)
    untouched = poisoned(3, 40, dim, kv_dtype)
    keys, values = new_tokens(n, 3, dim, dtype), new_tokens(n, 3, dim, dtype)
    rows = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    slots = torch.stack([torch.randperm(40)[:n], torch.randperm(40)[:n]]).int().to(DEVICE)
    table = torch.cat([rows[:, None], slots], dim=1)  # as in a step, rows and slots are columns of one table
    write(
        cache.keys[0],
        cache.values[0],
        keys,
        values,
        rows=table[:, 0],
        slots=table[:, 1:],
        key_scales=cache.key_scales[0],
        value_scales=cache.value_scales[0],
    )
    for i, row in enumerate((3, 1)):
        for t in range(n):
            slot = int(slots[i, t])
            for side, scales, new in (
                (cache.keys[0], cache.key_scales[0], keys),
                (cache.values[0], cache.value_scales[0], values),
            ):
                got, given = side[row, :, slot], new[i, :, t]
                if scales is None:
                    # The interpreter cuts bfloat16 off where a card rounds it.
                    exact = kv_dtype != torch.bfloat16 or dtype == torch.bfloat16
                    torch.testing.assert_close(got, given.to(kv_dtype), rtol=0 if exact else 2**-7, atol=0)
                else:
                    step = given.float().abs().amax(dim=-1) / 127
                    torch.testing.assert_close(scales[row, :, slot].float(), step, rtol=1e-3, atol=0)
                    error = (dequantise(got, scales[row, :, slot]) - given.float()).abs().amax(dim=-1)
                    assert (error <= 0.51 * step).all()
    written = torch.zeros(4, 40, dtype=torch.bool, device=DEVICE)
    for i, row in enumerate((3, 1)):
        written[row, slots[i].long()] = True
    names = ("keys", "values") if kv_dtype != torch.int8 else ("keys", "values", "key_scales", "value_scales")
    for name in names:
        after, before = getattr(cache, name)[0], getattr(untouched, name)[0]
        after, before = after.transpose(1, 2)[~written], before.transpose(1, 2)[~written]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@BOTH
def test_int8_of_zeros_and_of_huge_and_tiny_numbers(write: Any) -> None:
    cache = poisoned(1, 4, 8, torch.int8)
    tokens = torch.stack([torch.zeros(8), torch.full((8,), 1e7), torch.full((8,), 1e-9), torch.arange(8.0) - 3])
    new = tokens[None, None].to(DEVICE)
    write(
        cache.keys[0],
        cache.values[0],
        new,
        new,
        rows=torch.tensor([0], dtype=torch.int32, device=DEVICE),
        slots=torch.arange(4, dtype=torch.int32, device=DEVICE)[None],
        key_scales=cache.key_scales[0],
        value_scales=cache.value_scales[0],
    )
    assert cache.key_scales[0] is not None
    wide = dequantise(cache.keys[0][0, 0], cache.key_scales[0][0, 0]).cpu()
    assert not wide[0].any()
    assert wide[1].tolist() == [127 * 65504.0] * 8  # the most that a float16 scale can say
    assert not wide[2].any()  # less than the smallest scale
    torch.testing.assert_close(wide[3], tokens[3], atol=4 / 254 * 1.01, rtol=0)


def test_quantising_twice_changes_nothing() -> None:
    levels, scales = quantise(torch.randn(50, 64))
    again, same = quantise(dequantise(levels, scales))
    assert torch.equal(levels, again)
    torch.testing.assert_close(scales, same, rtol=1e-3, atol=0)
