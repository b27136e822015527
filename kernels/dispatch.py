"""Which implementation of an op runs: torch or Triton, per call from its tensors and ``$MEMSTREAM_KERNELS``.

What the native kernels do on the CPU is more than an op, and chosen where it is done (``native.native_runs``).
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from memstream.config import kernel_choice
from memstream.errors import KernelUnavailableError
from memstream.kernels.native.build import native_runs, why_no_native

OLDEST_ARCH = 80  # Ampere: bfloat16 products and asynchronous copies


def triton_runs(tensor: Tensor) -> bool:
    """Whether Triton runs on the device that holds ``tensor``; False: torch does.

    Raises:
        ConfigError: ``$MEMSTREAM_KERNELS`` is not a choice.
        KernelUnavailableError: Triton was asked for and cannot run there.
    """
    choice = kernel_choice()
    if choice in ("torch", "native") or (choice == "auto" and not tensor.is_cuda):
        return False
    missing = why_no_triton(tensor.device)
    if choice == "triton" and missing:
        raise KernelUnavailableError(f"MEMSTREAM_KERNELS is 'triton', but {missing}; unset it to use torch")
    return missing is None


def explain(device: torch.device) -> tuple[str, str]:
    """Which implementation runs on a device, ``torch``, ``native`` or ``triton``, and why.

    Raises:
        ConfigError: ``$MEMSTREAM_KERNELS`` is not a choice.
        KernelUnavailableError: what was asked for cannot run there.
    """
    choice = kernel_choice()
    active = "triton" if triton_runs(torch.empty(0, device=device)) else "torch"
    if device.type == "cpu" and native_runs():
        active = "native"
    if choice != "auto":
        return active, f"MEMSTREAM_KERNELS is {choice!r}"
    if device.type == "cpu":
        return active, why_no_native() or "compiled for this processor; models with packed weights run on it"
    return active, why_no_triton(device) or f"the card is sm_{arch(device)}"


def why_no_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot run on a device; None where it can."""
    if not _has_triton():
        return "the package triton is not installed"
    if device.type == "cpu":
        return None if _interpreting() else "on the CPU Triton runs only in its interpreter (TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if torch.version.hip is not None:
        return "these kernels have not been made for AMD cards"
    found = arch(device)
    return None if found >= OLDEST_ARCH else f"the card is sm_{found}, and the kernels need sm_{OLDEST_ARCH} or newer"


@functools.cache
def arch(device: torch.device) -> int:
    """Compute capability of a card as a number such as 90; ``OLDEST_ARCH`` for the interpreter."""
    if device.type != "cuda":
        return OLDEST_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a card; 4 for the interpreter, so that splitting is exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _interpreting() -> bool:
    """Triton reads the variable when a kernel is defined, so a later change has no effect."""
    return os.environ.get("TRITON_INTERPRET") == "1"
