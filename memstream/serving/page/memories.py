"""What was recalled and why, what has left, pinned facts, search; each memory can be forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from nicegui import ui

from memstream.errors import MemstreamError
from memstream.report import Evicted, ForgetReceipt, Recalled, Reply
from memstream.serving.page import parts, words
from memstream.serving.page.parts import Told

_LONGEST_QUERY = 2000  # characters
_LONGEST_FACT = 10_000

Forget = Callable[[str], Awaitable[ForgetReceipt]]


class Memories:
    """The lists on the right side.

    Args:
        forget: forgets a memory by its id.
        remember: pins a fact.
        search: looks for memories.
    """

    def __init__(
        self, *, forget: Forget, remember: Told, search: Callable[[str], Awaitable[Sequence[Recalled]]]
    ) -> None:
        self._forget, self._search = forget, search
        self._report: Reply | None = None
        self._facts: Sequence[Recalled] | None = None
        self._query = ""
        self._here: str | None = None
        with parts.section("Recalled", "for the last reply, and why"):
            self._recalled = parts.box("cards")
        with parts.section("Just left", "the window"):
            self._evicted = parts.box("cards")
        with parts.section("Pinned facts", "seen by every reply"):
            with parts.form("inline-form", remember):
                parts.field("Remember a fact", most=_LONGEST_FACT, hint="My cat is called Tom.")
                parts.button("Remember", _SEND, classes="plain")
            self._pinned = parts.box("cards")
        with parts.section("Search", "everything that can be recalled"):
            with parts.form("inline-form keeps", self._look):
                parts.field("Search memory", most=_LONGEST_QUERY, hint="order number")
                parts.button("Search", _SEND, classes="plain")
            self._found = parts.box("cards")
        with parts.dialog("Forget") as self._dialog:
            self._inner = parts.box("dialog")
        self._shown = False
        self.show(None)

    def show(self, report: Reply | None, here: str | None = None) -> None:
        """Shows what the last turn of the conversation ``here`` recalled and evicted."""
        if self._shown and (report, here) == (self._report, self._here):
            return
        self._report, self._here, self._shown = report, here, True
        self._cards(self._recalled, () if report is None else report.recalled, "Nothing was recalled.")
        self._evicted.clear()
        with self._evicted:
            for gone in () if report is None else report.evicted:
                _left(gone)
            if report is None or not report.evicted:
                parts.text("Nothing: there was room.", "nothing")

    def show_facts(self, facts: Sequence[Recalled]) -> None:
        """Shows the pinned facts."""
        if facts != self._facts:
            self._facts = facts
            self._cards(self._pinned, facts, "None yet.")

    async def _look(self, query: str) -> None:
        self._query = query
        found = await self._search(query)
        self._cards(self._found, found, "Nothing was found.")

    def _cards(self, place: ui.element, memories: Sequence[Recalled], nothing: str) -> None:
        place.clear()
        with place:
            best = max((memory.why.score for memory in memories), default=0.0)
            for memory in memories:
                self._card(memory, best)
            if not memories:
                parts.text(nothing, "nothing")

    def _card(self, memory: Recalled, best: float) -> None:
        with parts.box("card"):
            with parts.box("card-head"):
                parts.text(words.source(memory, self._here), "card-source")
                if memory.role != "document":  # those are forgotten where they were added
                    parts.button("", partial(self._ask, memory), icon="delete_outline", classes="small", name="Forget")
            parts.text(memory.text, "card-text")
            if memory.role != "fact":
                with parts.box("why"):
                    with parts.box("score") as score:
                        parts.call(score, f"score {memory.why.score:.2f}")
                        parts.width(parts.box("score-bar"), 100.0 * memory.why.score / best if best > 0 else 0.0)
                    parts.text(f"{memory.why.score:.2f}", "score-number")
                    for reason in words.reasons(memory.why):
                        parts.text(reason, "reason")

    async def _ask(self, memory: Recalled) -> None:
        """Asks whether a memory is to be forgotten, does it, and shows the receipt."""
        dialog, inner = self._dialog, self._inner
        inner.clear()
        with inner:
            parts.text("Forget this everywhere?", "dialog-title", "h2")
            parts.text(memory.text, "quoted")
            parts.text(
                "It is removed from store, index, summaries, snapshots and open caches. This cannot be undone.",
                "dialog-text",
            )
            with parts.box("dialog-buttons"):
                parts.button("Keep", dialog.close, classes="plain")
                parts.button("Forget", partial(dialog.submit, True), classes="danger")
        if not await dialog:
            return
        inner.clear()
        with inner:
            parts.text("Forgetting …", "dialog-title", "h2")
            parts.text("Replies that are running are waited for.", "dialog-text")
        dialog.open()
        try:
            receipt: ForgetReceipt | str = await self._forget(memory.id)
        except MemstreamError as error:
            receipt = str(error)
        if self._query:
            await self._look(self._query)
        inner.clear()
        with inner:
            _receipt(receipt, memory.id)
            with parts.box("dialog-buttons"):
                parts.button("Close", dialog.close, classes="primary")


# Sends the form that the button stands in.
_SEND = "(e) => e.currentTarget.form.requestSubmit()"


def _left(gone: Evicted) -> None:
    with parts.box("card gone-card"):
        parts.text(gone.text, "card-text")
        how = "" if gone.whole else ", its older part"
        parts.text(f"{gone.n_tokens} tokens{how} · now in memory", "card-source")


def _receipt(receipt: ForgetReceipt | str, id: str) -> None:
    """What was removed, and whether it is proven."""
    if isinstance(receipt, str):
        parts.text("It could not be forgotten", "dialog-title", "h2")
        parts.text(receipt, "dialog-text")
        return
    parts.text("Forgotten" if receipt.verified else "Removed, but found again", "dialog-title receipt-title", "h2")
    with parts.box("receipt", "dl"):
        rows = [("Memory", id)]
        rows += [(table.replace("_", " "), f"{n} removed") for table, n in receipt.removed.items() if n]
        rows += [("Snapshots", f"{receipt.snapshots} deleted"), ("Open caches", f"{receipt.caches} rebuilt")]
        rows += [("Searched again", "not found" if receipt.verified else "still found")]
        for name, told in rows:
            parts.text(name, tag="dt")
            parts.text(told, tag="dd")
    if receipt.echoes:
        parts.text(
            f"Other turns quote it, and stay until they are forgotten too: {', '.join(receipt.echoes)}.", "dialog-text"
        )
