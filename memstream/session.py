"""A user's handle on one conversation: its scope is fixed for its life."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Self

from memstream.config import GenerationConfig
from memstream.conversation import Conversation
from memstream.errors import BusyError
from memstream.memory import Scope
from memstream.report import Added, ForgetReceipt, Recalled, Reply

if TYPE_CHECKING:
    from memstream.agent import Agent


class Session:
    """One conversation of one user; made by ``Agent.session``, used as a context manager.

    Calls queue: a conversation lives one turn at a time.

    Attributes:
        scope: namespace, user and conversation.
        last: report of the last turn, None before the first.
    """

    def __init__(self, agent: Agent, conversation: Conversation) -> None:
        self._agent = agent
        self._conversation = conversation
        self._cancelled = threading.Event()
        self._closed = False
        self.scope: Scope = conversation.handle.scope
        self.last: Reply | None = None

    def chat(self, text: str, *, generation: GenerationConfig | None = None) -> Reply:
        """Says something and returns the whole reply.

        Raises:
            InputError: the text is empty or not valid Unicode.
            CapacityError: the text is longer than the window.
            StoreError: it could not be stored; nothing was computed.
        """
        for _ in self.stream(text, generation=generation):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, *, generation: GenerationConfig | None = None) -> Iterator[str]:
        """Says something and yields the reply piece by piece, never cutting a character; then ``last`` is the report.

        Closing the iterator early stores what was said so far.
        """
        self._check_open()
        self._cancelled.clear()
        return self._agent.run(self._conversation, text, generation or self._agent.generation, self)

    def add(self, user: str, assistant: str) -> Added:
        """Takes in an exchange that happened elsewhere, as if it had been lived here.

        Raises:
            InputError: one of the texts is empty or not valid Unicode.
            CapacityError: the exchange is longer than the window.
        """
        self._check_open()
        return self._agent.take_in(self._conversation, user, assistant)

    async def achat(self, text: str, *, generation: GenerationConfig | None = None) -> Reply:
        """``chat`` for asyncio; cancelling the task stops the reply and stores what was said so far."""
        async for _ in self.astream(text, generation=generation):
            pass
        assert self.last is not None
        return self.last

    async def astream(self, text: str, *, generation: GenerationConfig | None = None) -> AsyncIterator[str]:
        """``stream`` for asyncio: one thread lives the turn, the event loop stays free."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def live() -> None:
            try:
                for piece in self.stream(text, generation=generation):
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
                self.cancel()
                await asyncio.shield(turn)

    def cancel(self) -> None:
        """Stops the running reply after its current token, from any thread; it is stored as far as it went."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """True once the running reply was asked to stop."""
        return self._cancelled.is_set()

    def remember(self, text: str) -> str:
        """Pins a fact, which recall prefers from now on. Returns its id, such as ``fact:3``."""
        self._check_open()
        return self._agent.memory.remember(self.scope, text)

    def search(self, query: str, *, limit: int = 10) -> list[Recalled]:
        """Finds memories, best first; each says why."""
        self._check_open()
        return self._agent.memory.search(self.scope, query, limit=limit)

    def forget(self, id: str) -> ForgetReceipt:
        """Forgets a memory everywhere; see ``Agent.forget``."""
        self._check_open()
        return self._agent.forget_in(self.scope, id)

    def close(self) -> None:
        """Saves the conversation and gives it up; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._agent.release(self._conversation)

    def _check_open(self) -> None:
        if self._closed:
            raise BusyError("this session is closed; open another with agent.session(...)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
