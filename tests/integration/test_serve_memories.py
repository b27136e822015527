"""Memories over HTTP: what is pinned is redacted as what is said is; what is forgotten is in no report any more."""

from __future__ import annotations

from typing import Any

import httpx

from memstream import privacy
from tests.integration.serving import MODEL, Served, served


def say(server: Served, text: str, conversation: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "user": "anna"}
    headers = {"X-Conversation-Id": conversation}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200


def test_a_pinned_fact_is_redacted_as_what_is_said_is(make: Any) -> None:
    with served(make(redact=privacy.redact)) as server:
        say(server, "hello there", "c")
        url = f"{server.url}/v1/conversations/c/memories?user=anna"
        httpx.post(url, json={"text": "my address is tom@example.org"})
        texts = [memory["text"] for memory in httpx.get(url).json()["data"]]
        assert any("my address is" in text for text in texts)
        assert not any("tom@example.org" in text for text in texts)


def test_what_is_forgotten_is_in_no_report_any_more(make: Any) -> None:
    with served(make()) as server:
        say(server, "my zebra is called Tom", "a")
        say(server, "what is my zebra called", "b")
        shown = f"{server.url}/v1/conversations/b?user=anna"
        recalled = {memory["text"]: memory["id"] for memory in httpx.get(shown).json()["recalled"]}
        id = recalled["my zebra is called Tom"]
        forgotten = httpx.delete(f"{server.url}/v1/conversations/b/memories/{id}?user=anna")
        assert forgotten.json()["verified"] is True
        assert "my zebra is called Tom" not in httpx.get(shown).text
