"""A Hugging Face causal language model, checked for streaming and run on pieces of tokens over a fixed cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from memstream.config import CacheConfig
from memstream.errors import ConfigError, UnsupportedModelError
from memstream.kernels.dispatch import explain as explain_kernels
from memstream.kernels.dispatch import triton_runs
from memstream.kernels.rebase import rebase
from memstream.kernels.token_nll import product_nll, token_nll
from memstream.models.packed import PackedLinear, rounds_products
from memstream.streaming.attention import NAME
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.layout import Arc, Piece
from memstream.streaming.native import native_model
from memstream.streaming.step import Step

__all__ = ["StreamingModel", "check_supported", "explain_kernels", "sliding_layers"]

#: Model types whose logits are tested against the stock model; True where rotary pairs are neighbours.
SUPPORTED = {
    "gemma2": False,
    "gemma3_text": False,
    "glm": True,
    "gpt_neox": False,
    "gpt_oss": False,
    "llama": False,
    "mistral": False,
    "phi3": False,
    "qwen2": False,
    "qwen3": False,
    "smollm3": False,
}

_FEW_TOKENS = 16  # in a forward; with more, attention's products are rounded like the others

_ABSOLUTE = "it adds a learned position to every token, so a cached token cannot move closer"
_ALIBI = "its attention adds ALiBi biases, which memstream does not compute yet"
_RECURRENT = "it has recurrent layers, whose state cannot forget single tokens"
_MLA = "its latent attention (MLA) caches keys without a rotary part that could be turned"
_MROPE = "its rotary positions have several axes (M-RoPE)"
REFUSED = {
    **dict.fromkeys(("gpt2", "opt", "gpt_neo", "gpt_bigcode", "xglm", "biogpt"), _ABSOLUTE),
    **dict.fromkeys(("mpt", "bloom"), _ALIBI),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "zamba2", "qwen3_next"), _RECURRENT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _MLA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _MROPE),
    **dict.fromkeys(("llama4", "llama4_text"), "its attention temperature reads the length of a growing cache"),
    "gemma3": "it is the multimodal wrapper; load its text model (Gemma3ForCausalLM)",
}


def check_supported(config: Any) -> None:
    """Checks that a model can be streamed exactly.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    kind = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} cannot be streamed: it is an encoder-decoder model, not a causal one")
    if kind in REFUSED:
        raise UnsupportedModelError(f"{kind} cannot be streamed: {REFUSED[kind]}")
    if kind not in SUPPORTED:
        raise UnsupportedModelError(
            f"{kind} cannot be streamed: memstream has not been tested against it. Tested: {', '.join(SUPPORTED)}"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind} cannot be streamed: this model attends to tokens that follow")


def sliding_layers(config: Any) -> tuple[int, int | None]:
    """How many layers of a model slide, and how many positions each of them sees (None: no layer slides)."""
    width = getattr(config, "sliding_window", None)
    if width is None or getattr(config, "use_sliding_window", True) is False:
        return 0, None
    types = getattr(config, "layer_types", None)
    sliding = types.count("sliding_attention") if types else config.num_hidden_layers
    return sliding, int(width) if sliding else None


