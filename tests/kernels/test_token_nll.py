"""``token_nll``, reference and Triton kernel, against cross entropy in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from memstream.kernels.token_nll import kernel, reference
from tests.kernels.cases import DEVICE

BOTH = pytest.mark.parametrize("nll", [reference.token_nll, kernel.launch], ids=["reference", "triton"])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "words", "depth"), [(0, 50, 16), (1, 50, 16), (63, 130, 40), (65, 700, 72), (130, 259, 32)]
)
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (False, 3.0)])
def test_is_the_log_softmax(
    nll: Any, dtype: torch.dtype, n: int, words: int, depth: int, bias: bool, softcap: float | None
) -> None:
    hidden = torch.randn(n, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(words, depth, device=DEVICE) / 2).to(dtype)
    offset = torch.randn(words, device=DEVICE).to(dtype) if bias else None
    targets = torch.randint(0, words, (n,), device=DEVICE)
    got = nll(hidden, targets, weight, bias=offset, softcap=softcap)
    logits = hidden.double() @ weight.double().T
    if offset is not None:
        logits += offset.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = cross_entropy(logits, targets, reduction="none")
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)


def test_the_reference_never_holds_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        seen.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(reference, "linear", linear)
    monkeypatch.setattr(reference, "SLICE_BYTES", 64 * 30 * 4)
    reference.token_nll(torch.randn(200, 8), torch.zeros(200, dtype=torch.int64), torch.randn(30, 8))
    assert seen == [64, 64, 64, 8]


@BOTH
def test_a_top_that_is_far_out_does_not_overflow(nll: Any) -> None:
    hidden = torch.tensor([[300.0, 0.0]], device=DEVICE)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.0]], device=DEVICE)
    got = nll(hidden, torch.tensor([1], device=DEVICE), weight, bias=None, softcap=None)
    assert got.item() == pytest.approx(600.0)
