"""The forward of models of Llama's shape over the native kernels, where their weights are packed on the CPU.

A few tokens, of one row or of several, are a single call. A piece of many has its wide products made by torch, and only
what lies between them here. What is neither goes through the model's own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memstream.kernels.native import MOST_ROWS, Layer, NativeDecode, native_runs, pieces
from memstream.kernels.segment_attention import flash, runs
from memstream.models.packed import PackedLinear, product_of
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.step import PARTS, Step

_SHAPE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a decoder layer is made of."""

    query_key_value: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    before: Tensor
    between: Tensor
    of_query: Tensor | None
    of_key: Tensor | None
    width: int | None
    turning: bool


class NativeModel:
    """A model as the native kernels see it.

    Args:
        model: of transformers.
        rope: its rotary embedding.
        layers: of the model.
        head: its output layer.
    """

    def __init__(self, model: Any, rope: Rope, layers: list[_Layer], head: PackedLinear) -> None:
        self._config, self._body = model.config, model.base_model
        self._embed, self._rotate = model.get_input_embeddings(), model.base_model.rotary_emb
        self._rope, self._layers, self._head = rope, layers, head
        self._norm: Tensor = self._body.norm.weight.detach()
        self._epsilon: float = self._body.norm.variance_epsilon
        self._scaling: float = self._body.layers[0].self_attn.scaling
        self._native_layers = [layer for layer in map(_native_layer, layers) if layer is not None]
        whole_vectors = not (len(self._norm) % pieces.LANES or self._config.intermediate_size % pieces.LANES)
        self._takes_pieces = whole_vectors and all(
            product.is_wide
            for layer in layers
            for product in (layer.query_key_value, layer.out, layer.gate_up, layer.down)
        )

    def takes(self, step: Step) -> bool:
        """Whether ``hidden`` computes this step."""
        return self.is_few(step) or self._is_coarse(step)

    def is_few(self, step: Step) -> bool:
        """Whether this step is a single call, which ``logits`` makes too."""
        whole = self._head.native is not None and len(self._native_layers) == len(self._layers)
        return whole and step.slots.numel() <= MOST_ROWS and step.cache.dtype == torch.float32

    def _is_coarse(self, step: Step) -> bool:
        return self._takes_pieces and step.products is torch.bfloat16 and step.cache.dtype == torch.float32

    def hidden(self, step: Step) -> Tensor:
        """The last hidden states [B, n, E] float32 of a step that it ``takes``."""
        return self._few(step, None) if self.is_few(step) else self._piece(step)

    def logits(self, step: Step, logits: Tensor) -> None:
        """Writes what the model says after each token of a step that ``is_few``: [B, n, V] float32."""
        self._few(step, logits)

    def _few(self, step: Step, logits: Tensor | None) -> Tensor:
        step.prepare()
        x: Tensor = self._embed(step.tokens)
        cos, sin = (part[:, :, None] for part in self._turn(x, step))  # [B, n, 1, D]
        on_cos, on_sin, _ = step.turns(self._rope)
        on_cos, on_sin = on_cos[:, None], on_sin[:, None]  # [B, 1, P, D]
        # one turn after another: x -> c x + s P x, where P swaps pairs and P s P = -s
        both_cos = torch.cat((cos, cos * on_cos - sin * on_sin), dim=2)
        both_sin = torch.cat((sin, sin * on_cos + cos * on_sin), dim=2)
        decode = self._decoder(step.cache)
        decode(x, step.rows, step.positions, step.slots, step.parts, both_cos, both_sin, logits)
        return x

    def _decoder(self, cache: Cache) -> NativeDecode:
        found: NativeDecode | None = cache.of_addresses.get(self)
        if found is None:
            assert self._head.native is not None
            found = cache.of_addresses[self] = NativeDecode(
                self._native_layers,
                self._norm,
                self._head.native,
                cache.keys,
                cache.values,
                heads=self._config.num_attention_heads,
                inner=self._config.intermediate_size,
                parts=PARTS,
                epsilon=self._epsilon,
                scaling=self._scaling,
            )
        return found

    def _piece(self, step: Step) -> Tensor:
        step.prepare()
        x = self._embed(step.tokens)
        shape = x.shape
        alike = runs(step.rows, step.positions, step.parts)
        shifts = [list(dict.fromkeys((0, *(part[3] for part in run.parts if part[1])))) for run in alike]
        spread = pieces.Spread(
            step.rows,
            step.slots,
            self._turn(x, step),
            self._turn_on(step, [run.alike for run in alike], shifts),
            heads=self._config.num_attention_heads,
            keys=step.cache.keys[0],
            epsilon=self._epsilon,
        )
        attend = partial(flash.attend, scaling=self._scaling, products=torch.bfloat16)
        x, add = x.view(-1, shape[-1]), None
        for index, layer in enumerate(self._layers):
            joint = layer.query_key_value.wide(pieces.add_norm(x, add, layer.before, self._epsilon))
            keys, values = step.cache.keys[index], step.cache.values[index]
            queries = spread(joint, keys, values, of_query=layer.of_query, of_key=layer.of_key, turning=layer.turning)
            attended = torch.empty(shape[0], shape[1], *queries.shape[2::2], dtype=torch.bfloat16)
            for run, of_run in zip(alike, shifts, strict=True):
                stored = slice(run.row, run.row + run.alike.stop - run.alike.start)
                attended[run.alike] = attend(
                    {shift: queries[s, run.alike] for s, shift in enumerate(of_run)},
                    (keys[stored], None),
                    (values[stored], None),
                    [part for part in run.parts if part[1]],
                    position=run.position,
                    width=layer.width,
                ).transpose(1, 2)
            out = layer.out.wide(attended.view(len(x), -1))
            gated = pieces.gate(layer.gate_up.wide(pieces.add_norm(x, out, layer.between, self._epsilon)))
            add = layer.down.wide(gated)
        x += add
        return self._body.norm(x).view(shape)  # type: ignore[no-any-return]

    def _turn(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Cos and signed sin of the step's stored positions, [B, n, D] each."""
        cos, sin = self._rotate(x, position_ids=step.position_ids)
        return cos, sin * self._rope.sign

    def _turn_on(self, step: Step, alike: list[slice], shifts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Cos and signed sin of the shifts of each row, [B, S, D] each; rows with fewer are filled up."""
        by = torch.zeros(len(step.rows), max(map(len, shifts)), 1, dtype=torch.int32)
        for rows, of_run in zip(alike, shifts, strict=True):
            by[rows, : len(of_run), 0] = torch.tensor(of_run, dtype=torch.int32)
        cos, sin = torch.empty(2, *by.shape[:2], len(self._rope.sign), dtype=torch.float32)
        self._rope.turns(by, torch.empty(cos.shape, dtype=torch.float64), cos, sin)
        return cos, sin


def _native_layer(layer: _Layer) -> Layer | None:
    query_key_value, out = layer.query_key_value.native, layer.out.native
    gate_up, down = layer.gate_up.native, layer.down.native
    if query_key_value is None or out is None or gate_up is None or down is None:
        return None
    return Layer(
        query_key_value,
        out,
        gate_up,
        down,
        before=layer.before,
        between=layer.between,
        of_query=layer.of_query,
        of_key=layer.of_key,
        width=layer.width,
        turning=layer.turning,
    )


def native_model(model: Any, ropes: list[Rope]) -> NativeModel | None:
    """A model of transformers for the native kernels; None where its own forward is all there is."""
    config = model.config
    if not _is_stock(model) or any(_of_other_type(p) for p in (model.get_input_embeddings(), *_norms(model))):
        return None
    turning = {rope for rope in ropes if rope.turning}
    head = product_of([model.get_output_embeddings()])
    if config.model_type not in _SHAPE or head is None or len(turning) != 1 or config.hidden_act != "silu":
        return None
    if not native_runs():
        return None
    found = [_layer(layer, rope) for layer, rope in zip(model.base_model.layers, ropes, strict=True)]
    layers = [layer for layer in found if layer is not None]
    dim = len(ropes[0].sign)
    if len(layers) < len(found) or dim % pieces.LANES or dim > pieces.WIDEST_HEAD:
        return None
    return NativeModel(model, turning.pop(), layers, head)


def _norms(model: Any) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("norm")]


def _of_other_type(module: nn.Module) -> bool:
    return any(p.dtype != torch.float32 or not p.is_contiguous() for p in module.parameters())


def _is_stock(model: Any) -> bool:
    """Whether all of a model is transformers' own, and nobody listens to it: then its forward is known."""
    ours = ("transformers.", "torch.", "memstream.")
    return all(
        type(module).__module__.startswith(ours) and not module._forward_hooks and not module._forward_pre_hooks
        for module in model.modules()
    )


def _layer(layer: Any, rope: Rope) -> _Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    query_key_value = product_of([attention.q_proj, attention.k_proj, attention.v_proj])
    out, gate_up = product_of([attention.o_proj]), product_of([mlp.gate_proj, mlp.up_proj])
    down = product_of([mlp.down_proj])
    if query_key_value is None or out is None or gate_up is None or down is None:
        return None
    is_mistral = attention.config.model_type == "mistral"
    of_query, of_key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        query_key_value,
        out,
        gate_up,
        down,
        before=layer.input_layernorm.weight.detach(),
        between=layer.post_attention_layernorm.weight.detach(),
        of_query=None if of_query is None else of_query.weight.detach(),
        of_key=None if of_key is None else of_key.weight.detach(),
        width=attention.config.sliding_window if is_mistral else getattr(attention, "sliding_window", None),
        turning=rope.turning,
    )
