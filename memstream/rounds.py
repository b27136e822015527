"""One answer of a model with tools: turns, and between them the calls that it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator, Sequence

from memstream.conversation import Conversation
from memstream.errors import CapacityError, InputError
from memstream.exchange import Said, taken_results
from memstream.privacy import Redactor
from memstream.report import Clock, FinishReason, Reply, ToolCall
from memstream.session import Call
from memstream.tools import MOST_CHARS, HeldCalls, parse_calls, render_results, run

log = logging.getLogger(__name__)

_FEWEST_CHARS = 32  # of a result


def turn_of(conversation: Conversation, said: Said) -> tuple[str, str]:
    """Role and text of what is said next in a conversation that has a row; results are cut to what its window holds.

    Raises:
        InputError: results that no call waits for.
        CapacityError: the window cannot hold even the beginnings of so many results.
    """
    if isinstance(said, str):
        return "user", said
    if not said or not conversation.tools or not conversation.awaits_results():
        raise InputError("no call waits for these results; say a text, or the reply's tool_calls with their results")
    return "tool", _results(conversation, said)


def _results(conversation: Conversation, calls: Sequence[ToolCall]) -> str:
    most_chars = MOST_CHARS
    while True:
        text = render_results(calls, most_chars)
        try:
            conversation.turn_tokens("tool", text)
            return text
        except CapacityError:
            most_chars //= 2
            if most_chars < _FEWEST_CHARS:
                raise


class Rounds:
    """Lives turns until the model has answered: its calls are run, and their results are the next turn.

    A call that cannot be read is shown to the model as such, once; another one is the answer as it is. So is what it
    says when there are no rounds left. Calls of tools without a function are handed to whoever asked.

    Args:
        conversation: has the tools, and a row.
        live: lives one turn of a role and a text: yields what the model says, and leaves its report in ``call.reply``.
        call: cancels it, and has the report in the end.
        clock: of the answer.
        most: rounds of calls.
        redact: takes personal data out of results.
    """

    def __init__(
        self,
        conversation: Conversation,
        live: Callable[[str, str], Generator[str, None, None]],
        call: Call,
        clock: Clock,
        *,
        most: int,
        redact: Redactor | None,
    ) -> None:
        self._conversation, self._live, self._call, self._clock = conversation, live, call, clock
        self._most, self._redact = most, redact
        self._shown, self._gap = "", ""
        self._replies: list[Reply] = []
        self._calls: list[ToolCall] = []
        self._reason: FinishReason | None = None  # where it is another than the last turn's

    def answer(self, role: str, text: str) -> Generator[str, None, None]:
        """Yields what may be seen of the answer; ``call.reply`` is then the report of all of it."""
        try:
            for n_left in range(self._most, -1, -1):
                held = yield from self._listen(role, text)
                calls = self._next(n_left)
                if calls is None:
                    yield from self._show(held)
                if not calls:
                    return
                text, role = self._run(calls), "tool"
                if self._call.cancelled.is_set():
                    self._reason = "cancelled"
                    return
        finally:
            if self._replies:
                self._call.reply = self._report()

    def _listen(self, role: str, text: str) -> Generator[str, None, str]:
        """Lives one turn; yields what is no call for sure, and returns the rest."""
        held, n_shown = HeldCalls(), 0
        self._gap = "\n" if self._shown and not self._shown[-1].isspace() else ""
        self._call.reply = None
        try:
            with contextlib.closing(self._live(role, text)) as pieces:
                for piece in pieces:
                    safe = held.push(piece)
                    n_shown += len(safe)
                    yield from self._show(safe)
        finally:
            if self._call.reply is not None:
                self._replies.append(self._call.reply)
        return self._replies[-1].text[n_shown:]

    def _show(self, text: str) -> Generator[str, None, None]:
        if text:
            text, self._gap = self._gap + text, ""
            self._shown += text
            yield text

    def _next(self, n_left: int) -> list[ToolCall] | None:
        """The calls to run now; none where nothing is to be shown of them either, None where there are none."""
        reply = self._replies[-1]
        _, calls = parse_calls(reply.text, self._conversation.tools)
        if not calls:
            return None
        damaged = any(not call.name for call in calls)
        if reply.finish_reason != "stop" and (damaged or reply.finish_reason != "length"):
            return []  # nobody sees half a call
        runs = {tool.name for tool in self._conversation.tools if tool.function is not None}
        if handed := [call for call in calls if call.error is None and call.name not in runs]:
            self._calls += handed
            self._reason = "tool_calls"
            return []
        if damaged and any(not call.name for call in self._calls):
            log.warning("the model's call could not be read a second time; it is the reply as it is")
            return None
        if not n_left:
            log.warning("the model calls tools after %d rounds still; its call is the reply", self._most)
            return None
        return calls

    def _run(self, calls: Sequence[ToolCall]) -> str:
        """Runs calls one after the other; returns what the model is shown of them."""
        self._clock.lap("decode_ms")
        ran = [run(call, self._conversation.tools, self._call.cancelled.is_set) for call in calls]
        done = taken_results(ran, self._redact)
        for call in done:
            log.debug("tool %s: %s gave %s", call.name or "?", call.arguments, call.error or call.result)
        self._calls += done
        self._clock.lap("tools_ms")
        return _results(self._conversation, done)

    def _report(self) -> Reply:
        """All turns as one reply."""
        replies, last = self._replies, self._replies[-1]
        return dataclasses.replace(
            last,
            text=self._shown,
            finish_reason=self._reason or last.finish_reason,
            evicted=tuple(gone for reply in replies for gone in reply.evicted),
            tool_calls=tuple(self._calls),
            usage=dataclasses.replace(
                last.usage,
                prompt_tokens=sum(reply.usage.prompt_tokens for reply in replies),
                reply_tokens=sum(reply.usage.reply_tokens for reply in replies),
                drafted_tokens=sum(reply.usage.drafted_tokens for reply in replies),
                accepted_tokens=sum(reply.usage.accepted_tokens for reply in replies),
            ),
            timings=self._clock.timings(),
        )
