"""Real conversions: a tiny Llama written as GGUF comes back with the same logits; damaged files are told apart."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memstream.errors import ModelNotFoundError, UnsupportedModelError
from memstream.models import LoadedModel, load_model

HEADS, KV_HEADS, LAYERS, HIDDEN = 4, 2, 2, 64
# GPT-2 writes bytes as printable characters; a space is Ġ. Every byte is a token, and so are two spaces.
SPECIAL = ["<|end|>", "<|turn|>", "<|stop|>"]


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(len(others))]


TOKENS = [*SPECIAL, *byte_alphabet(), "ĠĠ", "th", "the"]
MERGES = ["Ġ Ġ", "t h", "th e"]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|stop|>{% endfor %}"


def random_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorders the rows of a query or key projection from halves (transformers) to pairs (GGUF)."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(path: Path, model: LlamaForCausalLM, *, split: str = "smollm", skip: str = "") -> None:
    """Writes the model in float32, named and laid out as llama.cpp does."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    # "<|turn|>" is marked as defined by the user (4), not as control (3), as some files in the wild do.
    writer.add_token_types([3, 4, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            target = f"blk.{layer}.{names[part]}"
        else:
            target = names[stem]
        if target.endswith("attn_q"):
            data = interleaved(data, HEADS)
        elif target.endswith("attn_k"):
            data = interleaved(data, KV_HEADS)
        if target != skip:
            writer.add_tensor(f"{target}.weight", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose converted models are not shared."""
    monkeypatch.setenv("MEMSTREAM_HOME", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture(scope="module")
def converted(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf", original)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTREAM_HOME", str(folder / "home"))
        return load_model(str(folder / "tiny.gguf"), device="cpu")


def test_logits_survive_the_conversion(original: LlamaForCausalLM, converted: LoadedModel) -> None:
    ids = torch.randint(3, len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = original(ids).logits, converted.model(ids).logits
    assert torch.equal(expected, found)
    assert expected.abs().max() > 1  # not the logits of an empty model


def test_the_model_is_left_ready_to_compute(converted: LoadedModel) -> None:
    assert not converted.model.training
    assert not any(p.requires_grad for p in converted.model.parameters())
    assert {p.dtype for p in converted.model.parameters()} == {torch.float32}
    assert converted.model.generation_config.eos_token_id == 2


def test_digits_stand_alone(converted: LoadedModel) -> None:
    pieces = converted.tokenizer.convert_ids_to_tokens(
        converted.tokenizer("the  12", split_special_tokens=True).input_ids
    )
    assert pieces == ["the", "ĠĠ", "1", "2"]


def test_typed_text_never_becomes_a_control_token(converted: LoadedModel) -> None:
    tokenizer = converted.tokenizer
    text = "<|turn|>system\n<|stop|><|end|>"
    typed = tokenizer(text, split_special_tokens=True).input_ids
    assert not {0, 1, 2} & set(typed)
    assert tokenizer.decode(typed) == text
    assert tokenizer.apply_chat_template([{"role": "u", "content": "x"}], return_dict=False)[0] == 1


def test_every_byte_has_a_token(converted: LoadedModel) -> None:
    text = "é\x00😀\u2028ÿ\r\n\t"
    assert converted.tokenizer.decode(converted.tokenizer(text, split_special_tokens=True).input_ids) == text


def test_a_half_downloaded_file_is_told(original: LlamaForCausalLM, tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", original)
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(data[: len(data) - 500])
    with pytest.raises(ModelNotFoundError, match=r"half\.gguf: .*download it again"):
        load_model(str(tmp_path / "half.gguf"), device="cpu")
    assert [p for p in (own_home / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_a_file_that_lacks_a_weight_is_told(original: LlamaForCausalLM, tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "thin.gguf", original, skip="blk.1.ffn_up")
    with pytest.raises(ModelNotFoundError, match=r"1 weights are missing, such as model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path / "thin.gguf"), device="cpu")


def test_an_unknown_way_of_splitting_text_is_refused(
    original: LlamaForCausalLM, tmp_path: Path, own_home: Path
) -> None:
    write_gguf(tmp_path / "odd.gguf", original, split="martian")
    with pytest.raises(UnsupportedModelError, match="splits text as 'martian'"):
        load_model(str(tmp_path / "odd.gguf"), device="cpu")


def test_two_processes_at_once_convert_once(original: LlamaForCausalLM, tmp_path: Path, own_home: Path) -> None:
    file = tmp_path / "shared.gguf"
    write_gguf(file, original)
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO); from pathlib import Path\n"
        "from memstream.models.checksum import sha256_of\n"
        "from memstream.models.convert import ensure_converted\n"
        "from memstream.models.wheels import GgufSource\n"
        "f = Path(sys.argv[1])\n"
        "s = GgufSource(name='shared', parts=(f,), sha256=sha256_of(f), n_bytes=f.stat().st_size)\n"
        "print(ensure_converted(s))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def start(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(file)], capture_output=True, text=True, env=environment, check=True
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first.stdout == second.stdout
    assert Path(first.stdout.strip(), "model.safetensors").is_file()
    assert (first.stderr + second.stderr).count("converting shared once") == 1
