"""Bots: a policy around an agent, in a file of its own.

The file defines ``open_bot(settings, **bot)``, which gives the agent and how it talks; it takes an agent's settings,
and what else stands in the table ``[bot]`` of the TOML file that names it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstream.config import GenerationConfig, read_toml
from memstream.errors import ConfigError

if TYPE_CHECKING:
    from memstream.agent import Agent
    from memstream.session import Session

# Answers what is said in a session, piece by piece. What it answers by itself it adds to the session.
Talk = Callable[["Session", str, GenerationConfig | None], Iterator[str]]


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of an agent, a server and a bot; the bot's file is looked for beside them.

    Raises:
        ConfigError: they cannot be read.
    """
    values = read_toml(path)
    bot = values.get("bot")
    if isinstance(bot, dict) and isinstance(bot.get("file"), str):
        bot["file"] = str((path.parent / bot["file"]).resolve())
    return values


def open_agent(values: Mapping[str, Any]) -> tuple[Agent, Talk | None]:
    """The agent of some settings, and how it talks where they name a bot.

    Raises:
        ConfigError: a setting is wrong, or the bot's file is none.
    """
    from memstream.agent import Agent

    values = dict(values)
    if "bot" not in values:
        return Agent.from_mapping(values), None
    bot = values.pop("bot")
    if not isinstance(bot, dict) or not isinstance(bot.get("file"), str):
        raise ConfigError("[bot] needs a file: the Python file that defines open_bot(settings)")
    settings = {name: value for name, value in bot.items() if name != "file"}
    open_bot = _loaded(Path(bot["file"]))
    try:
        inspect.signature(open_bot).bind(values, **settings)
    except TypeError as error:
        raise ConfigError(f"[bot] does not fit open_bot of {bot['file']}: {error}") from error
    opened: tuple[Agent, Talk] = open_bot(values, **settings)
    return opened


def _loaded(file: Path) -> Callable[..., Any]:
    name = f"memstream_bot_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"the bot {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for it
    try:
        spec.loader.exec_module(module)
        open_bot: Callable[..., Any] = module.open_bot
    except Exception as error:
        raise ConfigError(f"the bot {file} cannot be used: {type(error).__name__}: {error}") from error
    return open_bot
