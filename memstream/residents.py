"""Which conversations are open in this process, and which one has the row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memstream.conversation import Conversation
from memstream.engine import Engine, TurnQueue
from memstream.errors import BusyError, ConversationBusyError
from memstream.memory import Memory, Scope
from memstream.template import ChatTemplate

_POLL_S = 0.05


class Residents:
    """The open conversations of one engine with one row.

    Whoever changes the row has the ``queue``; the list of open conversations has a lock of its own, which is never
    held while waiting for the queue.

    Args:
        engine: has the row.
        template: renders turns.
        memory: stores them.
        queue: of turns.
        system: system text of all conversations, or None.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, memory: Memory, queue: TurnQueue, *, system: str | None
    ) -> None:
        self._engine, self._template, self._memory, self._system = engine, template, memory, system
        self._open: dict[Scope, Conversation] = {}
        self._n_users: dict[Scope, int] = {}  # sessions per open conversation
        self._registry = threading.Lock()
        self._resident: Conversation | None = None
        self.queue = queue
        self.closed = False

    def acquire(self, scope: Scope, wait_s: float) -> Conversation:
        """Opens a conversation, or takes part in one that is open.

        Raises:
            ConversationBusyError: another process owns it, for longer than ``wait_s``.
            BusyError: everything was closed.
        """
        deadline = time.monotonic() + wait_s
        while True:
            with self._registry:
                if self.closed:
                    raise BusyError("this agent is closed; make a new one")
                try:
                    if scope not in self._open:
                        handle = self._memory.open_conversation(scope)
                        self._open[scope] = Conversation(self._engine, self._template, handle, system=self._system)
                    self._n_users[scope] = self._n_users.get(scope, 0) + 1
                    return self._open[scope]
                except ConversationBusyError:
                    if time.monotonic() >= deadline:
                        raise
            time.sleep(_POLL_S)

    def release(self, conversation: Conversation) -> None:
        """Gives a share in a conversation back; with the last one it is saved and closed."""
        scope = conversation.handle.scope
        with self.queue:
            with self._registry:
                if self._open.get(scope) is not conversation:
                    return
                self._n_users[scope] -= 1
                last = not self._n_users[scope]
            if last:
                conversation.unload()
            with self._registry:
                if last and not self._n_users[scope]:  # nobody opened it meanwhile
                    del self._open[scope], self._n_users[scope]
                    conversation.handle.close()

    def make_resident(self, conversation: Conversation) -> None:
        """Gives the conversation the row; the one that had it is saved first. For whoever has the queue.

        Raises:
            BusyError: the conversation was closed.
        """
        with self._registry:
            if self._open.get(conversation.handle.scope) is not conversation:
                raise BusyError("this conversation was closed meanwhile; open another session")
        conversation.check_forgotten()
        if conversation.row is None:
            if self._resident is not None:
                self._resident.unload()
            self._resident = conversation
            conversation.load()

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

    def check_forgotten(self, cancelled: Callable[[], bool]) -> None:
        """Frees every row that has seen what was forgotten since; once no turn runs, unless cancelled before."""
        if not self.queue.enter(cancelled):
            return
        try:
            with self._registry:
                opened = list(self._open.values())
            for conversation in opened:
                conversation.check_forgotten()
        finally:
            self.queue.leave()

    def close(self) -> bool:
        """Saves and closes everything; returns False where that was done before."""
        with self.queue, self._registry:
            if self.closed:
                return False
            self.closed = True
            for conversation in self._open.values():
                conversation.unload()
                conversation.handle.close()
            self._open.clear()
            self._n_users.clear()
            return True
