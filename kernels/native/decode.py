"""The decode step of native.c, for models of Llama's shape."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from memstream.kernels.native.build import library
from memstream.kernels.native.products import MOST_ROWS, CProduct, NativeProduct


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer, norms in float32."""

    query_key_value: NativeProduct
    out: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    before: Tensor
    between: Tensor
    of_query: Tensor | None
    of_key: Tensor | None
    width: int | None
    turning: bool


class _CLayer(Structure):
    _fields_ = (
        ("query_key_value", CProduct),
        ("out", CProduct),
        ("gate_up", CProduct),
        ("down", CProduct),
        ("before", c_void_p),
        ("between", c_void_p),
        ("of_query", c_void_p),
        ("of_key", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("width", c_int32),
        ("turning", c_int32),
    )


class _CModel(Structure):
    _fields_ = (
        ("layers", POINTER(_CLayer)),
        ("norm", c_void_p),
        ("head", CProduct),
        ("n_layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("inner", c_int32),
        ("slots", c_int32),
        ("parts", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
    )


class _CStep(Structure):
    _fields_ = (
        ("model", POINTER(_CModel)),
        ("rows", c_int64),
        ("n", c_int64),
        ("x", c_void_p),
        ("row", c_void_p),
        ("position", c_void_p),
        ("slot", c_void_p),
        ("part", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("logits", c_void_p),
        ("room", c_void_p),
    )


class NativeDecode:
    """The forward of a few tokens in each of B rows of a cache, with or without the output layer.

    Args:
        layers: of the model.
        norm: [E] float32, the weight of the last norm.
        head: the output layer.
        keys: of each layer, [R, K, C, D] float32.
        values: likewise.
        heads: H.
        inner: width of the gate.
        parts: most parts that a token attends to.
        epsilon: of all norms.
        scaling: of the scores.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: Tensor,
        head: NativeProduct,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        heads: int,
        inner: int,
        parts: int,
        epsilon: float,
        scaling: float,
    ) -> None:
        self._held = (layers, norm, head, keys, values)  # their addresses are in what follows
        _, kv_heads, slots, dim = keys[0].shape
        of_layers = (_CLayer * len(layers))()
        for to, layer, layer_keys, layer_values in zip(of_layers, layers, keys, values, strict=True):
            to.query_key_value, to.out, to.gate_up, to.down = (
                layer.query_key_value.c, layer.out.c, layer.gate_up.c, layer.down.c,
            )  # fmt: skip
            for name in ("before", "between", "of_query", "of_key"):
                weight = getattr(layer, name)
                setattr(to, name, None if weight is None else weight.data_ptr())
            to.keys, to.values = layer_keys.data_ptr(), layer_values.data_ptr()
            to.width, to.turning = layer.width or 0, layer.turning
        self._model = _CModel(
            of_layers, norm.data_ptr(), head.c, len(layers), norm.shape[0], heads, kv_heads, dim, inner, slots, parts,
            epsilon, scaling,
        )  # fmt: skip
        loaded = library()
        loaded.ms_step_floats.restype = c_int64
        loaded.ms_step.restype = None
        self._run = loaded.ms_step
        floats = loaded.ms_step_floats(byref(self._model), c_int64(MOST_ROWS))
        self._room = torch.empty(floats, dtype=torch.float32)  # of many threads: what nobody uses takes no memory
        self._step = _CStep(model=_pointer(self._model), room=self._room.data_ptr())

    def __call__(
        self,
        x: Tensor,
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
        parts: Tensor,
        cos: Tensor,
        sin: Tensor,
        logits: Tensor | None = None,
    ) -> None:
        """Writes keys and values of the new tokens into the cache, and what the model says after each into ``logits``.

        Args:
            x: [B, n, E] float32, embedded tokens, at most ``MOST_ROWS`` in all; overwritten, without logits by the last
                hidden states.
            rows: [B] int32, rows of the cache.
            positions: [B] int32, stored positions of the first tokens.
            slots: [B, n] int32, where they are written.
            parts: [B, P, 4] int32, what they attend to; of the piece itself each one meets what is before it.
            cos: [B, n, 1 + P, D] float32, the turns to the stored position and on towards each part.
            sin: likewise, signed; see ``rebase.rotate``.
            logits: [B, n, V] float32, or None.
        """
        given = {
            "x": x, "row": rows, "position": positions, "slot": slots, "part": parts, "cos": cos, "sin": sin,
        }  # fmt: skip
        held = {name: tensor.contiguous() for name, tensor in given.items()}
        assert held["x"] is x
        assert logits is None or logits.is_contiguous()
        assert slots.numel() <= MOST_ROWS
        for name, tensor in held.items():
            setattr(self._step, name, tensor.data_ptr())
        self._step.logits = None if logits is None else logits.data_ptr()
        self._step.rows, self._step.n = slots.numel(), slots.shape[1]
        self._run(byref(self._step))


def _pointer(model: _CModel):  # type: ignore[no-untyped-def]
    from ctypes import pointer

    return pointer(model)
