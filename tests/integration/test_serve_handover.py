"""Several servers over one database: a conversation goes on wherever it is asked, also after the database was gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import psycopg
import pytest
from sqlalchemy import make_url

from memstream import Agent
from memstream.serving import Keys
from tests.integration.serving import KEY, MODEL, Gate, Served, served
from tests.postgres import Server

KEYS = Keys([KEY])
NAMED = {"X-Conversation-Id": "c"}


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    return new_database()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def one(url: str, make: Callable[..., Agent], gate: Gate) -> Iterator[Served]:
    """A server whose replies the gate may hold."""
    with served(make(store=url, logits_processors=[gate]), keys=KEYS) as server:
        yield server
        gate.open()


@pytest.fixture
def two(url: str, make: Callable[..., Agent]) -> Iterator[Served]:
    """Another one over the same database."""
    with served(make(store=url), keys=KEYS, wait_s=2.0) as server:
        yield server


def say(server: Served, text: str, *, retries: int = 0) -> str:
    with server.client() as client:
        answer = client.with_options(max_retries=retries).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], extra_headers=NAMED
        )
    return answer.choices[0].message.content or ""


def stored(url: str) -> list[tuple[str, str, str]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT role, text, state FROM memstream.turns ORDER BY sequence").fetchall()


def test_who_is_asked_gets_a_conversation_that_is_idle_elsewhere(url: str, one: Served, two: Served) -> None:
    said = [(text, say(server, text)) for server, text in zip((one, two, two, one), "abcd", strict=True)]
    expected = [turn for text, reply in said for turn in (("user", text, "complete"), ("assistant", reply, "complete"))]
    assert stored(url) == expected


def test_a_conversation_that_talks_elsewhere_is_waited_for(url: str, one: Served, two: Served, gate: Gate) -> None:
    gate.hold_after(2)
    first = threading.Thread(target=say, args=(one, "amber"))
    first.start()
    while gate.n_tokens < 2:
        time.sleep(0.01)
    with pytest.raises(openai.InternalServerError) as refused:
        say(two, "basil")
    assert refused.value.status_code == 503
    assert refused.value.response.headers["Retry-After"] == "1"
    assert refused.value.code in ("conversation_busy", "overloaded")
    second = threading.Thread(target=say, args=(two, "cedar"))
    second.start()
    gate.open()
    first.join()
    second.join()
    assert [text for role, text, _ in stored(url) if role == "user"] == ["amber", "cedar"]
    assert all(state == "complete" for *_, state in stored(url))


def test_a_conversation_is_deleted_wherever_it_is_open(url: str, one: Served, two: Served) -> None:
    say(one, "amber")
    gone = httpx.delete(f"{two.url}/v1/conversations/c", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert gone.json() == {"id": "c", "object": "conversation.deleted", "deleted": True}
    assert stored(url) == []
    say(one, "basil")
    assert [text for role, text, _ in stored(url) if role == "user"] == ["basil"]


def test_the_database_goes_and_comes_back(url: str, one: Served, server: Server, gate: Gate) -> None:
    name = str(make_url(url).database)
    say(one, "amber")
    gate.hold_after(40)  # some text is out by then
    body = {"model": MODEL, "messages": [{"role": "user", "content": "basil"}], "stream": True, "max_tokens": 60}
    headers = {"Authorization": f"Bearer {KEY}", **NAMED}
    with httpx.stream("POST", f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(lines)
        server.shut(name)
        gate.open()
        *_, last, end = lines
    assert json.loads(last)["error"]["code"] == "store_unavailable"
    assert end == "[DONE]"
    with pytest.raises(openai.InternalServerError) as refused:
        say(one, "cedar")
    assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
    assert refused.value.response.headers["Retry-After"] == "1"
    server.open(name)
    say(one, "delta", retries=5)
    turns = stored(url)
    assert [(text, state) for role, text, state in turns if role == "user"] == [
        ("amber", "complete"), ("basil", "complete"), ("delta", "complete")
    ]  # fmt: skip
    assert [state for role, _, state in turns if role == "assistant"] == ["complete", "cut", "complete"]
