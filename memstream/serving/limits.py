"""Refuses bodies that are too long before they are in memory."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memstream.serving import openai


class _TooLongError(Exception):
    pass


class BodyLimit:
    """ASGI middleware: answers 413 to a body longer than ``most`` bytes, whatever its headers say."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on as long as it is short enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        n, begun = 0, False

        async def counted() -> Message:
            nonlocal n
            message = await receive()
            n += len(message.get("body", b""))
            if n > self._most:
                raise _TooLongError
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        told = dict(scope["headers"]).get(b"content-length", b"")
        try:
            if told.isdigit() and int(told) > self._most:
                raise _TooLongError
            await self._app(scope, counted, noted)
        except _TooLongError:
            if begun:
                raise
            message = f"the request is longer than {self._most} bytes"
            body = openai.error(message, kind="invalid_request_error", code="request_too_large")
            await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
