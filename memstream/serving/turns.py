"""Turns lived in threads for clients that wait on an event loop, or leave it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from memstream.config import GenerationConfig
from memstream.errors import OverloadedError
from memstream.memory import Scope
from memstream.memory import Turn as Stored
from memstream.report import Reply
from memstream.serving.history import Said, compare
from memstream.serving.settings import ServerConfig
from memstream.tools import Tool, as_tools, parse_calls, render_calls

if TYPE_CHECKING:
    from memstream.agent import Agent
    from memstream.bots import Talk
    from memstream.session import Session

_STOPPING = "this server is being stopped; try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn that a client asks for.

    Attributes:
        namespace: that its key opens.
        user: whose memory is used, or None.
        conversation: its name; None keeps nothing.
        system: the system text, None for the server's.
        tools: schemas of functions that the client runs; None: the agent's own tools.
        turns: what the client sent, the last of it to be answered.
        generation: how the reply is decoded.
    """

    namespace: str
    user: str | None
    conversation: str | None
    system: str | None
    tools: Sequence[dict[str, Any]] | None
    turns: Sequence[Said]
    generation: GenerationConfig


class Turn:
    """A turn that runs, or waits for its conversation or a row. Iterate over its pieces; then ``reply`` is there.

    Attributes:
        told_to_stop: True once it was cancelled.
        reply: the report, once all pieces were taken; None where it was stopped before it began.
        task: lives it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self._session: Session | None = None
        self._queued = True  # behind other requests of its conversation
        self.told_to_stop = False
        self.reply: Reply | None = None
        self.task: asyncio.Task[None] | None = None

    def put(self, piece: str | BaseException | None) -> None:
        """Hands a piece, an error or the end to the event loop; from any thread."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def leaves_queue(self) -> None:
        """Notes that no other request of its conversation is before it."""
        self._queued = False

    def lives_in(self, session: Session) -> None:
        """Notes what lives it; called by its thread."""
        self._session = session

    def cancel(self) -> None:
        """Stops it: what was said so far is stored; what only waits leaves nothing."""
        self.told_to_stop = True
        if self._session is not None:
            self._session.cancel()
        elif self._queued and self.task is not None:
            self.task.cancel()

    @property
    def waits(self) -> bool:
        """True until it has a row."""
        return self._session is None or self._session.waiting


