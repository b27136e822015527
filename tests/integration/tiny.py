"""A tiny chat model and a tiny embedder, built in code: fast enough for thousands of turns."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from memstream import CacheConfig, GenerationConfig

CACHE = CacheConfig(cache_tokens=512, memory_tokens=192, evict_tokens=16, chunk_tokens=64)
SHORT = GenerationConfig(max_new_tokens=6)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Any:
    """Bytes as tokens, so that every text can be written and every character takes one to four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*CONTROL, *alphabet))}
    # Split into words, as real ones do: the library keeps ten thousand of what it has split, and words come back.
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def model(*, seed: int = 0, layers: int = 2) -> Any:
    """A random Llama over the tokenizer's words, sharp enough that replies differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    built = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
    return built


class WordEmbedder:
    """Texts as bags of hashed words: deterministic, and similar texts are near."""

    name = "words"
    dimension = 64

    def __init__(self, fingerprint: str = "words-1") -> None:
        self.fingerprint = fingerprint

    def embed(self, texts: list[str]) -> Any:
        out = np.zeros((len(texts), self.dimension), np.float32)
        for i, text in enumerate(texts):
            for word in text.casefold().split() or [""]:
                digest = hashlib.blake2b(word.strip(".,!?'\"").encode(), digest_size=8).digest()
                out[i, digest[0] % self.dimension] += 1.0
                out[i, digest[1] % self.dimension] += 0.5
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        return out / norms


def stored(path: Path) -> list[tuple[str, str, str]]:
    """Role, text and state of every turn of a store, read without memstream."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("select role, text, state from turns order by id").fetchall()


class Script:
    """A logits processor that has the model say given replies, one after the other, token by token."""

    def __init__(self, *replies: str) -> None:
        self._tokenizer = tokenizer()
        self._left: list[int] = []
        self.say(*replies)

    def say(self, *replies: str) -> None:
        """What it says next, and nothing of what it had left."""
        self._left = [token for reply in replies for token in (*self._ids(reply), self._tokenizer.eos_token_id)]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def __call__(self, ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._left.pop(0)] = 0.0
        return forced
