"""Products that hold their weights in the form that is fastest on a CPU.

A product with one row, or a few, waits for its weights to come from memory: there it takes them in four or eight bits.
A product with many rows waits for the arithmetic: there it takes them in bfloat16 where the processor multiplies that
natively, else in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from memstream.kernels.native import MOST_ROWS, NativeProduct, native_runs, packs

GROUP = 32  # weights that share a step and an offset in four bits, as in GGUF's Q4 blocks
LEVELS = 16
BLOCKS = "blocks.safetensors"
_OFF_GRID = 1e-3  # of a step
_CANDIDATES = (1, 2, 3)  # the smallest gap between two weights of a group is so many steps

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as the families of transformers name them

Bits = Literal[4, 8]


def multiplies_bfloat16() -> bool:
    """True where the processor has instructions for bfloat16 products."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def rounds_products(model: Any) -> bool:
    """True where a model's products with many rows are made in bfloat16 between values in float32."""
    return multiplies_bfloat16() and any(isinstance(module, PackedLinear) for module in model.modules())


def few_rows() -> int:
    """Up to so many rows a product with packed weights is the faster one."""
    if native_runs():
        return MOST_ROWS
    return 4 if torch.cpu._is_amx_tile_supported() else 8


def explain_weights() -> str:
    """What ``weights="auto"`` does on this processor, and why."""
    wide = (
        "bfloat16, which it multiplies natively" if multiplies_bfloat16() else "float32, for want of bfloat16 products"
    )
    return (
        f"models made of four-bit blocks keep them: up to {few_rows()} rows at once in four bits, more in {wide}; "
        "others are in float32"
    )


class Blocks:
    """A weight [N, K] in four bits: ``low + step x level``, one step and low for each 32 weights of a row.

    Attributes:
        levels: [N, K] uint8, 0 to 15.
        step: [N, K/32] float32.
        low: [N, K/32] float32.
    """

    def __init__(self, levels: Tensor, step: Tensor, low: Tensor) -> None:
        self.levels, self.step, self.low = levels, step, low

    @classmethod
    def rounded(cls, weight: Tensor) -> Blocks:
        """The nearest levels between the smallest and the largest weight of each group."""
        grouped = weight.float().view(len(weight), -1, GROUP)
        low, high = grouped.aminmax(dim=-1)
        return cls._of(grouped, (high - low) / (LEVELS - 1), low)

    @classmethod
    def found(cls, weight: Tensor) -> Blocks | None:
        """The blocks a weight was made from, if it is nothing but such blocks; None if it is not."""
        if not packs_in_four_bits(weight):
            return None
        grouped = weight.float().view(len(weight), -1, GROUP)
        low, high = grouped.aminmax(dim=-1)
        span = high - low
        gaps = grouped.sort(dim=-1).values.diff(dim=-1)
        gap = torch.where(gaps > 1e-4 * span[..., None], gaps, torch.inf).amin(dim=-1)
        step, left = torch.zeros_like(span), span > 0
        for n in _CANDIDATES:
            n_steps = (span / gap * n).round()
            tried = torch.where(left, span / n_steps.clamp(min=1), step)
            distance = (grouped - low[..., None]) / tried.clamp(min=1e-30)[..., None]
            fits = ((distance - distance.round()).abs() < _OFF_GRID).all(dim=-1) & (n_steps < LEVELS)
            step = torch.where(left & fits, tried, step)
            left = left & ~fits
            if not left.any():
                return cls._of(grouped, step, low)
        return None

    @classmethod
    def _of(cls, grouped: Tensor, step: Tensor, low: Tensor) -> Blocks:
        levels = ((grouped - low[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, LEVELS - 1)
        return cls(levels.to(torch.uint8).flatten(-2), step, low)

    @classmethod
    def joined(cls, several: Sequence[Blocks]) -> Blocks:
        """The blocks of weights that are put on top of each other."""
        levels, step, low = zip(*((blocks.levels, blocks.step, blocks.low) for blocks in several), strict=True)
        return cls(torch.cat(levels), torch.cat(step), torch.cat(low))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """As they are kept in a file: two levels a byte."""
        low, high = self.levels.view(len(self.levels), -1, 2).unbind(-1)
        return {f"{name}.levels": low | high << 4, f"{name}.step": self.step, f"{name}.low": self.low}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], name: str) -> Blocks:
        """What ``tensors`` wrote."""
        pairs = tensors[f"{name}.levels"]
        levels = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
        return cls(levels, tensors[f"{name}.step"], tensors[f"{name}.low"])


