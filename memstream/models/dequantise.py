"""Turns one GGUF file into a folder ``transformers`` loads: runs as a process of its own.

``python -m memstream.models.dequantise FILE FOLDER`` writes ``model.safetensors`` in float32, ``blocks.safetensors``
where the weights were in four bits, ``config.json``, ``generation_config.json`` and the tokenizer's files. It is a
separate process because reading a GGUF file takes several times the model's memory, draws progress bars, and sets
process-wide state of ``transformers``. Its last line on stdout is JSON: ``{"ok": true}`` or
``{"error": kind, "message": text}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# How a vocabulary's merges were learned, by ``tokenizer.ggml.pre``, where transformers 5.24 does not know the name and
# takes GPT-2's split. In the first set every digit stands alone before that split; without it, two spaces before a
# number become two tokens in place of one, which logs are full of.
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_PLAIN_GPT2 = frozenset({"gpt-2", "gpt2", "olmo", "mpt"})


class Refused(Exception):
    """The file cannot be converted; ``kind`` is ``damaged`` or ``unsupported``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_header(file: Path) -> dict[str, Any]:
    """Returns what the conversion needs from the header, after checking that the file is whole.

    Raises:
        Refused: the file is not GGUF, or ends before its last tensor does.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError, OverflowError) as error:
        raise Refused("damaged", f"it is not a whole GGUF file ({error})") from error
    size = file.stat().st_size
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if end == 0 or end > size:
        raise Refused("damaged", f"it ends too early: {size} bytes of at least {end}")
    wanted = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    return {key: field.contents() if (field := reader.fields.get(key)) else None for key in wanted}


def load_tokenizer(file: Path, header: dict[str, Any]) -> Any:
    """Builds the tokenizer, splitting text as the vocabulary was learned.

    Raises:
        Refused: the file names a way of splitting text that is known neither here nor to transformers.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    if header["tokenizer.ggml.model"] == "gpt2":
        backend, split = tokenizer.backend_tokenizer, header["tokenizer.ggml.pre"]
        if split in _DIGITS_THEN_GPT2:
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and split not in _PLAIN_GPT2:
            raise Refused("unsupported", f"its tokenizer splits text as {split!r}, which is not known here")
    _protect_template_tokens(tokenizer)
    return tokenizer


def _protect_template_tokens(tokenizer: Any) -> None:
    """Marks added tokens that the chat template writes as special, so that typed text never becomes one."""
    template = tokenizer.chat_template or ""
    control = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and str(token) and str(token) in template
    ]
    if control:
        tokenizer.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)


def load_dense(file: Path) -> Any:
    """Loads the model with every weight in float32, checks that no weight is missing, and returns it unquantised.

    Raises:
        Refused: transformers cannot read this architecture, or weights are missing.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # since 5.2x the weights may stay packed unless asked otherwise
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        packed, info = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    except (ValueError, NotImplementedError, KeyError) as error:
        raise Refused("unsupported", f"transformers {transformers.__version__} cannot read it: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise Refused("damaged", f"{len(missing)} weights are missing, such as {missing[0]}")

    # A model read from GGUF refuses to be saved; the same weights in a model built from its plain configuration do not.
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(config)
    dense.load_state_dict(packed.state_dict(), strict=True, assign=True)
    dense.tie_weights()
    dense.generation_config = packed.generation_config
    return dense


def convert(file: Path, folder: Path) -> None:
    """Writes the converted model into ``folder``, which must exist.

    Raises:
        Refused: the file is damaged or unsupported.
        OSError: the disk is full or read-only.
    """
    header = read_header(file)
    tokenizer = load_tokenizer(file, header)
    from memstream.models.packed import save_blocks

    model = load_dense(file)
    model.config._name_or_path = ""
    model.save_pretrained(str(folder))
    save_blocks(model, folder)
    tokenizer.save_pretrained(str(folder))


def main(arguments: list[str]) -> int:
    """Runs the conversion for ``FILE FOLDER`` and reports as one line of JSON; returns the exit status."""
    file, folder = map(Path, arguments)
    try:
        convert(file, folder)
    except Refused as refused:
        result = {"error": refused.kind, "message": str(refused)}
    except OSError as error:
        result = {"error": "disk", "message": str(error)}
    else:
        sys.stdout.write('{"ok": true}\n')
        return 0
    sys.stdout.write(json.dumps(result) + "\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
