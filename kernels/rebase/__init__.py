"""Turning vectors by a rotary position: stored keys on a rebase, queries towards a segment."""

from memstream.kernels.rebase.reference import rebase, rotate

__all__ = ["rebase", "rotate"]
