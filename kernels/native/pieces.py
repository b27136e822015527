"""What lies between the products of a piece of many tokens, in native.c; activations are in bfloat16."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from memstream.kernels.native.build import library

LANES = 16
WIDEST_HEAD = 1024


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Adds [M, E] bfloat16 to x [M, E] float32 in place, and returns the sum's norm, [M, E] bfloat16."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    library().ms_add_norm(
        _at(x), _at(add), _at(weight), c_int64(len(x)), c_int64(x.shape[1]), c_float(epsilon), _at(out)
    )
    return out


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [M, gate | up], [M, I] bfloat16."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=torch.bfloat16)
    library().ms_gate(_at(gate_up), c_int64(len(out)), c_int64(out.shape[1]), _at(out))
    return out


class _CPiece(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "n", "heads", "kv_heads", "dim", "slots", "shifts")),
        *((name, c_void_p) for name in ("row", "slot", "cos", "sin", "on_cos", "on_sin")),
        ("epsilon", c_float),
    )


class Spread:
    """Takes the joint product of query, key and value apart, for every layer of one forward.

    Args:
        rows: [B] int32, rows of the cache.
        slots: [B, n] int32, where keys and values are written.
        turn: cos and signed sin to the stored positions, [B, n, D] float32 each.
        on: cos and signed sin on from there by each shift, [B, S, D] float32 each.
        heads: H.
        keys: one layer's, [R, K, C, D] float32, for their shape.
        epsilon: of the norms of queries and keys.
    """

    def __init__(
        self,
        rows: Tensor,
        slots: Tensor,
        turn: tuple[Tensor, Tensor],
        on: tuple[Tensor, Tensor],
        *,
        heads: int,
        keys: Tensor,
        epsilon: float,
    ) -> None:
        self._held = tuple(tensor.contiguous() for tensor in (rows, slots, *turn, *on))
        (n_rows, n), (_, kv_heads, n_slots, dim), shifts = slots.shape, keys.shape, on[0].shape[1]
        self._shape = (shifts, n_rows, heads, n, dim)
        addresses = (tensor.data_ptr() for tensor in self._held)
        self._piece = _CPiece(n_rows, n, heads, kv_heads, dim, n_slots, shifts, *addresses, epsilon)

    def __call__(
        self,
        joint: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        of_query: Tensor | None,
        of_key: Tensor | None,
        turning: bool,
    ) -> Tensor:
        """Writes a layer's keys and values into their slots; returns its queries towards each shift.

        Args:
            joint: [M, (H + 2K) D] bfloat16.
            keys: [R, K, C, D] float32.
            values: likewise.
            of_query: [D] float32, the weight of a norm of each query, or None.
            of_key: likewise of keys.
            turning: whether queries and keys have rotary positions.

        Returns:
            [S, B, H, n, D] bfloat16.
        """
        out = torch.empty(self._shape, dtype=torch.bfloat16)
        library().ms_spread(
            byref(self._piece),
            _at(joint),
            _at(of_query),
            _at(of_key),
            int(turning),
            _at(keys),
            _at(values),
            _at(out),
        )
        return out


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood [M] float32 of ``targets`` [M] int64 under logits [M, V] bfloat16."""
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
        raise IndexError(f"a target is none of the {logits.shape[1]} words")
    out = torch.empty(len(targets), dtype=torch.float32)
    targets = targets.contiguous()
    library().ms_nll(_at(logits), _at(targets), c_int64(len(targets)), c_int64(logits.shape[1]), _at(out))
    return out


def _at(tensor: Tensor | None) -> c_void_p:
    if tensor is None:
        return c_void_p(None)
    assert tensor.is_contiguous()
    return c_void_p(tensor.data_ptr())
