"""Looking into kept conversations and their memories: what OpenAI's API has no words for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from memstream.errors import InputError
from memstream.exchange import taken
from memstream.memory import ConversationInfo, Scope
from memstream.report import as_json
from memstream.serving.access import Namespace
from memstream.serving.settings import ServerConfig
from memstream.serving.turns import Turns

if TYPE_CHECKING:
    from memstream.agent import Agent

Id = Annotated[str, Path(min_length=1, max_length=255, description="The conversation's name.")]
User = Annotated[str | None, Query(min_length=1, max_length=255, description="Whose it is, as in chat completions.")]
Limit = Annotated[int, Query(ge=1, le=1000)]


class Fact(BaseModel):
    """A fact to be remembered."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=100_000)]


router = APIRouter(prefix="/v1/conversations", tags=["conversations"])


def add_routes(app: FastAPI) -> None:
    """Adds ``/v1/conversations``."""
    app.include_router(router)


@router.get("")
def list_(http: Request, namespace: Namespace, user: User = None) -> dict[str, Any]:
    """The conversations of a user, or those without one, oldest first."""
    agent: Agent = http.app.state.agent
    found = agent.memory.list_conversations(Scope(namespace, user))
    return {"object": "list", "data": [_listed(info) for info in found]}


@router.get("/{conversation}")
def show(http: Request, conversation: Id, namespace: Namespace, user: User = None) -> dict[str, Any]:
    """What its cache holds now (null while it has no row), and what the last reply recalled and evicted."""
    scope = Scope(namespace, user, conversation)
    info = _found(http, scope)
    turns: Turns = http.app.state.turns
    session, last = turns.look(scope)
    return {
        **_listed(info),
        "cache": as_json(session.occupancy) if session is not None else None,
        "recalled": as_json(last.recalled) if last is not None else [],
        "evicted": as_json(last.evicted) if last is not None else [],
    }


@router.delete("/{conversation}")
async def delete(http: Request, conversation: Id, namespace: Namespace, user: User = None) -> dict[str, Any]:
    """Deletes it with all that was said in it, as completely as one memory is forgotten."""
    scope = Scope(namespace, user, conversation)
    await asyncio.to_thread(_found, http, scope)
    turns: Turns = http.app.state.turns
    agent: Agent = http.app.state.agent
    await turns.close(scope)
    config: ServerConfig = http.app.state.config
    await turns.in_thread(partial(agent.memory.delete_conversation, scope, wait_s=config.wait_s))
    return {"id": conversation, "object": "conversation.deleted", "deleted": True}


@router.get("/{conversation}/memories")
def memories(
    http: Request,
    conversation: Id,
    namespace: Namespace,
    user: User = None,
    query: Annotated[str | None, Query(min_length=1, max_length=10_000)] = None,
    limit: Limit = 50,
) -> dict[str, Any]:
    """What can be recalled in this conversation: the newest, or what a query finds, best first."""
    agent: Agent = http.app.state.agent
    scope = Scope(namespace, user, conversation)
    _found(http, scope)
    found = (
        agent.memory.memories(scope, limit=limit) if query is None else agent.memory.search(scope, query, limit=limit)
    )
    return {"object": "list", "data": as_json(found)}


@router.post("/{conversation}/memories", status_code=201)
def remember(http: Request, conversation: Id, fact: Fact, namespace: Namespace, user: User = None) -> dict[str, Any]:
    """Pins a fact, which every later reply sees."""
    agent: Agent = http.app.state.agent
    scope = Scope(namespace, user, conversation)
    return {"id": agent.memory.remember(scope, taken(fact.text, agent.redact)), "object": "memory"}


@router.delete("/{conversation}/memories/{memory}")
def forget(
    http: Request,
    conversation: Id,
    memory: Annotated[str, Path(max_length=64, description="Such as turn:17 or fact:3.")],
    namespace: Namespace,
    user: User = None,
) -> dict[str, Any]:
    """Forgets a memory everywhere; the receipt tells what was removed and that it is gone."""
    agent: Agent = http.app.state.agent
    scope = Scope(namespace, user, conversation)
    try:
        receipt = agent.forget_in(scope, memory)
    except InputError as error:
        raise HTTPException(404, str(error)) from error
    turns: Turns = http.app.state.turns
    turns.loop.call_soon_threadsafe(turns.forget_reports, scope)
    return {"object": "memory.forgotten", **as_json(receipt)}


def _listed(info: ConversationInfo) -> dict[str, Any]:
    return {
        "id": info.scope.conversation,
        "object": "conversation",
        "user": info.scope.user,
        "created_at": int(info.created.timestamp()),
        "turns": info.n_turns,
    }


def _found(http: Request, scope: Scope) -> ConversationInfo:
    agent: Agent = http.app.state.agent
    info = agent.memory.find_conversation(scope)
    if info is None:
        raise HTTPException(404, f"there is no conversation {scope.conversation!r}")
    return info
