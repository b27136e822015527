"""``Agent(retention_days=...)``: what is too old is forgotten when the agent is made, and while it talks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from memstream.errors import ConfigError
from tests.integration import tiny


def make_old(path: Path, condition: str) -> None:
    """Moves turns to the year 2020."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE turns SET created = '2020-01-01 00:00:00.000000' WHERE {condition}")


def texts(path: Path) -> list[str]:
    return [text for role, text, _ in tiny.stored(path) if role == "user"]


def test_what_is_too_old_is_forgotten_when_the_agent_is_made(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with make() as agent:
        agent.chat("zanzibarium", session="a", user="u")
        agent.chat("velvet", session="b", user="u")
    with make(namespace="other") as agent:
        agent.chat("zanzibarium of another tenant")
    make_old(path, "text LIKE 'zanzibarium%'")
    with make() as agent:
        assert texts(path) == ["zanzibarium", "velvet", "zanzibarium of another tenant"]
    with make(retention_days=30) as agent:
        assert texts(path) == ["velvet", "zanzibarium of another tenant"]
        assert agent.chat("amber", session="a", user="u").text


def test_open_caches_are_rebuilt_without_it(make: Any, tmp_path: Path) -> None:
    agent = make(retention_days=30)
    with agent.session(user="u", name="a") as chat:
        chat.chat("zanzibarium")
        chat.chat("velvet")
        agent._expire()
        assert [exchange.user for exchange in chat._conversation.window] == ["zanzibarium", "velvet"]
        make_old(tmp_path / "store.db", "sequence < 2")
        agent._expire()
        assert chat._conversation.row is None
        chat.chat("amber")
        assert [exchange.user for exchange in chat._conversation.window] == ["velvet", "amber"]


def test_a_reply_that_is_being_said_is_not_torn_out(make: Any, tmp_path: Path) -> None:
    agent = make()
    with agent.session(user="u", name="a") as chat:
        chat.chat("zanzibarium")
        pieces = chat.stream("velvet")
        next(pieces)
        receipt = agent.memory.expire(datetime.now(UTC))
        assert (receipt.removed["turns"], receipt.kept) == (2, 1)
        assert list(pieces)
        assert chat.last is not None
        assert [role for role, _, _ in tiny.stored(tmp_path / "store.db")] == ["user", "assistant"]
        assert texts(tmp_path / "store.db") == ["velvet"]
        assert chat.chat("amber").text


def test_a_number_of_days_is_needed(make: Any, tmp_path: Path) -> None:
    for wrong in (0, -1, "90", True, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="retention_days"):
            make(retention_days=wrong)
