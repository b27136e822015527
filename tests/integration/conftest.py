"""The tiny model: as an agent, closed after the test, and as a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstream import Agent
from tests.integration import tiny
from tests.integration.scripted import LONG, OFF, WIDE, order_status


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def build(*, store: Any = tmp_path / "store.db", seed: int = 0, **settings: Any) -> Agent:
        settings = {"cache": tiny.CACHE, "generation": tiny.SHORT, "embedder": tiny.WordEmbedder(), **settings}
        agent = Agent(model=tiny.model(seed=seed), tokenizer=tiny.tokenizer(), store=store, **settings)
        made.append(agent)
        return agent

    yield build
    for agent in made:
        agent.close()


@pytest.fixture
def scripted(make: Callable[..., Agent]) -> Callable[..., tuple[Agent, tiny.Script]]:
    """An agent with a tool, and the script of what its model says."""

    def build(*replies: str, **settings: Any) -> tuple[Agent, tiny.Script]:
        script = tiny.Script(*replies)
        settings = {"tools": [order_status], "cache": WIDE, "generation": LONG, "recall": OFF, **settings}
        return make(logits_processors=[script], **settings), script

    return build


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
