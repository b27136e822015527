"""Where NiceGUI meets the application: its paths, its life, the headers that bind the page's scripts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from nicegui import Client, core, ui
from starlette.responses import PlainTextResponse
from starlette.routing import Match, Mount
from starlette.types import Message, Receive, Scope, Send

from memstream.errors import ConfigError
from memstream.serving.page import PATHS
from memstream.serving.page.curves import Curves
from memstream.serving.page.rooms import Rooms
from memstream.serving.page.view import Served, View

MOST_TABS = 1000  # each takes memory here, before anybody has shown a key
_RECONNECT_S = 10.0  # a tab that is gone for longer is gone
_HERE = "memstream.page"  # in a request's scope: what its server has
_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'><rect width='32' height='32' rx='7' fill='#1f2937'/>"
    "<rect x='6' y='11' width='3' height='10' rx='1.5' fill='#94a3b8'/><rect x='11' y='11' width='6' height='10' "
    "rx='1.5' fill='#f59e0b'/><rect x='19' y='11' width='7' height='10' rx='1.5' fill='#14b8a6'/></svg>"
)


def mount(app: FastAPI, *, model: str) -> None:
    """Puts the page into an application: its paths, and its life into the application's, which fails if one runs."""
    _set_up()
    state, inner = app.state, app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        if not core.app.is_stopped:
            raise ConfigError("another server of this process shows the page already; run this one with_page=False")
        async with inner(app) as told, core.app.router.lifespan_context(core.app):
            curves, rooms = Curves(state.agent), Rooms(state.agent, state.turns, state.metrics, state.config)
            state.page = Served(agent=state.agent, keys=state.keys, model=model, rooms=rooms, curves=curves)
            working = [asyncio.create_task(work) for work in (curves.run(), rooms.watch())]
            yield told
            for task in working:
                task.cancel()
            await asyncio.wait(working)

    app.router.lifespan_context = lifespan

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_HERE] = state.page
        if scope["path"] != "/":
            await core.app(scope, receive, send)
        elif len(Client.instances) >= MOST_TABS:
            await PlainTextResponse("too many tabs are open; try again later", 503)(scope, receive, send)
        else:
            await _bound(scope, receive, send)

    app.router.routes.append(_Paths("/", page))


class _Paths(Mount):
    """Takes the page's own paths and leaves every other to the application, which knows what to answer."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        mine = scope["type"] in ("http", "websocket") and (scope["path"] == "/" or scope["path"].startswith(PATHS))
        return super().matches(scope) if mine else (Match.NONE, {})


@functools.cache
def _set_up() -> None:
    """Configures NiceGUI, of which there is one in a process, whichever application shows it."""
    ui.run_with(
        FastAPI(),  # it would be given a life that looks for its server among all objects; NiceGUI's own is enough
        title="memstream",
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=_RECONNECT_S,
        gzip_middleware_factory=None,
        show_welcome_message=False,
    )
    _let_sockets_act_for_themselves()

    @ui.page("/", favicon=_ICON)
    async def index() -> None:
        client = ui.context.client
        ui.add_css(_STYLE)
        ui.add_head_html('<base target="_blank">')  # links in replies open beside the page
        await client.connected()
        if not client.is_deleted:
            await View(client.request.scope[_HERE]).open()


def _let_sockets_act_for_themselves() -> None:
    """What a socket sends is taken only as its own client's, whichever client it names."""
    handlers = core.sio.handlers["/"]
    for event in ("event", "javascript_response", "ack", "log"):
        core.sio.on(event, _checked(handlers[event]))


def _checked(handler: Callable[[str, dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
    def checked(sid: str, message: dict[str, Any]) -> None:
        if message["client_id"] in core.sio.rooms(sid):
            handler(sid, message)

    return checked


async def _bound(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the page with headers by which only its own scripts run, and nothing is loaded from elsewhere.

    Scripts are told by a nonce. ``unsafe-eval`` is what Vue's templates need, ``unsafe-inline`` what NiceGUI's styles.
    """
    nonce = secrets.token_urlsafe(16)
    rules = (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    told = {
        "content-security-policy": rules,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    begun: Message = {}
    body = b""

    async def bound(message: Message) -> None:
        nonlocal begun, body
        if message["type"] == "http.response.start":
            begun = message
            return
        body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = body.replace(b"<script", f'<script nonce="{nonce}"'.encode())
        kept = [(name, value) for name, value in begun["headers"] if name != b"content-length"]
        added = [(name.encode(), value.encode()) for name, value in told.items()]
        await send({**begun, "headers": [*kept, *added, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    await core.app(scope, receive, bound)
