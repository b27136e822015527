"""Products of a few rows with packed weights, in ``native.c``."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p, pointer

import torch
from torch import Tensor

from memstream.kernels.native.build import library

MOST_ROWS = 16  # as in native.c
LANES, BLOCK = 16, 32


def packs(outputs: int, inputs: int) -> bool:
    """True where weights [N, K] of this shape can be packed."""
    return outputs % LANES == 0 and inputs % BLOCK == 0


class CProduct(Structure):
    """``Product`` of native.c."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("bits", c_int32),
        ("unused", c_int32),
    )


class NativeProduct:
    """Weights [N, K] in four or eight bits.

    Args:
        levels: [N, K]; uint8 from 0 to 15 in four bits, int8 from -127 to 127 in eight.
        step: [N, K/32] float32.
        low: [N, K/32] float32 in four bits, else None.
        bias: [N] float32, or None.

    Attributes:
        packed: what native.c reads, uint8.
        outputs: N.
    """

    def __init__(self, levels: Tensor, step: Tensor, low: Tensor | None, bias: Tensor | None) -> None:
        self.outputs, inputs = levels.shape
        assert packs(self.outputs, inputs)
        bits = 8 if low is None else 4
        n_bytes = _function("ms_packed_bytes", returns=True)(c_int64(self.outputs), c_int64(inputs), bits)
        self.packed = torch.zeros(n_bytes, dtype=torch.uint8, device="cpu")
        self._bias = None if bias is None else bias.detach().float().contiguous()
        tables = [levels, step.float()] if low is None else [levels, step.float(), low.float()]
        tables = [table.contiguous() for table in tables]
        _function(f"ms_pack_{bits}")(
            *(c_void_p(table.data_ptr()) for table in tables),
            c_int64(self.outputs),
            c_int64(inputs),
            c_void_p(self.packed.data_ptr()),
        )
        self.c = CProduct(
            self.packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(), self.outputs, inputs, bits, 0
        )
        self._pointer = pointer(self.c)
        self._multiply = _function("ms_product")
        self._room_floats = int(_function("ms_product_floats", returns=True)(c_int64(inputs), c_int64(1)))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, K] float32, up to ``MOST_ROWS`` rows, to [rows, N] float32."""
        assert x.dtype == torch.float32
        assert len(x) <= MOST_ROWS
        x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=torch.float32)
        room = torch.empty(len(x) * self._room_floats, dtype=torch.float32)
        self._multiply(
            self._pointer,
            c_void_p(x.data_ptr()),
            c_int64(len(x)),
            c_void_p(out.data_ptr()),
            c_void_p(room.data_ptr()),
        )
        return out


def _function(name: str, *, returns: bool = False):  # type: ignore[no-untyped-def]
    found = getattr(library(), name)
    found.restype = c_int64 if returns else None
    return found
