"""Personal data never reaches store, embedder, log or model where a redactor was given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from memstream import Agent
from memstream.errors import ConfigError, InputError
from memstream.privacy import redact
from tests.integration import tiny

MAIL, CARD = "anna@example.org", "4111 1111 1111 1111"
SECRETS = ("anna", "example.org", "4111", "1111")


class ListeningEmbedder(tiny.WordEmbedder):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def embed(self, texts: list[str]) -> Any:
        self.heard += texts
        return super().embed(texts)


def test_what_users_say_is_redacted_before_everything_else(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    embedder = ListeningEmbedder()
    agent = make(redact=redact, embedder=embedder)
    with agent.session(user="a", name="one") as chat:
        chat.chat(f"My mail is {MAIL}, order 48213.")
        "".join(chat.stream(f"Pay with {CARD} please"))
        chat.add(f"Elsewhere I said {CARD}", f"And I noted {MAIL}")
        chat.remember(f"Write to {MAIL}")
        row = chat._conversation.resident
        seen = agent._template.tokenizer.decode([*row.sink_ids, *row.memory_ids, *row.window_ids])
        agent.memory.flush()
        found = [memory.text for memory in chat.search("mail order 48213")]
    agent.close()
    assert "My mail is [email], order 48213." in seen
    assert "My mail is [email], order 48213." in found
    texts = [text for _, text, _ in tiny.stored(tmp_path / "store.db")]
    assert texts[2] == "Pay with [card] please"
    assert texts[4:] == ["Elsewhere I said [card]", "And I noted [email]"]
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for secret in SECRETS:
        assert secret not in seen
        assert not [text for text in embedder.heard if secret in text]
        assert secret.encode() not in files
        assert secret not in caplog.text


def test_a_redactor_that_fails_lets_nothing_through(make: Any, tmp_path: Path) -> None:
    def broken(text: str) -> str:
        raise RuntimeError("no model")

    agent = make(redact=broken)
    with pytest.raises(RuntimeError, match="no model"):
        agent.chat("hello", user="a")
    assert tiny.stored(tmp_path / "store.db") == []
    agent = make(redact=lambda text: "", store=tmp_path / "other.db")
    with pytest.raises(InputError, match="empty"):
        agent.chat("hello", user="a")
    with pytest.raises(ConfigError, match="redact is True"):
        make(redact=True, store=tmp_path / "never.db")


def test_without_one_texts_stay_as_they_are(make: Any, tmp_path: Path) -> None:
    make().chat(f"My mail is {MAIL}", user="a")
    assert tiny.stored(tmp_path / "store.db")[0][1] == f"My mail is {MAIL}"


def test_redaction_is_a_key_of_the_settings_file(model_folder: Path, tmp_path: Path) -> None:
    settings = {"embedder": tiny.WordEmbedder(), "cache": tiny.CACHE, "generation": tiny.SHORT, "device": "cpu"}
    for value, expected in (("true", "Mail [email]"), ("false", f"Mail {MAIL}")):
        file, store = tmp_path / f"{value}.toml", tmp_path / f"{value}.db"
        file.write_text(f"model = '{model_folder}'\nstore = '{store}'\nredact = {value}\n")
        with Agent.from_toml(file, **settings) as agent:
            agent.chat(f"Mail {MAIL}")
        assert tiny.stored(store)[0][1] == expected
    file.write_text(f"model = '{model_folder}'\nredact = 'email'\n")
    with pytest.raises(ConfigError, match="redact is 'email'"):
        Agent.from_toml(file)