@dataclass(slots=True)
class _Kept:
    """A conversation that stays open between its requests."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one request at a time, in order
    session: Session | None = None
    last: Reply | None = None
    used: float = 0.0
    users: int = 0


class Turns:
    """All turns of a server, and the conversations it keeps open. For one event loop.

    Args:
        agent: has the rows.
        config: limits.
        rows: how many turns run at once.
        talk: answers a turn; None: the session does. Whatever it answers by itself it adds to the session.

    Attributes:
        loop: the event loop they are taken from.
        draining: True once no new turns are taken.
    """

    def __init__(self, agent: Agent, config: ServerConfig, *, rows: int, talk: Talk | None = None) -> None:
        self._agent, self._config, self._bot = agent, config, talk
        self.loop = asyncio.get_running_loop()
        self._most = rows + config.max_waiting
        self._threads = ThreadPoolExecutor(max_workers=self._most, thread_name_prefix="turn")
        self._kept: OrderedDict[Scope, _Kept] = OrderedDict()  # the one used last comes last
        self._running: set[Turn] = set()
        self._closing: dict[Scope, asyncio.Task[None]] = {}  # once their requests are done
        self.draining = False

    def running(self) -> list[Turn]:
        """Turns that run or wait."""
        return list(self._running)

    @property
    def n_running(self) -> int:
        """How many they are."""
        return len(self._running)

    @property
    def n_open(self) -> int:
        """Conversations that are kept open."""
        return len(self._kept)

    @property
    def n_waiting(self) -> int:
        """Turns that wait for their conversation or a row."""
        return sum(turn.waits for turn in self._running)

    def begin(self, request: Request) -> Turn:
        """Begins a turn; it goes on whether or not its pieces are taken.

        Raises:
            OverloadedError: too many turns run or wait already, or the server is being stopped.
        """
        if self.draining:
            raise OverloadedError(_STOPPING)
        if len(self._running) >= self._most:
            raise OverloadedError(f"{len(self._running)} requests run or wait already; try again later")
        turn = Turn()
        self._running.add(turn)
        turn.task = asyncio.create_task(self._live(turn, request))
        turn.task.add_done_callback(lambda _: self._running.discard(turn))
        self.loop.call_later(self._config.wait_s, self._give_up, turn)
        return turn

    def _give_up(self, turn: Turn) -> None:
        if turn in self._running and turn.waits:
            turn.put(OverloadedError(f"no room within {self._config.wait_s:g} seconds; try again later"))
            turn.cancel()

    def leave(self, turn: Turn) -> None:
        """The client is gone: the turn ends by itself, or after the grace time."""
        if turn in self._running:
            self.loop.call_later(0.0 if turn.waits else self._config.grace_s, turn.cancel)

    async def _live(self, turn: Turn, request: Request) -> None:
        try:
            async with self._owned(request) as kept:
                turn.leaves_queue()
                await self.in_thread(self._talk, turn, request, kept)
        except BaseException as error:  # whoever takes the pieces gets it  # noqa: BLE001
            turn.put(error)
        finally:
            turn.put(None)

    @contextlib.asynccontextmanager
    async def _owned(self, request: Request) -> AsyncIterator[_Kept | None]:
        """The request's conversation, for it alone; None where it keeps none."""
        if request.conversation is None:
            yield None
            return
        scope = Scope(request.namespace, request.user, request.conversation)
        kept = self._kept.setdefault(scope, _Kept())
        self._kept.move_to_end(scope)
        kept.users += 1
        try:
            async with kept.lock:
                yield kept
        finally:
            kept.users -= 1
            kept.used = time.monotonic()

    async def in_thread(self, function: Callable[..., None], *arguments: object) -> None:
        """Has one of the turns' threads do something that may wait for another process."""
        await self.loop.run_in_executor(self._threads, function, *arguments)

    # In the turn's thread

    def _talk(self, turn: Turn, request: Request, kept: _Kept | None) -> None:
        """Opens the conversation, takes in what is new, and says the last of it."""
        if kept is not None and kept.session is None:
            kept.session = self._open(request)
        with self._open(request) as session:
            turn.lives_in(session)
            *before, asked = _go_on(session, request)
            for said, answered in zip(before[::2], before[1::2], strict=True):
                if turn.told_to_stop:
                    return
                session.add(said.results or said.text, answered.text)
            text, last = "", session.last
            for piece in self._answer(session, asked, request.generation):
                text += piece
                turn.put(piece)
            turn.reply = _report(None if session.last is last else session.last, text, self._agent.cache_bytes)
            if kept is not None:
                kept.last = turn.reply

    def _answer(self, session: Session, asked: Said, generation: GenerationConfig) -> Iterator[str]:
        if self._bot is not None:
            return self._bot(session, asked.text, generation)
        return session.stream(asked.results or asked.text, generation=generation)

    def _open(self, request: Request) -> Session:
        keep = request.conversation is not None
        return self._agent.session(
            namespace=request.namespace,
            user=request.user,
            name=request.conversation or "",
            system=request.system,
            tools=request.tools,
            keep=keep,
            wait_s=self._config.wait_s,
        )

    # Which conversations are open

    def look(self, scope: Scope) -> tuple[Session | None, Reply | None]:
        """The open session of a conversation, and the report of its last turn here."""
        kept = self._kept.get(scope)
        return (None, None) if kept is None else (kept.session, kept.last)

    def forget_reports(self, scope: Scope) -> None:
        """Drops the reports of a user's conversations: they may tell what was forgotten."""
        for other, kept in self._kept.items():
            if (other.namespace, other.user) == (scope.namespace, scope.user):
                kept.last = None

    async def sweep(self) -> None:
        """Closes conversations that were not used for long, the longest unused ones where there are too many, and those
        that another process waits for, once their requests are done."""
        for scope in await asyncio.to_thread(self._agent.asked_for):
            if scope in self._kept and scope not in self._closing:
                closing = self._closing[scope] = asyncio.create_task(self.close(scope))
                closing.add_done_callback(partial(self._closed, scope))
        since = time.monotonic() - self._config.idle_s
        excess = len(self._kept) - self._config.open_conversations
        for i, (scope, kept) in enumerate(list(self._kept.items())):
            if not kept.users and (i < excess or kept.used < since):
                await self.close(scope)

    def _closed(self, scope: Scope, closing: asyncio.Task[None]) -> None:
        del self._closing[scope]

    async def close(self, scope: Scope) -> None:
        """Saves a conversation and closes it, once its requests are done."""
        kept = self._kept.get(scope)
        if kept is None:
            return
        async with kept.lock:
            session, kept.session = kept.session, None
            if session is not None:
                await asyncio.to_thread(session.close)
        if not kept.users and self._kept.get(scope) is kept:
            del self._kept[scope]

    # The end

    def stop_soon(self) -> None:
        """Takes no new turn from now on; those that run have the drain time."""
        if not self.draining:
            self.draining = True
            self.loop.call_later(self._config.drain_s, self._stop)

    def _stop(self) -> None:
        for turn in list(self._running):
            if turn.waits:
                turn.put(OverloadedError(_STOPPING))
            turn.cancel()

    async def drain(self) -> None:
        """Takes no new turn, and waits until every one has ended."""
        self.stop_soon()
        while tasks := [turn.task for turn in self._running if turn.task is not None]:
            await asyncio.wait(tasks)

    async def finish(self) -> None:
        """Ends its threads once every turn has ended."""
        await self.drain()
        await asyncio.gather(*self._closing.values())
        self._threads.shutdown()


def _report(last: Reply | None, text: str, cache_bytes: int) -> Reply:
    """The report of a turn: the session's, where it lived it."""
    if last is None:
        return Reply(text=text, finish_reason="stop", cache_bytes=cache_bytes)
    return last if last.text == text else dataclasses.replace(last, text=text, finish_reason="stop")


def _go_on(session: Session, request: Request) -> tuple[Said, ...]:
    """Takes back what the client's history no longer has; returns what is new, the last of it to be answered."""
    sent, tools = request.turns, as_tools(request.tools or ())
    if not tools:
        sent = [said._replace(results=()) for said in sent]
    stored = session.turns(last=len(sent) + 2)
    plan = compare([_as_said(turn, tools) for turn in stored], sent)
    if len(plan.new) > 1 or plan.keep < len(stored):  # it may go on from further back
        stored = session.turns()
        plan = compare([_as_said(turn, tools) for turn in stored], sent)
    if plan.keep < len(stored):
        session.take_back(stored[plan.keep])
    return plan.new


def _as_said(turn: Stored, tools: Sequence[Tool]) -> Said:
    """A stored turn as a client sends it again; calls in the one form that they are compared in."""
    role = {"call": "assistant", "tool": "user"}.get(turn.role, turn.role)
    before, calls = parse_calls(turn.text, tools) if turn.role == "call" else (turn.text, [])
    text = "\n".join(part for part in (before.strip() if calls else before, render_calls(calls)) if part)
    return Said(role, text, turn.state == "cut")