class StreamingModel:
    """A model together with what streaming needs to know of it.

    Args:
        model: a ``transformers`` causal language model. Its attention is switched to memstream's; use it through
            this object from now on.
        fingerprint: names the weights; part of every snapshot.

    Raises:
        UnsupportedModelError: for a family whose streaming would be subtly wrong.
        KernelUnavailableError: ``MEMSTREAM_KERNELS`` asks for kernels that cannot run where the model is.
    """

    def __init__(self, model: Any, *, fingerprint: str = "") -> None:
        check_supported(model.config)
        self.config = model.config
        self.fingerprint = fingerprint
        self.model = model.eval()
        self.body = model.base_model
        self._head = model.get_output_embeddings()
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        triton_runs(embedding)
        self.rounds_products = rounds_products(model)
        self.vocabulary: int = self._head.out_features
        self.reads_positions_on_host = _frequency_switch(self.config) is not None
        self.ropes = _ropes(self.body, self.config, self.device)
        self.native = native_model(model, self.ropes)
        model.set_attn_implementation(NAME)
        if self.config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"{self.config.model_type} cannot be streamed: this transformers release does not let its attention be "
                "replaced"
            )

    def new_cache(self, config: CacheConfig, *, rows: int = 1) -> Cache:
        """Allocates the fixed cache for ``rows`` conversations.

        Raises:
            ConfigError: the cache is larger than the positions the model was trained for.
        """
        self.position_limit(config)
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        shapes = [(kv_heads, _head_dim(self.config))] * self.config.num_hidden_layers
        return Cache(shapes, rows=rows, cache_tokens=config.total, dtype=self.kv_dtype(config), device=self.device)

    def kv_dtype(self, config: CacheConfig) -> torch.dtype:
        """The type of the stored keys and values."""
        return self.dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)

    def position_limit(self, config: CacheConfig) -> int:
        """The stored position past which a row is rebased.

        Small positions are the exact ones in float32. Models that pick frequencies by the largest position
        (``dynamic``, ``longrope``) must stay below the length at which they would change them.

        Raises:
            ConfigError: the cache is larger than the model allows.
        """
        trained = int(self.config.max_position_embeddings)
        if config.total > trained:
            raise ConfigError(
                f"CacheConfig.cache_tokens is {config.total}; {self.config.model_type} was trained for {trained} "
                f"positions, so at most {trained} are allowed"
            )
        switch = _frequency_switch(self.config)
        if switch is None:
            return max(4096, 2 * config.total)
        if config.total > switch - config.window // 2:
            raise ConfigError(
                f"CacheConfig.cache_tokens is {config.total}; this model changes its rotary frequencies at position "
                f"{switch}, so at most {switch} less half the window ({config.window // 2}) are allowed"
            )
        return switch

    @torch.inference_mode()
    def forward(
        self, cache: Cache, rows: Sequence[int], pieces: Sequence[Piece], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Computes a piece of n tokens in each of B rows and writes their keys and values into the cache.

        Args:
            cache: the storage.
            rows: B row numbers.
            pieces: B pieces, all of n tokens.
            tokens: B lists of n ids.

        Returns:
            [B, n, E] last hidden states.
        """
        with self.on_device():
            n = len(tokens[0])
            coarse = self.rounds_products and len(rows) * n > _FEW_TOKENS
            step = Step(cache, self.ropes, rows=len(rows), n=n, products=torch.bfloat16 if coarse else None)
            step.fill(rows, pieces, tokens)
            return self.run(step)

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the model's card the current one, which is where kernels are launched; nothing on the CPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run(self, step: Step) -> Tensor:
        """The forward itself, all on the device. Returns [B, n, E] last hidden states."""
        if self.native is not None and self.native.takes(step):
            return self.native.hidden(step)
        step.prepare()
        output = self.body(input_ids=step.tokens, position_ids=step.position_ids, use_cache=False, memstream_step=step)
        return output.last_hidden_state  # type: ignore[no-any-return]

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Turns hidden states [..., E] into logits [..., V]."""
        logits: Tensor = self._head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.inference_mode()
    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood [n] of ``targets`` [n] after hidden states [n, E]; no logits are stored."""
        if isinstance(self._head, PackedLinear):
            product = self._head.many
            return product_nll(
                hidden.to(self._head.wide_dtype), targets, product, self.vocabulary, softcap=self._softcap
            )
        with self.on_device():
            weight = self._head.weight
            return token_nll(hidden.to(weight.dtype), targets, weight, bias=self._head.bias, softcap=self._softcap)

    @torch.inference_mode()
    def rebase(self, cache: Cache, row: int, arcs: Sequence[Arc], back: int) -> None:
        """Turns the keys in ``arcs`` back by ``back`` positions, every layer with its own frequencies."""
        turns = {rope: rope.turn(-back) for rope in set(self.ropes) if rope.turning}
        with self.on_device():
            for keys, scales, rope in zip(cache.keys, cache.key_scales, self.ropes, strict=True):
                if rope.turning:
                    rebase(keys, scales, row, arcs, *turns[rope])


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    """Every table of rotary parameters in a config: one, or one per layer type."""
    table = config.rope_parameters
    return (
        [t for t in table.values() if t] if all(isinstance(t, dict) or t is None for t in table.values()) else [table]
    )


def _frequency_switch(config: Any) -> int | None:
    """The length at which a model would change its rotary frequencies, or None."""
    lengths = [
        int(table.get("original_max_position_embeddings") or config.max_position_embeddings)
        for table in _rope_tables(config)
        if table["rope_type"] in ("dynamic", "longrope")
    ]
    return min(lengths) if lengths else None


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _ropes(body: Any, config: Any, device: torch.device) -> list[Rope]:
    """The rotary embedding of each layer, from the model's own module; layers with the same one share the object."""
    interleaved, dim = SUPPORTED[config.model_type], _head_dim(config)
    types = getattr(config, "layer_types", None)
    without = getattr(config, "no_rope_layers", None)  # SmolLM3: 1 where a layer has rotary positions
    known: dict[str, Rope] = {}
    ropes: list[Rope] = []
    for layer in range(config.num_hidden_layers):
        name = f"{types[layer]}_inv_freq" if types else "inv_freq"
        if not hasattr(body.rotary_emb, name):
            name = "inv_freq"
        if without is not None and not without[layer]:
            name = "none"
        if name not in known:
            original = name.replace("inv_freq", "original_inv_freq")
            inv_freq = torch.empty(0) if name == "none" else getattr(body.rotary_emb, original)
            known[name] = Rope(inv_freq.to(device), dim, interleaved=interleaved)
        ropes.append(known[name])
    return ropes
