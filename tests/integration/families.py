"""Tiny random models of every supported family, built from configs: float32, two layers, the family's own quirks."""

from typing import Any

import torch
import transformers

VOCABULARY = 97
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


#: name -> (config class, settings beyond the tiny ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_llama3": (
        "LlamaConfig",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512),
    ),
    "llama_linear": ("LlamaConfig", _rope("linear", factor=4.0)),
    "llama_yarn": ("LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "llama_dynamic": ("LlamaConfig", _rope("dynamic", factor=2.0)),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_sliding": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 4096, "sliding_window": None}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 1024,
            "sliding_window": None,
            **_rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[2.0, 3.0, 4.0, 5.0],
                original_max_position_embeddings=1024,
            ),
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, **_rope("default", partial_rotary_factor=0.5)}),
    "glm": ("GlmConfig", {"head_dim": 16, **_rope("default", partial_rotary_factor=0.5)}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "use_sliding_window": False, "layer_types": None}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            **_rope("yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=32.0, beta_slow=1.0),
        },
    ),
}


def tiny_model(name: str, *, layers: int = 2, seed: int = 0) -> Any:
    """A random model of a family; with one layer, it is one whose attention is the family's full one."""
    kind, settings = FAMILIES[name]
    values = {**_TINY, **settings}
    if layers == 1:
        values["num_hidden_layers"] = 1
        for key in ("layer_types", "no_rope_layers"):
            if values.get(key):
                values[key] = values[key][-1:] if key == "layer_types" else values[key][:1]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # larger than the initialiser's, so that attention is far from uniform
        for name_, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
            elif name_.endswith("sinks"):
                parameter.normal_()
    return model
