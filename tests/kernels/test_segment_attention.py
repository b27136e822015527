"""``segment_attention``, reference and Triton kernel, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memstream.kernels import segment_attention
from memstream.kernels.segment_attention import flash, kernel, reference
from tests.kernels.cases import DEVICE, TOLERANCE, Attention


def on_cpu(**arguments: Any) -> torch.Tensor:
    """Torch's flash attention for all it takes; the rest is the reference's."""
    given = [arguments[name] for name in ("query", "softcap", "key_scales")]
    if not flash.takes(*given):
        pytest.skip("not for the CPU path")
    return reference.segment_attention(**arguments, attend=segment_attention.on_cpu(*given))


EVERY = pytest.mark.parametrize(
    "attend", [reference.segment_attention, on_cpu, kernel.launch], ids=["reference", "cpu", "triton"]
)
FEATURES: list[dict[str, Any]] = [
    {},
    {"width": 7},
    {"softcap": 3.0},
    {"width": 12, "sinks": True},
    {"sinks": True, "before_turn": False},
    {"rotary": 0},
    {"rotary": 8},
    {"rotary": 12, "interleaved": True},
]

MODELS: list[dict[str, Any]] = [  # shapes and features of real ones: Llama, Pythia, Phi-3, GLM, Gemma, gpt-oss, SmolLM3
    {"dim": 64, "heads": 9, "kv_heads": 3},
    {"dim": 80, "rotary": 20, "heads": 4, "kv_heads": 4},
    {"dim": 96, "heads": 4, "kv_heads": 4, "rows": 1},
    {"dim": 24, "rotary": 12, "interleaved": True},
    {"dim": 256, "heads": 4, "kv_heads": 1, "width": 13, "softcap": 5.0},
    {"dim": 64, "heads": 8, "kv_heads": 1, "width": 20, "sinks": True},
    {"dim": 16, "rotary": 0, "before_turn": False},
]


def check(attend: Any, case: Attention) -> None:
    """Results and scratch space are filled with NaN, so that what is not written, or read too early, is seen."""
    shape = (case.rows, case.n, case.heads, case.dim)
    out = torch.full(shape, torch.nan, dtype=case.dtype, device=DEVICE)
    work = torch.full((kernel.plan(case.query, case.cache.keys[0]).work_floats,), torch.nan, device=DEVICE)
    got = attend(**case.arguments, out=out, work=work)
    assert got is out
    torch.testing.assert_close(got.double(), case.expected(), atol=TOLERANCE[case.dtype], rtol=0)


@EVERY
def test_without_buffers_it_makes_its_own(attend: Any) -> None:
    case = Attention()
    got = attend(**case.arguments)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), case.expected(), atol=TOLERANCE[case.dtype], rtol=0)


@EVERY
@pytest.mark.parametrize("n", [1, 5, 23])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_features(attend: Any, features: dict[str, Any], n: int) -> None:
    check(attend, Attention(**features, n=n, seed=n))


@EVERY
@pytest.mark.parametrize("features", [{}, {"width": 7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_that_see_nothing_of_a_run(attend: Any, features: dict[str, Any], dtype: torch.dtype) -> None:
    for seed in range(4):
        check(attend, Attention(**features, n=23, seed=seed, dtype=dtype))


@EVERY
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_models(attend: Any, model: dict[str, Any]) -> None:
    check(attend, Attention(**model, n=3))


@EVERY
@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(attend: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None, n: int) -> None:
    check(attend, Attention(dtype=dtype, kv_dtype=kv_dtype, n=n))


@EVERY
@pytest.mark.parametrize("dim", [6, 64, 80, 96, 128, 256])
def test_head_dimensions(attend: Any, dim: int) -> None:
    check(attend, Attention(dim=dim, n=2, rows=2))


@EVERY
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 8), (32, 1)])
@pytest.mark.parametrize("n", [1, 4, 40])
def test_grouped_heads(attend: Any, heads: int, kv_heads: int, n: int) -> None:
    check(attend, Attention(heads=heads, kv_heads=kv_heads, n=n, rows=2))


@EVERY
@pytest.mark.parametrize("seed", range(6))
def test_many_streams(attend: Any, seed: int) -> None:
    check(attend, Attention(rows=4, seed=seed, slots=40 + 13 * seed, n=1 + seed % 3, before_turn=seed % 2 == 0))


@pytest.mark.parametrize("shares", [1, 2, 8, 64])
def test_any_number_of_splits_gives_the_same(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "splits", lambda *_: shares)
    check(kernel.launch, Attention(rows=2, sinks=True))
    check(kernel.launch, Attention(rows=2, width=5))


def test_splits_depend_on_the_cache_not_on_how_full_it_is() -> None:
    assert kernel.splits(3, 1, 3, 4096, 64, 132) == 64  # 192 programs for 132 processors
    assert kernel.splits(4, 1, 8, 4096, 64, 132) == 32
    assert kernel.splits(4, 8, 8, 4096, 64, 132) == 4
    assert kernel.splits(3, 1, 3, 300, 64, 132) == 8  # 5 tiles of keys, rounded up
    assert kernel.splits(17, 1, 3, 4096, 64, 132) == 1
