"""Kernels in C for the CPU: products with packed weights, and a decode step with nothing around its arithmetic."""

from __future__ import annotations

from memstream.kernels.native.build import native_runs, why_no_native
from memstream.kernels.native.decode import Layer, NativeDecode
from memstream.kernels.native.products import MOST_ROWS, NativeProduct, packs

__all__ = ["MOST_ROWS", "Layer", "NativeDecode", "NativeProduct", "native_runs", "packs", "why_no_native"]
