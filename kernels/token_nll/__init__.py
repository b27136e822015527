"""Log-probabilities of given tokens without storing the logits of all of them."""

from __future__ import annotations

from torch import Tensor

from memstream.kernels.dispatch import triton_runs
from memstream.kernels.token_nll import reference
from memstream.kernels.token_nll.reference import product_nll

__all__ = ["product_nll", "token_nll"]


def token_nll(
    hidden: Tensor, targets: Tensor, weight: Tensor, *, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Negative log-likelihood of ``targets[i]`` under the logits of ``hidden[i]``.

    Args:
        hidden: [n, E] last hidden states.
        targets: [n] int64.
        weight: [V, E] of the model's output layer.
        bias: [V] of the same, or None.
        softcap: logits become ``softcap * tanh(logit / softcap)``.

    Returns:
        [n] float32.

    Raises:
        KernelUnavailableError: Triton was asked for and cannot run here.
    """
    if triton_runs(hidden):
        from memstream.kernels.token_nll.kernel import launch

        return launch(hidden, targets, weight, bias=bias, softcap=softcap)
    return reference.token_nll(hidden, targets, weight, bias=bias, softcap=softcap)
