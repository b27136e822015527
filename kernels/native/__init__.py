"""Kernels in C for the CPU: products with packed weights, a whole decode step, and what lies between other products."""

from __future__ import annotations

from memstream.kernels.native import pieces
from memstream.kernels.native.build import native_runs, why_no_native
from memstream.kernels.native.decode import Layer, NativeDecode
from memstream.kernels.native.products import MOST_ROWS, NativeProduct, packs

__all__ = ["MOST_ROWS", "Layer", "NativeDecode", "NativeProduct", "native_runs", "packs", "pieces", "why_no_native"]
