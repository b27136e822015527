"""What every test shares: a store of its own, fixed threads and seeds, one real model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports torch, transformers or tokenizers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("MEMSTREAM_KERNELS", None)

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when a kernel is defined, so it comes before their import
    os.environ["TRITON_INTERPRET"] = "1"

from memstream.config import memstream_home
from tests.postgres import new_database, server  # noqa: F401 (fixtures)

if TYPE_CHECKING:
    from memstream.models import LoadedModel

REAL_HOME = memstream_home()


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points MEMSTREAM_HOME to a fresh folder, so that no test touches the store of the person running it.

    Converted models and compiled kernels are shared with the real home through links: they take half a minute, and a
    second in each process.
    """
    folder = tmp_path_factory.mktemp("home")
    for shared in ("models", "native"):
        (REAL_HOME / shared).mkdir(parents=True, exist_ok=True)
        (folder / shared).symlink_to(REAL_HOME / shared)
    monkeypatch.setenv("MEMSTREAM_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Fixes the seed before each test."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Takes back what the command line sets up for its process, so that no later test logs to a closed stream."""
    import logging

    logger = logging.getLogger("memstream")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def _smollm2() -> LoadedModel:
    from memstream.models import load_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTREAM_HOME", str(REAL_HOME))
        return load_model("smollm2-135m", device="cpu", weights="float32")


@pytest.fixture
def smollm2(_smollm2: LoadedModel) -> Iterator[LoadedModel]:
    """SmolLM2-135M-Instruct in float32 on the CPU, with transformers' own attention until the test streams it."""
    attention = _smollm2.model.config._attn_implementation
    yield _smollm2
    _smollm2.model.set_attn_implementation(attention)
