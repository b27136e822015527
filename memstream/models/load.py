"""Loads a model and its tokenizer by name: an alias, a GGUF file, a local folder, or a hub id."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from memstream.config import WeightsChoice
from memstream.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError
from memstream.models import hub
from memstream.models.catalog import CATALOG, suggestion
from memstream.models.checksum import sha256_of
from memstream.models.convert import ensure_converted
from memstream.models.packed import BLOCKS, pack
from memstream.models.wheels import GgufSource, find_gguf

_log = logging.getLogger(__name__)
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to compute, in evaluation mode.

    Attributes:
        model: the causal language model of transformers.
        tokenizer: its tokenizer.
        name: the name it was asked for by.
        fingerprint: 64 hex digits over samples of the weights, their dtype, the configuration and the tokenizer.
        weights: the form they are held in.
        source: where it was read from: a folder, or ``hub:ID@REVISION``.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    weights: str
    source: str


def load_model(
    name: str,
    *,
    device: str | torch.device = "auto",
    weights: WeightsChoice = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a causal language model with its tokenizer; converts a GGUF file on first use.

    Args:
        name: an alias such as ``smollm2-135m``, a ``.gguf`` file, a folder, or a hub id such as ``Qwen/Qwen3-0.6B``.
        device: ``"auto"`` takes CUDA where there is a device, else the CPU.
        weights: the form they are held in. ``auto``: on the CPU four bits where the checkpoint was made of such blocks,
            else float32; elsewhere what the checkpoint is stored in. ``int8`` and ``int4`` (CPU only) round what is not
            in that form already; see packed.py.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: lets a checkpoint run its own Python code.

    Raises:
        ModelNotFoundError: no such model, not reachable within seconds, or its files are damaged.
        UnsupportedModelError: transformers knows no causal language model of its type.
        ConfigError: device or weights is not one, or they do not go together.
        ModelError: the code of the checkpoint is not trusted, or a conversion cannot be written.
    """
    place = _device(device)
    wanted = _dtype(weights, place)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    folder = _local_folder(name)
    if folder is not None:
        model, tokenizer = _read(str(folder), wanted, options, name)
        source = str(folder)
    else:
        revision = revision or "main"
        model, tokenizer = _read_hub(name, wanted, {**options, "revision": revision})
        source = f"hub:{name}@{hub.cached_commit(name, revision) or revision}"
    model.requires_grad_(False).eval().to(place)
    if weights == "auto" and place.type == "cpu" and folder is not None and (folder / BLOCKS).is_file():
        weights = "int4"
    fingerprint = fingerprint_of(model, tokenizer)
    if weights in ("int8", "int4"):  # what packs them does not change what they are
        fingerprint = hashlib.sha256(f"{fingerprint}:{weights}".encode()).hexdigest()
        pack(model, 8 if weights == "int8" else 4, folder)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        fingerprint=fingerprint,
        weights=str(model.dtype).removeprefix("torch.") if weights == "auto" else weights,
        source=source,
    )


def read_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Reads the configuration of a causal language model; its weights are not loaded.

    Args:
        name: as for ``load_model``.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: lets a checkpoint run its own Python code.

    Raises:
        ModelNotFoundError: no such model, or its hub cannot be reached.
        UnsupportedModelError: transformers does not know its type.
        ModelError: the code of the checkpoint is not trusted, or a conversion cannot be written.
    """
    folder = _local_folder(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    if folder is None:
        options["revision"] = revision or "main"
        if hub.cached_commit(name, options["revision"]) is None:
            hub.require_network(name)
            options["local_files_only"] = False
    with quiet_loading():
        return _read_config(name if folder is None else str(folder), options, name)


def _local_folder(name: str) -> Path | None:
    """Returns the folder to read for an alias, a GGUF file or a folder; None when ``name`` can only be a hub id."""
    path = Path(name).expanduser()
    if name.lower() in CATALOG:
        model = CATALOG[name.lower()]
        if model.kind != "chat":
            raise ModelNotFoundError(f"{name!r} is an embedder, not a chat model{suggestion(name)}")
        return ensure_converted(find_gguf(model))
    if name.lower().endswith(".gguf"):
        return ensure_converted(_gguf_file(path))
    if path.is_dir():
        _check_folder(path)
        return path
    if path.is_file():
        raise ModelNotFoundError(f"{name} is a file, but not a .gguf file; give a .gguf file or a model's folder")
    hub.check_id(name)
    return None


def _read_hub(name: str, dtype: torch.dtype | str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Reads a hub id from the local cache, else over the network when the hub answers."""
    if hub.cached_commit(name, options["revision"]) is not None:
        try:
            return _read(name, dtype, options, name)
        except ModelNotFoundError as error:
            _log.info("the cached copy of %s is not complete (%s)", name, error)
    hub.require_network(name)
    _log.info("fetching %s from the hub", name)
    return _read(name, dtype, {**options, "local_files_only": False}, name)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"device is {str(device)!r}, which cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return place


