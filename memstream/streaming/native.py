"""A decode step in one call of the native kernels, for models of Llama's shape with packed weights on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memstream.kernels.native import MOST_ROWS, Layer, NativeDecode, NativeProduct, native_runs
from memstream.models.packed import native_product
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.step import PARTS, Step

_SHAPE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


class NativeStep:
    """The decode step of B rows of one cache.

    Args:
        model: of transformers.
        rope: its rotary embedding.
        decode: the same as the kernels see it.
    """

    def __init__(self, model: Any, rope: Rope, decode: NativeDecode) -> None:
        self._embed, self._rotate = model.get_input_embeddings(), model.base_model.rotary_emb
        self._rope, self._decode = rope, decode

    def __call__(self, step: Step, logits: Tensor) -> None:
        """Writes the step's keys and values into its cache, and ``logits`` [B, V] float32."""
        step.prepare()
        x = self._embed(step.tokens)
        cos, sin = self._rotate(x, position_ids=step.position_ids)  # [B, 1, D] each
        sin = sin * self._rope.sign
        on_cos, on_sin, _ = step.turns(self._rope)  # [B, P, D]
        # one turn after another: x -> c x + s P x, where P swaps pairs and P s P = -s
        both_cos = torch.cat((cos, cos * on_cos - sin * on_sin), dim=1)
        both_sin = torch.cat((sin, sin * on_cos + cos * on_sin), dim=1)
        self._decode(x[:, 0], step.rows, step.positions, step.slots[:, 0], step.parts, both_cos, both_sin, logits)


def native_step(model: Any, ropes: list[Rope], cache: Cache, *, rows: int) -> NativeStep | None:
    """The native step of a model, or None where its own forward has to be run."""
    config = model.config
    if config.model_type not in _SHAPE or cache.dtype != torch.float32 or cache.keys[0].is_cuda:
        return None
    turning = {rope for rope in ropes if rope.turning}
    head = native_product([model.get_output_embeddings()])
    if head is None or rows > MOST_ROWS or len(turning) != 1 or config.hidden_act != "silu" or not native_runs():
        return None
    body = model.base_model
    layers = [_layer(layer, rope) for layer, rope in zip(body.layers, ropes, strict=True)]
    whole = [layer for layer in layers if layer is not None]
    if len(whole) < len(layers):
        return None
    decode = NativeDecode(
        whole,
        body.norm.weight.detach(),
        head,
        cache.keys,
        cache.values,
        heads=config.num_attention_heads,
        inner=config.intermediate_size,
        parts=PARTS,
        epsilon=body.norm.variance_epsilon,
        scaling=body.layers[0].self_attn.scaling,
        rows=rows,
    )
    return NativeStep(model, turning.pop(), decode)


def _layer(layer: Any, rope: Rope) -> Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    products: list[NativeProduct] = []
    for several in (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ):
        product = native_product(several)
        if product is None:
            return None
        products.append(product)
    is_mistral = attention.config.model_type == "mistral"
    of_query, of_key = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        *products,
        before=layer.input_layernorm.weight.detach(),
        between=layer.post_attention_layernorm.weight.detach(),
        of_query=None if of_query is None else of_query.weight.detach(),
        of_key=None if of_key is None else of_key.weight.detach(),
        width=attention.config.sliding_window if is_mistral else getattr(attention, "sliding_window", None),
        turning=rope.turning,
    )
