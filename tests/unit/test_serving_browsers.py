"""Which names are this machine's, and which pages are foreign; what the middleware does about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from memstream.serving.browsers import OwnPagesOnly, is_foreign, is_own_name


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:1",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.9.9.9",
        "[::1]:80",
    ],
)
def test_loopback_is_this_machine(host: str) -> None:
    assert is_own_name(host, ())


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.2", "0.0.0.0",
     "[fe80::1]", "evil@localhost.example", "", ":8000", "[", "127.0.0.1:x@evil.example"],
)  # fmt: skip
def test_other_names_are_not(host: str) -> None:
    assert not is_own_name(host, ())
    assert not is_own_name(host, {"box.local"})


def test_a_configured_name_is() -> None:
    assert is_own_name("box.local:8000", {"box.local"})
    assert is_own_name("BOX.local", {"box.local"})


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://localhost:8000", "localhost:8000", False),
        ("http://localhost", "localhost:80", False),
        ("https://chat.example", "chat.example", False),
        ("https://chat.example", "chat.example:443", False),
        ("http://[::1]:8000", "[::1]:8000", False),
        ("http://localhost:3000", "localhost:8000", True),
        ("http://evil.example", "localhost:8000", True),
        ("http://localhost.evil.example:8000", "localhost:8000", True),
        ("https://localhost", "localhost:80", True),
        ("null", "localhost:8000", True),
        ("http://localhost:99999999", "localhost:8000", True),
        ("http://localhost:8000", "localhost:x", True),
        ("app://obsidian.md", "localhost:8000", False),
        ("chrome-extension://abc", "localhost:8000", False),
    ],
)
def test_a_foreign_page_is_told_by_its_origin(origin: str, host: str, foreign: bool) -> None:
    assert is_foreign(origin, [host]) is foreign


def status_of(
    path: str, headers: dict[str, str], *, hosts: set[str] | None, kind: str = "http", twice: str | None = None
) -> int | str:
    """What a request gets: the application's 200, or what the middleware says."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    if twice is not None:
        raw.append((b"host", twice.encode()))
    scope = {"type": kind, "path": path, "headers": raw}
    asyncio.run(OwnPagesOnly(app, hosts, "/_nicegui")(scope, receive, send))
    return sent[0].get("status") or str(sent[0]["type"])


LOCAL = {"host": "localhost:8000"}


def test_without_keys_every_path_is_kept_from_foreign_names_and_pages() -> None:
    for path in ("/", "/v1/models", "/health", "/_nicegui/x"):
        assert status_of(path, LOCAL, hosts=set()) == 200
        assert status_of(path, {}, hosts=set()) == 200  # no browser leaves the name out
        assert status_of(path, {"host": "evil.example"}, hosts=set()) == 403
        assert status_of(path, LOCAL, hosts=set(), twice="evil.example") == 403
        assert status_of(path, {**LOCAL, "origin": "http://evil.example"}, hosts=set()) == 403
        assert status_of(path, {**LOCAL, "origin": "http://localhost:8000"}, hosts=set()) == 200
    assert status_of("/", {"host": "box.local"}, hosts={"Box.local"}) == 200


def test_with_keys_only_the_pages_own_connection_is() -> None:
    foreign = {"host": "chat.example", "origin": "http://evil.example"}
    assert status_of("/v1/models", foreign, hosts=None) == 200
    assert status_of("/", {"host": "anything"}, hosts=None) == 200
    assert status_of("/_nicegui_ws/socket.io/", foreign, hosts=None) == 403
    assert status_of("/_nicegui_ws/socket.io/", {**foreign, "origin": "https://chat.example"}, hosts=None) == 200
    assert status_of("/anything", foreign, hosts=None, kind="websocket") == "websocket.close"


def test_what_is_no_request_passes() -> None:
    assert status_of("/", {"host": "evil.example"}, hosts=set(), kind="lifespan") == 200
