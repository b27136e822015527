"""Which conversations are open in this process, and which ones have a row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator

from memstream.batching import Batch
from memstream.conversation import Conversation
from memstream.errors import BusyError, ConversationBusyError
from memstream.memory import Memory, Scope
from memstream.queues import OWN_REPLY, Place, TurnQueue, Waiting
from memstream.swap import SwapRoom
from memstream.template import ChatTemplate
from memstream.tools import Tool

_POLL_S = 0.05
_ASK_AGAIN_S = 1.0
_QUIET_POLL_S = 0.01


class Residents:
    """The open conversations of one engine, more than it has rows.

    Whoever changes a conversation's row has the conversation's ``queue``. The list of open conversations has a lock of
    its own, which is never held while waiting for a queue.

    Args:
        batch: has the rows.
        template: renders turns.
        system: system text of conversations that are given no other, or None.
        tools: of conversations that are given no others.
        swap: how many bytes those without a row may take.
        max_waiting: so many turns may wait for a row, or for an earlier turn; None: any number.
    """

    def __init__(
        self,
        batch: Batch,
        template: ChatTemplate,
        *,
        system: str | None,
        tools: tuple[Tool, ...],
        swap: SwapRoom,
        max_waiting: int | None,
    ) -> None:
        self._batch, self._template, self._system, self._tools = batch, template, system, tools
        self._open: dict[Scope, Conversation] = {}
        self._n_users: dict[Scope, int] = {}  # sessions per open conversation
        self._registry = threading.Lock()
        self._swap = swap
        self.waiting = Waiting(max_waiting)
        self.closed = False

    def acquire(self, scope: Scope, memory: Memory, wait_s: float) -> Conversation:
        """Opens a conversation, or takes part in one that is open; another process that owns it is asked to give it up.

        Args:
            scope: whose it is, and its name.
            memory: what it is stored in and recalls from.
            wait_s: seconds to wait for another process.

        Raises:
            ConversationBusyError: another process owns it, for longer than ``wait_s``.
            BusyError: everything was closed.
        """
        deadline = time.monotonic() + wait_s
        ask = 0.0
        while True:
            with self._registry:
                if self.closed:
                    raise BusyError("this agent is closed; make a new one")
                try:
                    if scope not in self._open:
                        handle = memory.open_conversation(scope)
                        self._open[scope] = Conversation(
                            self._batch, self._template, handle, memory, system=self._system, tools=self._tools
                        )
                    self._n_users[scope] = self._n_users.get(scope, 0) + 1
                    return self._open[scope]
                except ConversationBusyError:
                    if time.monotonic() >= deadline:
                        raise
            if time.monotonic() >= ask:
                memory.ask_for(scope)
                ask = time.monotonic() + _ASK_AGAIN_S
            time.sleep(_POLL_S)

    def release(self, conversation: Conversation, *, save: bool = True) -> bool:
        """Gives a share in a conversation back; with the last one it is saved and closed.

        Args:
            conversation: an open one.
            save: False keeps nothing of its row.

        Returns:
            True where it was closed now.
        """
        scope = conversation.handle.scope
        with conversation.queue:
            with self._registry:
                if self._open.get(scope) is not conversation:
                    return False
                self._n_users[scope] -= 1
                last = not self._n_users[scope]
            if last:
                self._save(conversation) if save else conversation.drop()
            with self._registry:
                if not last or self._n_users[scope]:  # somebody opened it meanwhile
                    return False
                del self._open[scope], self._n_users[scope]
                conversation.handle.close()
                return True

    def enter(self, conversation: Conversation, cancelled: Callable[[], bool]) -> bool:
        """Takes the conversation's queue, once its earlier turns are over; False where it was cancelled meanwhile.

        Raises:
            OverloadedError: it would have to wait, and as many turns as may wait do already.
            BusyError: the running turn waits for this very thread to go on.
        """
        if conversation.queue.try_enter():
            return True
        with self.waiting.counted():
            return conversation.queue.enter(cancelled)

    def make_resident(self, conversation: Conversation, cancelled: Callable[[], bool]) -> bool:
        """Gives the conversation a row, where need be that of the one unused for longest, which is saved first.

        For whoever has the conversation's queue. Waits while every row has a running turn, the first come the first
        served. Rows are given to one conversation at a time, and filled by several at once.

        Returns:
            False where it was cancelled meanwhile.

        Raises:
            OverloadedError: no row is free, and as many turns as may wait do already.
            BusyError: the conversation was closed; or every row has a turn that waits for this very thread.
        """
        with self._registry:
            if self._open.get(conversation.handle.scope) is not conversation:
                raise BusyError("this conversation was closed meanwhile; open another session")
        conversation.used = time.monotonic()
        conversation.check_forgotten()
        if conversation.row is None:
            if not self._reserve(conversation, cancelled):
                return False
            self.spill(self._swap.memory, besides=conversation)
            conversation.load()
        return True

    def _reserve(self, conversation: Conversation, cancelled: Callable[[], bool]) -> bool:
        """Waits for a row; False where it was cancelled meanwhile."""
        with self.waiting.in_line() as place:
            if self._give_row(conversation, place):
                return True
            with self.waiting.counted():
                patience = time.monotonic() + TurnQueue.PATIENCE_S
                while not self._give_row(conversation, place):
                    if not all(other.queue.is_mine() for other in self._resident()):
                        patience = time.monotonic() + TurnQueue.PATIENCE_S
                    elif time.monotonic() > patience:
                        raise BusyError(OWN_REPLY)
                    if cancelled():
                        return False
                    place.wait()
        return True

    def _give_row(self, conversation: Conversation, place: Place) -> bool:
        """Reserves a row for a conversation that is next; False where it is not, or there is none."""
        if not place.is_next():
            return False
        engine = self._batch.engine
        while True:
            if engine.has_free_row:
                with engine.places:
                    if engine.has_free_row:  # still
                        conversation.reserve()
                        return True
            elif not self.free_row():
                return False

    def opened(self) -> list[Conversation]:
        """Conversations that are open now."""
        with self._registry:
            return list(self._open.values())

    def _resident(self) -> list[Conversation]:
        """Conversations with a row."""
        return [conversation for conversation in self.opened() if conversation.row is not None]

    def free_row(self) -> bool:
        """Parks the conversation unused for longest whose turn is over; False where there is none."""
        for other in sorted(self._resident(), key=lambda other: other.used):
            if other.queue.try_enter():
                try:
                    if other.row is not None:
                        other.park()
                        return True
                finally:
                    other.queue.leave()
        return False

    def _parked(self, *, besides: Conversation | None = None) -> list[Conversation]:
        """Conversations with a state in memory."""
        return [other for other in self.opened() if other.swapped.memory_bytes and other is not besides]

    def _save(self, conversation: Conversation) -> None:
        """Writes a conversation into its file, which together with the other files and what is in memory has room."""
        others = sum(other.swapped.memory_bytes for other in self._parked(besides=conversation))
        conversation.save(max(0, self._swap.total - others))

    def spill(self, most_bytes: int, *, besides: Conversation | None = None) -> None:
        """Moves states from memory into files, those unused for longest first, until the rest takes little enough."""
        parked = self._parked(besides=besides)
        n_bytes = sum(conversation.swapped.memory_bytes for conversation in parked)
        for conversation in sorted(parked, key=lambda conversation: conversation.used):
            if n_bytes <= most_bytes:
                return
            if conversation.queue.try_enter():
                try:
                    n_bytes -= conversation.swapped.memory_bytes
                    if conversation.row is None:
                        self._save(conversation)
                finally:
                    conversation.queue.leave()

    def sharing_memory(self, scope: Scope) -> list[Conversation]:
        """Open conversations that may have recalled something of a scope's: of shared knowledge, all of a namespace."""
        with self._registry:
            return [
                conversation
                for other, conversation in self._open.items()
                if other == scope
                or (scope.knowledge and other.namespace == scope.namespace)
                or ((other.namespace, other.user) == (scope.namespace, scope.user) and scope.user is not None)
            ]

    def scopes_of(self, memory: Memory, ids: Collection[int]) -> list[Scope]:
        """Those of the open conversations of a store that have these ids."""
        with self._registry:
            return [
                scope
                for scope, conversation in self._open.items()
                if conversation.memory is memory and conversation.handle.id in ids
            ]

    @contextlib.contextmanager
    def paused(self, conversations: list[Conversation]) -> Iterator[None]:
        """Lets no turn of these conversations run meanwhile; waits for those that do.

        Holds none while it waits for another: that one's turn may wait for the row of the first.

        Raises:
            BusyError: one of them has a turn that waits for this very thread.
        """
        patience = time.monotonic() + TurnQueue.PATIENCE_S
        while True:
            with contextlib.ExitStack() as stack:
                for conversation in conversations:
                    if not conversation.queue.try_enter():
                        break
                    stack.callback(conversation.queue.leave)
                else:
                    yield
                    return
            if not any(conversation.queue.is_mine() for conversation in conversations):
                patience = time.monotonic() + TurnQueue.PATIENCE_S
            elif time.monotonic() > patience:
                raise BusyError(OWN_REPLY)
            time.sleep(_QUIET_POLL_S)

    def is_quiet(self) -> bool:
        """True while no turn is lived, or those that are were left standing by their callers."""
        return all(conversation.queue.is_quiet() for conversation in self.opened())

    def check_forgotten(self, cancelled: Callable[[], bool]) -> None:
        """Frees every row that has seen what was forgotten since; once its turn is over, unless cancelled before."""
        for conversation in self.opened():
            if not conversation.queue.enter(cancelled):
                return
            try:
                conversation.check_forgotten()
            finally:
                conversation.queue.leave()

    def close(self) -> bool:
        """Saves and closes everything; returns False where that was done before."""
        with self._registry:
            if self.closed:
                return False
            self.closed = True
            opened = sorted(self._open.values(), key=lambda conversation: conversation.used)
        for conversation in opened:
            with conversation.queue:
                self._save(conversation)
                with self._registry:
                    conversation.handle.close()
                    self._open.pop(conversation.handle.scope, None)
                    self._n_users.pop(conversation.handle.scope, None)
        return True
