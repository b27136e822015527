"""The torch references against plain attention, written out over every key with its distance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memstream.kernels.rebase import rebase, rotate
from memstream.kernels.ring_write import ring_write
from memstream.kernels.segment_attention import segment_attention
from memstream.kernels.token_nll import token_nll
from memstream.streaming.frames import Rope, Turns

SLOTS = 40
# Parts as a layout makes them: sinks, memory, two arcs of the window, the turn with its piece of 5 at the end.
PARTS = [(0, 4, 0, 9), (4, 6, 4, 3), (33, 7, 11, 6), (14, 3, 18, 6), (17, 9, 21, 0)]
POSITION, N = 25, 5


def complex_rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Rotation as multiplication by e^(i angle), in float64: another way to the same thing."""
    half = angle.shape[-1]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    if interleaved:
        z = torch.complex(turned[..., 0::2], turned[..., 1::2]) * torch.exp(1j * angle)
        out = torch.stack((z.real, z.imag), dim=-1).flatten(-2)
    else:
        z = torch.complex(turned[..., :half], turned[..., half:]) * torch.exp(1j * angle)
        out = torch.cat((z.real, z.imag), dim=-1)
    return torch.cat((out, rest), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (12, 4), (6, 2)])
def test_rotate_turns_only_what_the_model_turns(dim: int, rotary: int, interleaved: bool) -> None:
    x, angle = torch.randn(3, 7, dim), torch.rand(rotary // 2, dtype=torch.float64) * 6
    got = rotate(x, angle.cos().float(), angle.sin().float(), interleaved=interleaved)
    torch.testing.assert_close(got.double(), complex_rotate(x, angle, interleaved), atol=1e-6, rtol=0)
    assert torch.equal(got[..., rotary:], x[..., rotary:])


def test_rebase_turns_its_arcs_and_nothing_else() -> None:
    keys = torch.randn(2, 3, 10, 8)
    before, rope = keys.clone(), Rope(torch.tensor([1.0, 0.1, 0.01, 0.001]))
    rebase(keys, 1, [(7, 3), (0, 2)], *rope.angles(-100))
    assert torch.equal(keys[0], before[0])
    assert torch.equal(keys[1, :, 2:7], before[1, :, 2:7])
    for slot in (0, 1, 7, 8, 9):
        expected = complex_rotate(before[1, :, slot], -100 * rope.inv_freq, False)
        torch.testing.assert_close(keys[1, :, slot].double(), expected, atol=1e-5, rtol=0)


def test_ring_write_fills_its_arcs_in_order_and_rounds() -> None:
    keys = torch.full((2, 3, 10, 4), torch.nan, dtype=torch.bfloat16)
    values, new = keys.clone(), torch.randn(2, 3, 5, 4)
    ring_write(keys, values, 1, [(8, 2), (0, 3)], new[0], new[1])
    for i, slot in enumerate((8, 9, 0, 1, 2)):
        assert torch.equal(keys[1, :, slot], new[0, :, i].bfloat16())
        assert torch.equal(values[1, :, slot], new[1, :, i].bfloat16())
    assert keys[0].isnan().all()
    assert keys[1, :, 3:8].isnan().all()


def naive(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rope: Rope,
    scaling: float,
    width: int | None,
    softcap: float | None,
    extra: Tensor | None,
) -> Tensor:
    """One query, one head, one key at a time, in float64."""
    heads, n, dim = query.shape
    out = torch.zeros(heads, n, dim, dtype=torch.float64)
    for h in range(heads):
        kv = h * keys.shape[0] // heads
        for i in range(n):
            scores, seen = [], []
            for slot, length, first, shift in PARTS:
                q = complex_rotate(query[h, i], shift * rope.inv_freq, rope.interleaved)
                for j in range(length):
                    distance = POSITION + i + shift - (first + j)
                    if distance < 0 or (width is not None and distance >= width):
                        continue
                    score = (q * keys[kv, slot + j].double()).sum() * scaling
                    if softcap is not None:
                        score = softcap * torch.tanh(score / softcap)
                    scores.append(score)
                    seen.append(values[kv, slot + j].double())
            if extra is not None:
                scores.append(extra[h].double())
            weights = torch.softmax(torch.stack(scores), 0)
            out[h, i] = (weights[: len(seen), None] * torch.stack(seen)).sum(0)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 12), (9, 3, 16)])
@pytest.mark.parametrize(
    ("width", "softcap", "sinks"), [(None, None, False), (7, None, False), (None, 3.0, False), (12, None, True)]
)
def test_segment_attention_is_attention_over_the_parts(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, width: int | None, softcap: float | None, sinks: bool
) -> None:
    keys = torch.full((kv_heads, SLOTS, dim), torch.nan, dtype=dtype)
    values = keys.clone()
    for slot, length, _, _ in PARTS:  # what lies outside the parts is poison
        keys[:, slot : slot + length] = torch.randn(kv_heads, length, dim).to(dtype)
        values[:, slot : slot + length] = torch.randn(kv_heads, length, dim).to(dtype)
    query = torch.randn(heads, N, dim).to(dtype)
    rope = Rope(10000.0 ** -(torch.arange(0, dim // 2 * 2, 2) / dim))
    extra = torch.randn(heads) if sinks else None
    turns = Turns()
    got = segment_attention(
        query,
        keys,
        values,
        PARTS,
        position=POSITION,
        turned=lambda q, shift: turns(q, rope, shift),
        scaling=0.3,
        width=width,
        softcap=softcap,
        sink_logits=extra,
    )
    assert got.dtype == dtype
    expected = naive(query, keys, values, rope, 0.3, width, softcap, extra)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_token_nll_is_the_log_softmax(n: int) -> None:
    hidden, weight = torch.randn(n, 16), torch.randn(50, 16)
    targets = torch.randint(0, 50, (n,))
    seen: list[int] = []

    def head(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x @ weight.T

    got = token_nll(hidden, targets, head)
    expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="none")
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
    assert max(seen, default=0) <= 64