def packs_in_four_bits(weight: Tensor) -> bool:
    """True where torch's product takes a weight [N, K] of this shape."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0


class PackedLinear(nn.Module):
    """A linear layer, or several of one input, whose weights are held twice: packed for few rows, wide for many.

    Packed weights of several layers are one. The wide ones are laid out as the processor's bfloat16 products want
    them; those in float32 stay where they are, in a file that is mapped perhaps.

    Args:
        layers: whose weights are taken; several are computed as one, their outputs side by side.
        bits: of the packed form; shapes that four bits cannot take are held in eight.
        blocks: the four-bit form of each layer, where it is known; empty where none is.

    Attributes:
        out_features: N.
        wide_dtype: of the wide weights.
        bias: [N], or None.
        native: the packed product, where the native kernels make it.
        few_rows: up to so many rows are multiplied with packed weights.
    """

    packed: Tensor
    scales: Tensor

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        bits: Bits,
        blocks: Sequence[Blocks | None] = (),
    ) -> None:
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.out_features = sum(map(len, weights))
        self.bits: Bits = 4 if bits == 4 and all(map(packs_in_four_bits, weights)) else 8
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        self.native: NativeProduct | None = None
        inputs = weights[0].shape[1]
        native = native_runs() and packs(self.out_features, inputs)
        self.few_rows, packed, scales = few_rows(), torch.empty(0), torch.empty(0)
        if self.bits == 4:
            known = [b or Blocks.rounded(w) for b, w in zip(blocks or [None] * len(weights), weights, strict=True)]
            joined = Blocks.joined(known)
            if native and _in_float16(joined.step):
                self.native = NativeProduct(joined.levels, joined.step, joined.low, self.bias)
            else:
                packed, scales = _four_bits(joined)
        else:
            levels, step = (
                map(torch.cat, zip(*map(_eight_bit_blocks, weights), strict=True)) if native else (None, None)
            )
            if levels is not None and step is not None and _in_float16(step):
                self.native = NativeProduct(levels, step, None, self.bias)
            elif inputs % 16 == 0:
                packed, scales = map(torch.cat, zip(*map(_eight_bits, weights), strict=True))
            else:
                self.few_rows = 0  # torch's eight-bit product is wrong for such inputs: the wide weights do it all
        self.register_buffer("packed", packed if self.native is None else self.native.packed)
        self.register_buffer("scales", scales)
        self.wide_dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        self._ordered: Tensor | None = None
        self._wide = weights
        if multiplies_bfloat16():
            self._wide = []
            self._ordered = torch.ops.mkldnn._reorder_linear_weight(torch.cat([w.bfloat16() for w in weights]))

    @property
    def is_wide(self) -> bool:
        """Whether there is a ``wide`` product."""
        return self._ordered is not None

    def wide(self, rows: Tensor) -> Tensor:
        """[M, K] to [M, N] bfloat16, from the weights that are laid out for it."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._ordered, None, "none", [], "")
        return out if self.bias is None else out.add_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], of the same type."""
        rows = x.reshape(-1, x.shape[-1])
        out = self._few(rows) if len(rows) <= self.few_rows else self.many(rows)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def _few(self, rows: Tensor) -> Tensor:
        if self.native is not None:
            return self.native(rows.float())
        if self.bits == 4:
            out = torch._weight_int4pack_mm_for_cpu(rows.bfloat16(), self.packed, GROUP, self.scales)
        else:
            out = torch._weight_int8pack_mm(rows.bfloat16(), self.packed, self.scales)
        return out if self.bias is None else out + self.bias

    def many(self, rows: Tensor) -> Tensor:
        """[M, K] to [M, N] with the wide weights, of their type."""
        if self.is_wide:
            return self.wide(rows.bfloat16())
        given = rows.to(self.wide_dtype)
        products = [linear(given, weight) for weight in self._wide]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self.bias is None else out + self.bias


class Siblings:
    """Linear layers that are asked for the same input one after the other: whoever is first has all computed."""

    def __init__(self, product: PackedLinear, sizes: Sequence[int]) -> None:
        self.product = product
        self.parts = [_Part(self, number) for number in range(len(sizes))]
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._left: dict[int, Tensor] = {}  # outputs that were not asked for yet

    def take(self, number: int, x: Tensor) -> Tensor:
        """The output of one layer; it is kept until it was asked for once."""
        if x is not self._input or number not in self._left:
            self._input = x
            self._left = dict(enumerate(self.product(x).split(self._sizes, dim=-1)))
        found = self._left.pop(number)
        if not self._left:
            self._input = None
        return found


class _Part(nn.Module):
    """One of several siblings, in the place of its layer."""

    def __init__(self, siblings: Siblings, number: int) -> None:
        super().__init__()
        if number == 0:
            self.product = siblings.product  # so that it is found in the model, once
        self.siblings, self._number = siblings, number

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return self.siblings.take(self._number, x)


def product_of(layers: Sequence[nn.Module]) -> PackedLinear | None:
    """What computes just these layers of one input side by side; None where no packed product does."""
    first = layers[0]
    if isinstance(first, _Part):
        return first.product if len(first.siblings.parts) == len(layers) else None
    return first if isinstance(first, PackedLinear) and len(layers) == 1 else None


def _four_bits(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """What ``_weight_int4pack_mm_for_cpu`` takes: it computes (level - 8) x scale + zero."""
    packed = torch._convert_weight_to_int4pack_for_cpu(blocks.levels.to(torch.int32), 1)
    zero = blocks.low + LEVELS // 2 * blocks.step
    return packed, torch.stack((blocks.step, zero), dim=-1).transpose(0, 1).bfloat16().contiguous()


def _eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits with one scale for each row [N]; rounding uses the scale as it is stored."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=-1) / 127).bfloat16()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    return (wide * inverse[:, None]).round().clamp(-128, 127).to(torch.int8), scales


def _in_float16(step: Tensor) -> bool:
    """Whether steps keep three digits in float16."""
    return bool(((step == 0) | ((step > 4e-6) & (step < 6e4))).all())


def _eight_bit_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Eight bits with a step for each 32 weights of a row [N, K/32], as in GGUF's Q8_0, which loses nothing by it."""
    grouped = weight.float().view(len(weight), -1, GROUP)
    step = grouped.abs().amax(dim=-1) / 127
    if _in_float16(step):  # as they are kept
        step = step.half().float()
    inverse = torch.where(step > 0, 1 / step, 0.0)
    return (grouped * inverse[..., None]).round().clamp(-127, 127).to(torch.int8).flatten(-2), step


