"""Refuses bodies that are too long before they are in memory."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memstream.serving import openai


class BodyLimit:
    """ASGI middleware: answers 413 to a body longer than ``most`` bytes, whatever its headers say."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on as long as it is short enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        n, too_long = 0, told.isdigit() and int(told) > self._most

        async def counted() -> Message:
            nonlocal n, too_long
            message = await receive()
            n += len(message.get("body", b""))
            too_long = too_long or n > self._most
            return {"type": "http.disconnect"} if too_long else message

        async def unless_too_long(message: Message) -> None:
            if not too_long:
                await send(message)

        if not too_long:
            await self._app(scope, counted, unless_too_long)
        if too_long:  # whatever the application made of it
            message = f"the request is longer than {self._most} bytes"
            body = openai.error(message, kind="invalid_request_error", code="request_too_large")
            await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
