"""Bots: what a policy may do behind the server, how its file is found, and what a wrong one is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from memstream.bots import open_agent, read_settings
from memstream.cli import run
from memstream.errors import ConfigError
from tests.integration import tiny
from tests.integration.serving import MODEL, Process, served

BOT = """
from memstream import Agent

def open_bot(settings, *, greeting):
    def talk(chat, text, generation=None):
        if text == "Who are you?":
            chat.add(text, greeting)
            yield greeting
        elif text != "Nothing?":
            yield from chat.stream(text, generation=generation)
        else:
            chat.add(text, "")
    return Agent.from_mapping(settings), talk
"""


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    """A bot, and the settings that name it."""
    (tmp_path / "bot.py").write_text(BOT)
    path = tmp_path / "config.toml"
    path.write_text(
        f'model = "{model_folder}"\nstore = "{tmp_path / "store.db"}"\n[cache]\ncache_tokens = 512\n'
        '[generation]\nmax_new_tokens = 6\n[bot]\nfile = "bot.py"\ngreeting = "I am the bot."\n'
    )
    return path


def said(client: openai.OpenAI, text: str, model: str = MODEL, **asked: Any) -> Any:
    headers = {"X-Conversation-Id": "c"}
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, extra_headers=headers, **asked)


def test_a_bot_answers_in_place_of_the_model(config: Path) -> None:
    agent, talk = open_agent(read_settings(config))
    with agent, served(agent, talk=talk) as server:
        client = server.client()
        first = said(client, "Hello.")
        assert first.usage.completion_tokens > 0
        told = said(client, "Who are you?")
        assert told.choices[0].message.content == "I am the bot."
        assert told.usage.completion_tokens == 0, "the report of the turn before is none of this one"
        streamed = [chunk.choices[0].delta.content or "" for chunk in said(client, "Who are you?", stream=True)]
        assert "".join(streamed) == "I am the bot."
        assert said(client, "Nothing?").choices[0].message.content == ""
        texts = [text for _, text, _ in tiny.stored(config.with_name("store.db"))]
        reply = first.choices[0].message.content
        assert texts == [
            "Hello.",
            reply,
            "Who are you?",
            "I am the bot.",
            "Who are you?",
            "I am the bot.",
            "Nothing?",
            "",
        ]


def test_a_bot_takes_no_tools_of_its_clients(config: Path) -> None:
    agent, talk = open_agent(read_settings(config))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with agent, served(agent, talk=talk) as server:
        with pytest.raises(openai.BadRequestError, match="bot takes none"):
            said(server.client(), "Hello.", tools=[tool])
        assert said(server.client(), "Who are you?").choices[0].message.content == "I am the bot."


@pytest.fixture
def process(config: Path) -> Iterator[Process]:
    process = Process("--config", str(config), "--port", "0", "--no-page")
    yield process
    process.close()


def test_its_settings_name_it(process: Process, model_folder: Path) -> None:
    with openai.OpenAI(base_url=f"{process.ready()}/v1", api_key="none", max_retries=0) as client:
        assert said(client, "Who are you?", model_folder.name).choices[0].message.content == "I am the bot."
    assert process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("table", "code", "told"),
    [
        ('[bot]\nfile = "gone.py"', BOT, "gone.py is no Python file"),
        ('[bot]\nfile = "bot.py"', BOT, "missing a required argument: 'greeting'"),
        ('[bot]\nfile = "bot.py"\ngreeting = "x"\nshoe = 3', BOT, "unexpected keyword argument 'shoe'"),
        ('[bot]\nfile = "bot.py"', "1/0", "ZeroDivisionError"),
        ('[bot]\nfile = "bot.py"', "import no_such_module_here", "No module named 'no_such_module_here'"),
        ('[bot]\nfile = "bot.py"', "def open_bot(:", "SyntaxError"),
        ('[bot]\nfile = "bot.py"', "x = 1", "has no attribute 'open_bot'"),
        ('[bot]\ngreeting = "x"', BOT, "needs a file"),
        ("bot = 3", BOT, "needs a file"),
    ],
)
def test_a_bot_that_cannot_be_used_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, code: str, told: str
) -> None:
    (tmp_path / "bot.py").write_text(code)
    config = tmp_path / "config.toml"
    config.write_text(table)
    with pytest.raises(ConfigError, match="bot"):
        open_agent(read_settings(config))
    assert run(["serve", "--config", str(config), "--port", "0"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "loading" not in line]
    assert told in line
