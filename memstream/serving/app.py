"""An OpenAI-compatible server over one agent; ``chat`` is the life of a request: read it first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from memstream import __version__
from memstream.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    ConversationBusyError,
    InputError,
    MemstreamError,
    OverloadedError,
    StoreError,
)
from memstream.serving import conversations, openai, page
from memstream.serving.access import Keys, Namespace
from memstream.serving.browsers import OwnPagesOnly
from memstream.serving.limits import BodyLimit
from memstream.serving.metrics import Metrics
from memstream.serving.openai import Asked, ChatRequest, Completion
from memstream.serving.settings import ServerConfig
from memstream.serving.turns import Request as TurnRequest
from memstream.serving.turns import Turns

if TYPE_CHECKING:
    from memstream.agent import Agent
    from memstream.bots import Talk

log = logging.getLogger(__name__)

_SWEEP_S = 0.5  # a conversation that another process waits for is given up within this time
_LOOK_S = 0.25  # how often a client that gets nothing yet is looked at
_INVALID = "invalid_request_error"
_RETRY = {"Retry-After": "1"}
# Error -> status, OpenAI's type and code; the first that fits.
_ERRORS: tuple[tuple[type[MemstreamError], int, str, str | None], ...] = (
    (CapacityError, 400, _INVALID, "context_length_exceeded"),
    (InputError, 400, _INVALID, None),
    (ConfigError, 400, _INVALID, None),
    (OverloadedError, 503, "server_error", "overloaded"),
    (ConversationBusyError, 503, "server_error", "conversation_busy"),
    (BusyError, 503, "server_error", "overloaded"),
    (StoreError, 503, "server_error", "store_unavailable"),
    (MemstreamError, 500, "server_error", None),
)
_REFUSED: dict[int, tuple[str, str | None]] = {
    401: (_INVALID, "invalid_api_key"),
    404: (_INVALID, "not_found"),
    413: (_INVALID, "request_too_large"),
}


def create_app(
    agent: Agent,
    *,
    model: str,
    rows: int,
    config: ServerConfig | None = None,
    keys: Keys | None = None,
    talk: Talk | None = None,
    hosts: Collection[str] = (),
    with_page: bool = False,
) -> FastAPI:
    """Builds the server as an ASGI application, to be run by uvicorn or mounted into another one.

    Args:
        agent: talks; closed by whoever made it, after the application has shut down.
        model: the name it is served under.
        rows: of the agent.
        config: limits.
        keys: who may ask; None: everybody, as the agent's namespace.
        talk: a bot that answers turns in place of the agent; see ``memstream.bots``.
        hosts: names that it is reached by beside ``localhost`` and loopback addresses; with keys, any will do.
        with_page: adds the page at ``/``.

    Raises:
        MissingExtraError: the page needs NiceGUI.
    """
    config, keys = config or ServerConfig(), keys or Keys(default=agent.namespace)
    metrics = Metrics(agent)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        turns = app.state.turns = Turns(agent, config, rows=rows, talk=talk)
        metrics.watch(turns)
        sweeping = asyncio.create_task(_sweep(turns, min(_SWEEP_S, config.idle_s)))
        yield
        sweeping.cancel()
        await turns.finish()

    app = FastAPI(
        title="memstream",
        version=__version__,
        summary="OpenAI-compatible chat with conversations kept by the server, in a fixed cache that remembers.",
        lifespan=lifespan,
    )
    app.state.agent, app.state.keys, app.state.config, app.state.metrics = agent, keys, config, metrics
    app.add_middleware(BodyLimit, most=config.max_body_bytes)
    app.add_middleware(OwnPagesOnly, hosts=None if keys else hosts, kept=page.PATHS)
    _answer_errors(app)

    @app.post("/v1/chat/completions", response_model=None, tags=["chat"])
    async def chat(
        asked: ChatRequest,
        http: Request,
        namespace: Namespace,
        x_conversation_id: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    ) -> JSONResponse | StreamingResponse:
        """Answers the last message; with a conversation's name, what was said before need not be sent again."""
        if asked.model != model:
            raise HTTPException(404, f"there is no model {asked.model!r}; this server has {model!r}")
        if asked.schemas is not None and talk is not None:
            raise InputError("tools: this server's bot takes none")
        conversation = x_conversation_id or asked.session_id
        messages = Asked(asked.messages)
        turns: Turns = app.state.turns
        turn = turns.begin(
            TurnRequest(
                namespace=namespace,
                user=asked.user,
                conversation=conversation,
                system=messages.system,
                tools=asked.schemas,
                turns=messages.turns,
                generation=asked.generation(agent.generation, config.max_reply_tokens),
            )
        )
        told = metrics.begin(namespace)
        completion = Completion(model, conversation)
        pieces = aiter(turn)
        try:
            first = await _unless_gone(http, anext(pieces, None))
            if not asked.stream:
                while await _unless_gone(http, anext(pieces, None)) is not None:
                    pass
                return JSONResponse(completion.whole(told.done(turn)))
        except BaseException as error:
            told.failed(error)
            turns.leave(turn)
            raise

        async def events() -> AsyncIterator[str]:
            try:
                yield _event(completion.first())
                if first is not None:
                    yield _event(completion.piece(first))
                    async for piece in pieces:
                        yield _event(completion.piece(piece))
                reply = told.done(turn)
                if (calls := completion.calls(reply)) is not None:
                    yield _event(calls)
                yield _event(completion.last(reply))
                if asked.stream_options is not None and asked.stream_options.include_usage:
                    yield _event(completion.usage(reply))
            except Exception as error:  # the status is sent already  # noqa: BLE001
                told.failed(error)
                yield _event(_described(error)[1])
            finally:
                turns.leave(turn)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/v1/models", tags=["chat"])
    async def models(namespace: Namespace) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "memstream"}]}

    @app.get("/health", tags=["operation"])
    async def health() -> JSONResponse:
        """Whether new turns are taken; needs no key and tells nothing else."""
        draining = app.state.turns.draining
        return JSONResponse({"status": "stopping" if draining else "ok"}, 503 if draining else 200)

    conversations.add_routes(app)
    metrics.add_route(app)
    if with_page:
        page.add(app, model=model)
    return app


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _unless_gone(http: Request, piece: Awaitable[str | None]) -> str | None:
    """Waits for a piece as long as the client does."""
    waiting = asyncio.ensure_future(piece)
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
            if await http.is_disconnected():
                raise ClientDisconnect
        return waiting.result()
    finally:
        waiting.cancel()


