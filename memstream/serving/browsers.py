"""What pages of other sites may not make a browser do here."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from memstream.serving import openai

_PORTS = {"http": 80, "https": 443}
_REFUSED = 1008  # WebSocket: policy violation


class OwnPagesOnly:
    """ASGI middleware: answers 403 where a browser was sent by a page of another site.

    Without API keys whoever reaches the port is let in, so nobody may reach it through somebody's browser: neither
    under a foreign name that was pointed to this machine (DNS rebinding, told by ``Host``), nor from a foreign page
    (told by ``Origin``). With keys, which no foreign page has, that is checked only where a browser talks without one:
    below ``kept``, and for WebSockets. Programs that are not pages send no ``Origin``, or one that is no web address.

    Args:
        app: what is protected.
        hosts: names this server goes by beside those of this machine's loopback; None: any name, as there are keys.
        kept: the beginning of the paths where a foreign page is refused in any case.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, kept: str) -> None:
        self._app, self._kept = app, kept
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on unless a foreign page is behind it."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _REFUSED, "reason": ""})  # before it is accepted: a 403
        else:
            body = openai.error(refusal, kind="invalid_request_error", code="foreign_page")
            await JSONResponse(body, 403)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for name in () if self._hosts is None else named:
            if not is_own_name(name, self._hosts or ()):
                own = ", ".join(sorted({"localhost", *(self._hosts or ())}))
                return f"without API keys this server answers as {own} or a loopback address only, not as {name}"
        if self._hosts is not None or scope["type"] == "websocket" or scope["path"].startswith(self._kept):
            for name, value in scope["headers"]:
                if name == b"origin" and is_foreign(value.decode("latin-1"), named):
                    return f"pages of {value.decode('latin-1')} may not use this server"
        return None


def is_own_name(host: str, hosts: Collection[str]) -> bool:
    """Whether a ``Host`` header names this machine: its loopback, or one of ``hosts``; the port does not matter."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    name = name.removesuffix(".")
    if name == "localhost" or name in hosts:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_foreign(origin: str, hosts: Collection[str]) -> bool:
    """Whether an ``Origin`` header is that of a web page from elsewhere than the ``Host`` headers say."""
    if origin == "null":  # a frame without rights, or a page that hides where it is from
        return True
    try:
        parts = urlsplit(origin)
        if parts.scheme not in _PORTS:  # a browser's extension, or a program that shows pages of its own
            return False
        return not any(_place(f"//{host}", parts.scheme) == _place(origin, parts.scheme) for host in hosts)
    except ValueError:
        return True


def _place(url: str, scheme: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or _PORTS[scheme]
