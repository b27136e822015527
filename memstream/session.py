"""A user's handle on one conversation: its scope is fixed for its life."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Self

from memstream.config import GenerationConfig
from memstream.conversation import Conversation
from memstream.errors import BusyError
from memstream.exchange import Said, taken
from memstream.memory import Scope, Turn
from memstream.report import Added, ForgetReceipt, Occupancy, Recalled, Reply
from memstream.tools import Tool

if TYPE_CHECKING:
    from memstream.agent import Agent


class Call:
    """One turn from asking to answer.

    Args:
        system: the system text it is lived under.
        tools: what the model may call in it.

    Attributes:
        waits: True until it has a row.
        cancelled: set by whoever wants it to stop, before or while it runs.
        reply: its report, once it has ended.
    """

    def __init__(self, system: str | None, tools: tuple[Tool, ...]) -> None:
        self.system, self.tools = system, tools
        self.waits = True
        self.cancelled = threading.Event()
        self.reply: Reply | None = None


class Session:
    """One conversation of one user; made by ``Agent.session``, used as a context manager.

    Calls queue: a conversation lives one turn at a time.

    Attributes:
        scope: namespace, user and conversation.
        last: report of the turn that ended last, None before the first.
    """

    def __init__(
        self, agent: Agent, conversation: Conversation, *, system: str | None, tools: tuple[Tool, ...]
    ) -> None:
        self._agent = agent
        self._conversation = conversation
        self._system, self._tools = system, tools
        self._calls: dict[Call, weakref.ref[Generator[str]]] = {}  # turns that run or wait
        self._closed = False
        self.scope: Scope = conversation.handle.scope
        self.last: Reply | None = None

    @property
    def busy(self) -> bool:
        """True while a turn runs or waits."""
        return bool(self._calls)

    @property
    def waiting(self) -> bool:
        """True while a turn waits for its conversation's earlier turns, or for a row."""
        return any(call.waits for call in list(self._calls))

    @property
    def occupancy(self) -> Occupancy | None:
        """What the conversation's cache holds now; None while it has no row."""
        return self._conversation.occupancy()

    def chat(self, text: Said, *, generation: GenerationConfig | None = None) -> Reply:
        """Says something and returns the whole reply.

        Args:
            text: what is said; or, after a reply that ended with ``tool_calls``, these calls with their results.
            generation: how the reply is decoded; None: as the agent's are.

        Raises:
            InputError: the text is empty or not valid Unicode; or no call waits for results.
            CapacityError: the text is longer than the window.
            StoreError: it could not be stored; nothing was computed.
        """
        call = self._call()
        for _ in self._live(text, generation, call):
            pass
        assert call.reply is not None
        return call.reply

    def stream(self, text: Said, *, generation: GenerationConfig | None = None) -> Iterator[str]:
        """Says something and yields the reply piece by piece, never cutting a character; then ``last`` is the report.

        Closing the iterator early stores what was said so far.
        """
        return self._live(text, generation, self._call())

    def _call(self) -> Call:
        return Call(self._system, self._tools)

    def _live(self, text: Said, generation: GenerationConfig | None, call: Call) -> Iterator[str]:
        self._check_open()
        pieces = self._pieces(text, generation or self._agent.generation, call)
        # An iterator that is never begun ends nowhere else.
        self._calls[call] = weakref.ref(pieces, lambda _: self._calls.pop(call, None))
        return pieces

    def _pieces(self, text: Said, generation: GenerationConfig, call: Call) -> Generator[str]:
        try:
            yield from self._agent.run(self._conversation, text, generation, call)
        finally:
            self._calls.pop(call, None)
            if call.reply is not None:
                self.last = call.reply

    def add(self, user: Said, assistant: str) -> Added:
        """Takes in an exchange that happened elsewhere, as if it had been lived here; ``""`` where nobody answered.

        Args:
            user: what the user said; or the results of the calls that the exchange before ended with.
            assistant: what the model said; calls as ``tools.render_calls`` writes them.

        Raises:
            InputError: one of the texts is empty or not valid Unicode; or no call waits for results.
            CapacityError: the exchange is longer than the window.
        """
        self._check_open()
        return self._agent.take_in(self._conversation, user, assistant, self._call())

    def turns(self, *, last: int | None = None) -> list[Turn]:
        """What was said in this conversation and not taken back, in order; only the ``last`` turns where it is given.

        The last turn may still be being said.
        """
        self._check_open()
        handle = self._conversation.handle
        return handle.turns() if last is None else handle.turns_before(handle.next_sequence(), last)

    def take_back(self, turn: Turn) -> None:
        """Takes back a turn of ``turns`` and all that came after it: kept as superseded, and never recalled.

        Raises:
            InputError: it is not a turn of this conversation.
        """
        self._check_open()
        self._agent.take_back(self._conversation, turn)

    async def achat(self, text: Said, *, generation: GenerationConfig | None = None) -> Reply:
        """``chat`` for asyncio; cancelling the task stops the reply and stores what was said so far."""
        call = self._call()
        async for _ in self._alive(text, generation, call):
            pass
        assert call.reply is not None
        return call.reply

    def astream(self, text: Said, *, generation: GenerationConfig | None = None) -> AsyncIterator[str]:
        """``stream`` for asyncio: one thread lives the turn, the event loop stays free."""
        return self._alive(text, generation, self._call())

    async def _alive(self, text: Said, generation: GenerationConfig | None, call: Call) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def live() -> None:
            try:
                for piece in self._live(text, generation, call):
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)
            finally:
                loop.call_soon_threadsafe(pieces.put_nowait, None)

        turn = asyncio.ensure_future(asyncio.to_thread(live))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await turn
        finally:
            if not turn.done():
                call.cancelled.set()
                await asyncio.shield(turn)

    def cancel(self) -> None:
        """Stops this session's turns, from any thread: the running one is stored as far as it went, the rest is not."""
        for call in list(self._calls):
            call.cancelled.set()

    def remember(self, text: str) -> str:
        """Pins a fact, which recall prefers from now on. Returns its id, such as ``fact:3``."""
        self._check_open()
        return self._agent.memory.remember(self.scope, taken(text, self._agent.redact))

    def search(self, query: str, *, limit: int = 10) -> list[Recalled]:
        """Finds memories, best first; each says why."""
        self._check_open()
        return self._agent.memory.search(self.scope, query, limit=limit)

    def recall(self, text: str) -> list[Recalled]:
        """What would be put before the model if this were said now, wherever it was said; nothing passes the gate for
        most of what has nothing to do with it."""
        self._check_open()
        return self._agent.recalled_for(self._conversation, text)

    def forget(self, id: str) -> ForgetReceipt:
        """Forgets a memory everywhere; see ``Agent.forget``."""
        self._check_open()
        return self._agent.forget_in(self.scope, id)

    def close(self) -> None:
        """Saves the conversation and gives it up; a reply that is still streamed ends here. Twice is harmless."""
        if self._closed:
            return
        self.end_calls()
        self._agent.release(self._conversation)
        self._closed = True

    def end_calls(self) -> None:
        """Ends the turns that run or wait; those of other threads as soon as they see it."""
        self.cancel()
        for reference in list(self._calls.values()):
            pieces = reference()
            if pieces is not None:
                with contextlib.suppress(ValueError):  # another thread is inside it
                    pieces.close()

    def _check_open(self) -> None:
        if self._closed or self._agent.closed:
            raise BusyError("this session is closed; open another with agent.session(...)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
