"""Log-probabilities of given tokens without storing the logits of all of them."""

from memstream.kernels.token_nll.reference import token_nll

__all__ = ["token_nll"]
