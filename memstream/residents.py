"""Which conversations are open in this process, and which ones have a row."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator

from memstream.batching import Batch
from memstream.conversation import Conversation
from memstream.engine import OWN_REPLY, TurnQueue
from memstream.errors import BusyError, ConversationBusyError
from memstream.memory import Memory, Scope
from memstream.template import ChatTemplate

_POLL_S = 0.05
_ASK_AGAIN_S = 1.0
_ROW_POLL_S = 0.01


class Residents:
    """The open conversations of one engine, more than it has rows.

    Whoever changes a conversation's row has the conversation's ``queue``. The list of open conversations has a lock of
    its own, which is never held while waiting for a queue.

    Args:
        batch: has the rows.
        template: renders turns.
        system: system text of conversations that are given no other, or None.
    """

    def __init__(self, batch: Batch, template: ChatTemplate, *, system: str | None) -> None:
        self._batch, self._template, self._system = batch, template, system
        self._open: dict[Scope, Conversation] = {}
        self._n_users: dict[Scope, int] = {}  # sessions per open conversation
        self._registry = threading.Lock()
        self._moving = threading.Lock()  # one conversation at a time comes into a row
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
                            self._batch, self._template, handle, memory, system=self._system
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
                conversation.unload() if save else conversation.drop()
            with self._registry:
                if not last or self._n_users[scope]:  # somebody opened it meanwhile
                    return False
                del self._open[scope], self._n_users[scope]
                conversation.handle.close()
                return True

    def make_resident(self, conversation: Conversation, cancelled: Callable[[], bool]) -> bool:
        """Gives the conversation a row, where need be that of the one unused for longest, which is saved first.

        For whoever has the conversation's queue. Waits while every row has a running turn.

        Returns:
            False where it was cancelled meanwhile.

        Raises:
            BusyError: the conversation was closed; or every row has a turn that waits for this very thread.
        """
        with self._registry:
            if self._open.get(conversation.handle.scope) is not conversation:
                raise BusyError("this conversation was closed meanwhile; open another session")
        conversation.used = time.monotonic()
        conversation.check_forgotten()
        if conversation.row is not None:
            return True
        patience: float | None = None
        while True:
            with self._moving:
                if self._batch.engine.has_free_row or self._make_room(conversation):
                    conversation.load()
                    return True
            if not all(other.queue.is_mine() for other in self._resident(conversation)):
                patience = None
            elif patience is None:
                patience = time.monotonic() + TurnQueue.PATIENCE_S
            elif time.monotonic() > patience:
                raise BusyError(OWN_REPLY)
            if cancelled():
                return False
            time.sleep(_ROW_POLL_S)

    def _resident(self, besides: Conversation) -> list[Conversation]:
        """Conversations with a row, the one unused for longest first."""
        with self._registry:
            found = [other for other in self._open.values() if other.row is not None and other is not besides]
        return sorted(found, key=lambda other: other.used)

    def _make_room(self, conversation: Conversation) -> bool:
        """Saves one conversation whose turn is over, and frees its row."""
        for other in self._resident(conversation):
            if other.queue.try_enter():
                try:
                    if other.row is not None:
                        other.unload()
                        return True
                finally:
                    other.queue.leave()
        return False

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
            time.sleep(_ROW_POLL_S)

    def is_quiet(self) -> bool:
        """True while no turn is lived, or those that are were left standing by their callers."""
        with self._registry:
            return all(conversation.queue.is_quiet() for conversation in self._open.values())

    def check_forgotten(self, cancelled: Callable[[], bool]) -> None:
        """Frees every row that has seen what was forgotten since; once its turn is over, unless cancelled before."""
        with self._registry:
            opened = list(self._open.values())
        for conversation in opened:
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
            opened = list(self._open.values())
        for conversation in opened:
            with conversation.queue, self._registry:
                conversation.unload()
                conversation.handle.close()
                self._open.pop(conversation.handle.scope, None)
                self._n_users.pop(conversation.handle.scope, None)
        return True