def pack(model: Any, bits: Bits, folder: Path | None = None) -> None:
    """Puts a ``PackedLinear`` in the place of every linear layer of a model in float32 on the CPU.

    The output layer is held in eight bits, also where the others are in four.

    Args:
        model: of transformers.
        bits: of the packed form.
        folder: with the four-bit blocks, if it holds any; elsewhere weights are rounded.
    """
    path = None if folder is None or bits == 8 else folder / BLOCKS
    known = load_file(path) if path is not None and path.is_file() else {}
    output = model.get_output_embeddings()
    for names in _families(model):
        layers = [model.get_submodule(name) for name in names]
        blocks = [Blocks.of_tensors(known, name) if f"{name}.levels" in known else None for name in names]
        product = PackedLinear(layers, 8 if layers[0] is output else bits, blocks)
        parts = [product] if len(names) == 1 else Siblings(product, [len(layer.weight) for layer in layers]).parts
        for name, part in zip(names, parts, strict=True):
            model.set_submodule(name, part)


def _families(model: Any) -> list[list[str]]:
    """The names of all linear layers, those together that a forward hands the same input."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    families: list[list[str]] = []
    for name in names:
        parent, _, own = name.rpartition(".")
        group = next((group for group in _SAME_INPUT if own in group), ())
        same = [f"{parent}.{other}" for other in group if f"{parent}.{other}" in names]
        if len({model.get_submodule(other).bias is None for other in same}) > 1:
            same = []
        if not same or name == same[0]:
            families.append(same or [name])
    return families


def save_blocks(model: Any, folder: Path) -> bool:
    """Writes the four-bit blocks that a model's linear layers are made of; False where one is not made of any."""
    output = model.get_output_embeddings()
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not output:
            blocks = Blocks.found(layer.weight.detach())
            if blocks is None:
                return False
            tensors |= blocks.tensors(name)
    if not tensors:
        return False
    save_file(tensors, folder / BLOCKS)
    return True
