"""One browser tab: who it is, which conversation it looks at, and what it shows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from nicegui import ui

from memstream.agent import Agent
from memstream.errors import MemstreamError
from memstream.exchange import taken
from memstream.memory import ConversationInfo, Scope
from memstream.report import ForgetReceipt, Recalled
from memstream.serving.access import Keys
from memstream.serving.page import browser, parts, words
from memstream.serving.page.cache import Cache
from memstream.serving.page.chat import Chat
from memstream.serving.page.curves import Curves, drawn
from memstream.serving.page.door import Door
from memstream.serving.page.memories import Memories
from memstream.serving.page.rooms import Room, Rooms

_TICK_S = 0.2
_LIST_S = 5.0  # how often conversations and facts are listed again
_LISTED = 100
_NEWEST = 200  # memories looked through for what was said last in each conversation
NOBODY = "me"  # who it is where only one person can be meant

_LOOKS = {"": (None, "brightness_auto", "Look: as the system"), "1": (True, "dark_mode", "Look: dark"),
          "0": (False, "light_mode", "Look: light")}  # fmt: skip
_NEXT_LOOK = {"": "1", "1": "0", "0": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the page has of its server."""

    agent: Agent
    keys: Keys
    model: str
    rooms: Rooms
    curves: Curves


class View:
    """One tab, from its connection to its end; it acts in the namespace of the key that was given, and in no other.

    Args:
        served: the server.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._client = ui.context.client
        self._namespace = self._user = ""
        self._room: Room | None = None
        self._bound: Scope | None = None  # where it was last sent
        self._seen = self._seen_curves = -1  # versions that are shown
        self._shown_list: object = None

    async def open(self) -> None:
        """Shows the page, or asks for a key first."""
        kept = await browser.recall(self._client)
        if self._client.is_deleted:
            return
        self._look = kept.look if kept.look in _LOOKS else ""
        self._dark = ui.dark_mode(_LOOKS[self._look][0])
        self._root = parts.box("memstream")
        namespace = self._opened_by(kept.key)
        user = _name(kept.user) or ("" if self._served.keys else NOBODY)
        if namespace is not None and user:
            await self._enter(namespace, user, kept.conversation)
            return
        with self._root:
            complaint = "That key is not valid any more." if kept.key else ""
            Door(model=self._served.model, user=user, complaint=complaint, on_key=self._take_key)

    def _opened_by(self, key: str) -> str | None:
        return self._served.keys.namespace({"authorization": f"Bearer {key}"})

    def _keep(self, name: browser.Kept, value: str) -> None:
        browser.keep(self._client, name, value)

    # Who it is

    async def _take_key(self, told: str, key: str) -> str | None:
        namespace, user = self._opened_by(key), _name(told)
        if namespace is None:
            return "That key is not valid."
        if not user:
            return "Say who you are: your memory is kept under that name."
        self._keep("key", key)
        self._keep("user", user)
        await self._enter(namespace, user, "")
        return None

    def _leave(self) -> None:
        """Forgets the key, in the browser too, and begins anew."""
        self._keep("key", "")
        self._keep("conversation", "")
        self._client.run_javascript("location.reload()")

    def _name_dialog(self) -> ui.dialog:
        with parts.dialog("Who are you?") as dialog, parts.box("dialog"):
            parts.text("Who are you?", "dialog-title", "h2")
            parts.text("Memory is kept for each name, across conversations.", "dialog-text")

            async def named(told: str) -> None:
                dialog.close()
                user = _name(told)
                if user and user != self._user:
                    self._keep("user", user)
                    self._user = user
                    self._who.set_text(user)
                    await self._go_to_latest()

            with parts.form("inline-form", named):
                parts.field("Your name", most=parts.LONGEST_NAME)
                with parts.box("button primary", "button", type="submit"):
                    ui.label("Use this name")
        return dialog

    # The page

    async def _enter(self, namespace: str, user: str, conversation: str) -> None:
        self._namespace, self._user = namespace, user
        self._root.clear()
        with self._root:
            self._build()
        self._client.on_delete(self._go)
        if self._exists(conversation):
            await self._go_to(conversation)
        else:
            await self._go_to_latest()
        with self._root:
            ui.timer(_TICK_S, self._tick)
            ui.timer(_LIST_S, self._list, immediate=False)

    def _build(self) -> None:
        served, asking = self._served, self._name_dialog()
        with parts.box("top", "header"):
            parts.button("", _toggle("side"), icon="menu", classes="only-narrow", name="Conversations")
            parts.brand(served.model)
            parts.box("spacer")
            with parts.button("", asking.open, icon="person", classes="who", name="Who are you?"):
                self._who = parts.text(self._user)
            self._look_button = parts.button("", self._change_look, classes="look", name="Look")
            self._show_look()
            if served.keys:
                parts.button("", self._leave, icon="logout", name="Leave")
        with parts.box("tabs only-narrow", "nav"):
            parts.button("Talk", _toggle("panel", on=False), classes="tab tab-talk")
            parts.button("Cache and memory", _toggle("panel", on=True), classes="tab tab-panel")
        parts.box("veil").on("click", js_handler=_toggle("side", on=False))
        with parts.box("side", "aside", aria_label="Conversations"):
            parts.button("New conversation", self._begin, icon="add", classes="plain wide")
            self._listed = parts.box("conversations")
        self._chat = Chat(
            cache=words.size(served.agent.cache_bytes),
            on_say=self._say,
            on_stop=self._stop,
            on_earlier=self._earlier,
        )
        with parts.box("panel", "aside", aria_label="Cache and memory"):
            self._cache = Cache(served.agent.cache)
            with parts.section("Server", "the last three minutes"), parts.box("curves"):
                self._curves = [_curve(name) for name in ("tokens/s", "cache", "processor")]
            self._memories = Memories(forget=self._forget, remember=self._remember, search=self._search)

    def _change_look(self) -> None:
        self._look = _NEXT_LOOK.get(self._look, "")
        self._keep("look", self._look)
        self._dark.value = _LOOKS[self._look][0]
        self._show_look()

    def _show_look(self) -> None:
        _, icon, told = _LOOKS.get(self._look, _LOOKS[""])
        parts.call(self._look_button, told)
        self._look_button.clear()
        with self._look_button:
            ui.icon(icon).props("aria-hidden=true")

    # Which conversation

    def _scope(self, conversation: str | None = None) -> Scope:
        return Scope(self._namespace, self._user, conversation)

    def _exists(self, conversation: str) -> bool:
        try:
            return self._served.agent.memory.find_conversation(self._scope(conversation)) is not None
        except MemstreamError:  # a name that none can have
            return False

    async def _go_to_latest(self) -> None:
        found = await asyncio.to_thread(self._served.agent.memory.list_conversations, self._scope())
        await self._go_to(found[-1].scope.conversation or "") if found else await self._begin()

    async def _begin(self) -> None:
        """Goes to a new conversation; it is stored once something is said."""
        name = first = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        n = 1
        while self._exists(name):
            n += 1
            name = f"{first} ({n})"
        await self._go_to(name)
        self._client.run_javascript(f"({_toggle('side', on=False)})(); ({_toggle('panel', on=False)})()")
        self._chat.focus()

    async def _go_to(self, conversation: str) -> None:
        scope = self._bound = self._scope(conversation)
        room = await self._served.rooms.enter(scope)
        if self._client.is_deleted or scope != self._bound:  # it is gone, or was sent elsewhere meanwhile
            self._served.rooms.leave(room)
            return
        self._go()
        self._keep("conversation", conversation)
        self._room, self._seen = room, -1
        self._tick()
        await self._list()

    def _go(self) -> None:
        if self._room is not None:
            self._served.rooms.leave(self._room)
            self._room = None

    async def _list(self) -> None:
        """Lists conversations and pinned facts."""
        scope = self._scope()
        try:
            found, memories = await asyncio.to_thread(self._listing, scope)
        except MemstreamError as error:
            self._tell(str(error))
            return
        if scope != self._scope():  # somebody else by now
            return
        said = {memory.conversation: memory.text for memory in memories if memory.role == "user"}  # the last one stays
        self._memories.show_facts([memory for memory in memories if memory.role == "fact"])
        self._show_listed([(info, said.get(info.scope.conversation)) for info in found])

    def _listing(self, scope: Scope) -> tuple[list[ConversationInfo], list[Recalled]]:
        memory = self._served.agent.memory
        return memory.list_conversations(scope)[: -_LISTED - 1 : -1], memory.memories(scope, limit=_NEWEST)

    def _show_listed(self, found: Sequence[tuple[ConversationInfo, str | None]]) -> None:
        here = None if self._room is None else self._room.scope.conversation
        wanted = (here, tuple(found))
        if wanted == self._shown_list:
            return
        self._shown_list = wanted
        self._listed.clear()
        with self._listed:
            for info, said in found:
                self._item(info, said, info.scope.conversation == here)

    def _item(self, info: ConversationInfo, said: str | None, here: bool) -> None:
        name = info.scope.conversation or ""

        async def go() -> None:
            self._client.run_javascript(f"({_toggle('side', on=False)})()")
            await self._go_to(name)

        item = parts.button("", go, classes="item here" if here else "item")
        if here:
            item.props["aria-current"] = "true"
        with item:
            parts.text(said or name, "item-said")
            parts.text(f"{words.when(info.created)} · {info.n_turns} turns", "item-about")

    # What is said and done

    def _say(self, text: str) -> None:
        room = self._room
        if room is None:
            return
        try:
            self._served.rooms.say(room, text)
        except MemstreamError as error:
            self._chat.give_back(text)
            self._tell(str(error))
        self._tick()

    def _stop(self) -> None:
        if self._room is not None:
            self._served.rooms.stop(self._room)

    async def _earlier(self) -> None:
        if self._room is not None:
            await self._served.rooms.earlier(self._room)

    async def _remember(self, fact: str) -> None:
        try:
            kept = taken(fact, self._served.agent.redact)
            await asyncio.to_thread(self._served.agent.memory.remember, self._scope(), kept)
        except MemstreamError as error:
            self._tell(str(error))
        await self._list()

    async def _search(self, query: str) -> Sequence[Recalled]:
        try:
            return await asyncio.to_thread(self._served.agent.memory.search, self._scope(), query)
        except MemstreamError as error:
            self._tell(str(error))
            return ()

    async def _forget(self, id: str) -> ForgetReceipt:
        receipt = await self._served.rooms.forget(self._scope(), id)
        await self._list()
        return receipt

    def _tell(self, message: str) -> None:
        with self._root:
            ui.notify(message, position="top", classes="notice", timeout=8000, close_button="OK")

    # What is shown

    def _tick(self) -> None:
        """Shows what has changed."""
        room, rooms, curves = self._room, self._served.rooms, self._served.curves
        if room is None or self._client.is_deleted:
            return
        self._cache.show(rooms.occupancy(room))
        if room.version != self._seen or room.running:
            self._seen = room.version
            self._chat.show(room)
            self._memories.show(room.report, room.scope.conversation)
        if curves.version != self._seen_curves:
            self._seen_curves = curves.version
            self._draw(curves)

    def _draw(self, curves: Curves) -> None:
        samples = list(curves.samples)
        if not samples:
            return
        last = samples[-1]
        speeds = [sample.tokens_per_s for sample in samples]
        sizes = [float(sample.cache_bytes) for sample in samples]
        shares = [sample.processor for sample in samples]
        shown = (
            (f"{last.tokens_per_s:.0f}", drawn(speeds, max(speeds) * 1.1)),
            (words.size(last.cache_bytes), drawn(sizes, max(sizes) * 1.5)),
            (f"{last.processor:.0f} %", drawn(shares, 100.0)),
        )
        for (number, line), (told, drawing) in zip(self._curves, shown, strict=True):
            number.set_text(told)
            line.set_content(drawing)


def _toggle(name: str, *, on: bool | None = None) -> str:
    """JavaScript that opens or closes a part of a narrow page."""
    force = "" if on is None else f", {str(on).lower()}"
    return f"() => document.body.classList.toggle('open-{name}'{force})"


def _name(told: object) -> str:
    """A user's name as it was typed, without blanks around it; empty where it is none."""
    name = " ".join(told.split())[: parts.LONGEST_NAME] if isinstance(told, str) else ""
    try:
        return Scope(user=name).user or ""
    except MemstreamError:
        return ""


def _curve(name: str) -> tuple[ui.label, ui.html]:
    with parts.box("curve", role="group", aria_label=name):
        number = parts.text("–", "curve-number")
        parts.text(name, "curve-name")
        return number, ui.html("", sanitize=False).classes("curve-line")
