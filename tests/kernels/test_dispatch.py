"""Which implementation runs: an explicit choice succeeds or says why it cannot."""

from __future__ import annotations

import pytest
import torch

from memstream.errors import ConfigError, KernelUnavailableError
from memstream.kernels import dispatch
from memstream.kernels.token_nll import kernel, token_nll

CPU = torch.zeros(1)
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a card")


def test_auto_on_the_cpu_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_KERNELS", "auto")
    assert not dispatch.triton_runs(CPU)
    monkeypatch.delenv("MEMSTREAM_KERNELS")
    assert not dispatch.triton_runs(CPU)


@no_card
def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_KERNELS", "triton")
    assert dispatch.triton_runs(CPU)
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    with pytest.raises(KernelUnavailableError, match=r"on the CPU Triton runs only in its interpreter.*; unset it"):
        dispatch.triton_runs(CPU)
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    with pytest.raises(KernelUnavailableError, match="the package triton is not installed"):
        dispatch.triton_runs(CPU)


def test_another_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_KERNELS", "fast")
    with pytest.raises(ConfigError, match="allowed: 'auto', 'torch', 'native', 'triton'"):
        dispatch.triton_runs(CPU)


@pytest.mark.parametrize(
    ("capability", "hip", "missing"),
    [((9, 0), None, None), ((7, 5), None, "sm_75, and the kernels need sm_80"), ((9, 0), "6.1", "AMD")],
)
def test_which_cards(
    capability: tuple[int, int], hip: str | None, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    dispatch.arch.cache_clear()
    why = dispatch.why_no_triton(torch.device("cuda", 0))
    dispatch.arch.cache_clear()
    assert why is None if missing is None else why is not None and missing in why


@no_card
def test_the_choice_is_made_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(kernel, "launch", lambda *args, **options: launched.append(args) or torch.zeros(1))
    for choice, expected in (("torch", 0), ("triton", 1), ("auto", 1)):
        monkeypatch.setenv("MEMSTREAM_KERNELS", choice)
        token_nll(torch.randn(1, 4), torch.tensor([0]), torch.randn(3, 4))
        assert len(launched) == expected
