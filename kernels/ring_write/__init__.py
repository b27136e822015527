"""Writing new keys and values into their slots."""

from memstream.kernels.ring_write.reference import ring_write

__all__ = ["ring_write"]