async def _sweep(turns: Turns, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await turns.sweep()
        except MemstreamError as error:  # the disk is full; the next one may go better
            log.warning("%s", error)


# Errors, all in OpenAI's shape


def _described(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error."""
    for kind, status, name, code in _ERRORS:
        if isinstance(error, kind):
            if status >= 500:
                log.warning("%s: %s", type(error).__name__, error)
            return status, openai.error(str(error), kind=name, code=code)
    log.error("a request failed", exc_info=error)
    return 500, openai.error("this is a fault of the server; its log tells more", kind="server_error")


def _answer_errors(app: FastAPI) -> None:
    def answer(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse(body, status, _RETRY if status == 503 else headers)

    @app.exception_handler(MemstreamError)
    async def on_purpose(request: Request, error: MemstreamError) -> JSONResponse:
        return answer(*_described(error))

    @app.exception_handler(Exception)
    async def by_fault(request: Request, error: Exception) -> JSONResponse:
        return answer(*_described(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse(None, 499)  # nobody reads it

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        kind, code = _REFUSED.get(error.status_code, (_INVALID, None))
        return answer(error.status_code, openai.error(str(error.detail), kind=kind, code=code), error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of several forms, the one that came furthest
        named = [str(part) for part in first["loc"][1:] if str(part).isidentifier() or isinstance(part, int)]
        where = ".".join(named) or None
        message = first["msg"].removeprefix("Value error, ")
        return answer(400, openai.error(f"{where}: {message}" if where else message, kind=_INVALID, param=where))
