"""Attention of a piece of new tokens over the segments of a fixed cache."""

from memstream.kernels.segment_attention.reference import segment_attention

__all__ = ["segment_attention"]
