"""What all browsers that look at one conversation share: what was said, what is being said, the last report."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memstream.agent import Agent
from memstream.errors import BusyError, CapacityError, MemstreamError
from memstream.memory import Scope
from memstream.memory import Turn as Stored
from memstream.report import ForgetReceipt, Occupancy, Reply
from memstream.serving.history import Said
from memstream.serving.metrics import Metrics
from memstream.serving.settings import ServerConfig
from memstream.serving.turns import Request, Turn, Turns
from memstream.session import Session

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_SHOWN = 100  # turns; twice as many each time somebody asks for earlier ones
_FAULT = "this is a fault of the server; its log tells more"

_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class Talk:
    """A turn that was asked for here and is not in ``Room.said`` yet.

    Attributes:
        text: what was asked.
        turn: lives it.
        reply: what has come of the reply so far.
        error: why it ended without a reply; None while it runs.
        number: of the talks of this process.
    """

    text: str
    turn: Turn
    reply: str = ""
    error: str | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def runs(self) -> bool:
        """True until it has ended."""
        return self.error is None


@dataclass(slots=True, eq=False)
class Room:
    """One conversation as browsers see it.

    Attributes:
        scope: whose, and which.
        said: its latest stored turns.
        shown: how many of them are wanted.
        talks: turns that are not among them yet, in the order in which they were asked for.
        report: of the last turn of this conversation here, whoever asked for it.
        trouble: why ``said`` could not be read; empty where it could.
        version: raised by every change.
        n_watching: tabs that look at it.
    """

    scope: Scope
    said: tuple[Stored, ...] = ()
    shown: int = _SHOWN
    talks: list[Talk] = field(default_factory=list)
    report: Reply | None = None
    trouble: str = ""
    version: int = 0
    n_watching: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one reads at a time, so that none brings back the past

    @property
    def running(self) -> list[Talk]:
        """Talks that run or wait."""
        return [talk for talk in self.talks if talk.runs]

    def changed(self) -> None:
        """Lets every tab look again."""
        self.version += 1


def settled(stored: Sequence[Stored], talks: Sequence[Talk]) -> tuple[Stored, ...]:
    """Stored turns without those of the turn that is being lived, where ``talks`` show it already."""
    said = tuple(stored)
    lived = not said or (said[-1].role == "assistant" and said[-1].state != "open")
    if lived or not any(talk.runs for talk in talks):
        return said
    asked = max((i for i, turn in enumerate(said) if turn.role == "user"), default=0)
    return said[:asked]


class Rooms:
    """The conversations that browsers look at. For one event loop, that of the server's turns.

    Args:
        agent: talks.
        turns: of the server; the API's too.
        metrics: count them.
        config: limits.
    """

    def __init__(self, agent: Agent, turns: Turns, metrics: Metrics, config: ServerConfig) -> None:
        self._agent, self._turns, self._metrics, self._config = agent, turns, metrics, config
        self._rooms: dict[Scope, Room] = {}
        self._following: set[asyncio.Task[None]] = set()

    async def enter(self, scope: Scope) -> Room:
        """Looks at a conversation from now on, until ``leave``."""
        room = self._rooms.setdefault(scope, Room(scope))
        room.n_watching += 1
        await self.read(room)
        return room

    def leave(self, room: Room) -> None:
        """A tab is gone; with the last one, what runs ends after the grace time, as for any client that leaves."""
        room.n_watching -= 1
        if room.n_watching:
            return
        for talk in room.running:
            self._turns.leave(talk.turn)
        self._tidy(room)

    def _tidy(self, room: Room) -> None:
        if not room.n_watching and not room.running and self._rooms.get(room.scope) is room:
            del self._rooms[room.scope]

    def say(self, room: Room, text: str) -> None:
        """Asks for a turn.

        Raises:
            CapacityError: the text is longer than a request may be.
            OverloadedError: too many turns run or wait already, or the server is being stopped.
        """
        n, most = len(text.encode("utf-8", "surrogatepass")), self._config.max_body_bytes
        if n > most:
            raise CapacityError(f"the text has {n} bytes; the most that one turn may have here is {most}")
        default, scope = self._agent.generation, room.scope
        turn = self._turns.begin(
            Request(
                namespace=scope.namespace,
                user=scope.user,
                conversation=scope.conversation,
                system=None,
                tools=None,
                turns=[Said("user", text)],
                generation=dataclasses.replace(
                    default, max_new_tokens=min(default.max_new_tokens, self._config.max_reply_tokens)
                ),
            )
        )
        talk = Talk(text, turn)
        room.talks = [*room.running, talk]
        room.changed()
        task = asyncio.create_task(self._follow(room, talk))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, room: Room, talk: Talk) -> None:
        """Takes a turn's pieces until it has ended."""
        told = self._metrics.begin(room.scope.namespace)
        failure: str | None = None
        try:
            async for piece in talk.turn:
                if not talk.reply:
                    told.first()
                talk.reply += piece
                room.changed()
            if talk.turn.reply is not None:
                told.done(talk.turn)
        except asyncio.CancelledError as error:  # it was stopped while it waited
            told.failed(error)
        except Exception as error:  # the talk tells it
            told.failed(error)
            failure = str(error) if isinstance(error, MemstreamError) else _FAULT
            if not isinstance(error, MemstreamError):
                log.error("a turn failed", exc_info=error)
        await self.read(room, ended=talk, failure=failure)
        self._tidy(room)

    def stop(self, room: Room) -> None:
        """Stops what runs; what was said so far is stored."""
        for talk in room.running:
            talk.turn.cancel()

    async def read(self, room: Room, *, ended: Talk | None = None, failure: str | None = None) -> None:
        """Reads what is stored, and the last report; then a talk that has ended gives way to it."""
        async with room.lock:
            session, report = self._turns.look(room.scope)
            stored: Sequence[Stored] = room.said
            trouble = ""
            try:
                stored = await asyncio.to_thread(self._stored, room.scope, session, room.shown)
            except MemstreamError as error:
                trouble = str(error)
                log.warning("%s", error)
            if ended is not None:
                ended.error = failure or trouble or None
                if ended.error is None:
                    room.talks.remove(ended)
            said = settled(stored, room.talks)
            if ended is not None or (said, report, trouble) != (room.said, room.report, room.trouble):
                room.said, room.report, room.trouble = said, report, trouble
                room.changed()

    def _stored(self, scope: Scope, session: Session | None, n: int) -> list[Stored]:
        if session is not None:
            try:
                return session.turns(last=n)
            except BusyError:  # it was closed meanwhile
                pass
        if self._agent.memory.find_conversation(scope) is None:
            return []
        assert scope.conversation is not None
        with self._agent.session(namespace=scope.namespace, user=scope.user, name=scope.conversation) as own:
            return own.turns(last=n)

    async def earlier(self, room: Room) -> None:
        """Shows twice as many turns."""
        room.shown *= 2
        await self.read(room)

    def occupancy(self, room: Room) -> Occupancy | None:
        """What the conversation's cache holds now; None while it has no row."""
        session, _ = self._turns.look(room.scope)
        return None if session is None else session.occupancy

    async def forget(self, scope: Scope, id: str) -> ForgetReceipt:
        """Forgets a memory of a user everywhere, and in what is shown here.

        Raises:
            InputError: there is none under that id.
        """
        receipt = await asyncio.to_thread(self._agent.forget_in, scope, id)
        self._turns.forget_reports(scope)
        for room in self._of_user(scope):
            await self.read(room)
        return receipt

    def _of_user(self, scope: Scope) -> Iterator[Room]:
        for room in list(self._rooms.values()):
            if (room.scope.namespace, room.scope.user) == (scope.namespace, scope.user):
                yield room

    async def watch(self) -> None:
        """Sees what others do to the conversations that are looked at: the API, other tabs, the hourly forgetting."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for room in list(self._rooms.values()):
                if self._turns.look(room.scope)[0] is not None:
                    await self.read(room)