def _dtype(weights: str, place: torch.device) -> torch.dtype | str:
    """The type they are loaded in."""
    if weights not in get_args(WeightsChoice):
        raise ConfigError(f"weights is {weights!r}; allowed: {', '.join(map(repr, get_args(WeightsChoice)))}")
    if weights in ("int8", "int4") and place.type != "cpu":
        raise ConfigError(f"weights is {weights!r}, which is for the CPU; on {place.type} use 'auto' or 'bfloat16'")
    if weights in ("float32", "bfloat16", "float16"):
        return getattr(torch, weights)  # type: ignore[no-any-return]
    return torch.float32 if place.type == "cpu" else "auto"


def _gguf_file(path: Path) -> GgufSource:
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}")
    path = path.resolve()
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFoundError(
                f"{path} is not a GGUF file (its first four bytes are not GGUF); download it again"
            )
    return GgufSource(name=path.stem, parts=(path,), sha256=sha256_of(path), n_bytes=path.stat().st_size)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        inside = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"; it holds {inside[0]}, give that file instead" if inside else "; is it a model's folder?"
        raise ModelNotFoundError(f"the folder {folder} has no config.json{hint}")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keeps transformers from drawing progress bars and warning on stderr; puts its settings back.

    These settings are the whole process's, so one model loads at a time.
    """
    with _LOADING:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def _read(origin: str, dtype: torch.dtype | str, options: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Reads configuration, weights and tokenizer, and turns what goes wrong into our errors."""
    with quiet_loading():
        config = _read_config(origin, options, name)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                origin, config=config, dtype=dtype, output_loading_info=True, **options
            )
        except SafetensorError as error:
            raise ModelNotFoundError(
                f"the weights of {name!r} are damaged or half downloaded ({error}); download them again"
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise _explain(error, name, "weights", config.model_type) from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ModelNotFoundError(
                f"the weights of {name!r} lack {len(missing)} tensors, such as {missing[0]}; download them again"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(origin, **options)
        except (OSError, ValueError, KeyError) as error:
            raise _explain(error, name, "tokenizer") from error
    return model, tokenizer


def _read_config(origin: str, options: dict[str, Any], name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(origin, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _explain(error, name, "configuration") from error


def _explain(error: Exception, name: str, what: str, model_type: str = "unknown") -> ModelError:
    """Turns an error of transformers into one of ours with one clear sentence."""
    text = " ".join(str(error).split())
    short = text if len(text) <= 200 else text[:197] + "..."
    if isinstance(error, OSError):
        return ModelNotFoundError(f"cannot read the {what} of {name!r}: {short}")
    if "trust_remote_code" in text:
        return ModelError(
            f"{name!r} brings Python code of its own; read it, then pass trust_remote_code=True to run it"
        )
    if "Unrecognized configuration class" in text:
        return UnsupportedModelError(
            f"{name!r} is a model of type {model_type!r}, which is not a causal language model in transformers"
        )
    if "model type" in text or "Unrecognized model" in text or "model_type" in text:
        return UnsupportedModelError(f"transformers does not know the model type of {name!r}: {short}")
    return ModelNotFoundError(f"cannot read the {what} of {name!r}: {short}")


def fingerprint_of(model: Any, tokenizer: Any) -> str:
    """Returns 64 hex digits that identify what a model computes and how its text becomes tokens.

    Of each parameter it takes name, shape, dtype and three samples of its bytes (begin, middle, end), so that a model
    of any size takes well under a second; a training step or another quantisation changes some of them.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        size = flat.numel()
        for start in {0, max(0, size // 2 - 128), max(0, size - 256)}:
            digest.update(flat[start : start + 256].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digest.update(text.encode())
    digest.update(str(getattr(tokenizer, "chat_template", "")).encode())
    return digest.hexdigest()
