"""The page in a real browser, over the tiny model: talk, cache, memory, two tabs, a phone, nothing from elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import re
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from nicegui import core
from playwright.sync_api import Browser, expect

from memstream import Agent, ConfigError, GenerationConfig
from memstream.serving import create_app
from tests.integration import chromium, tiny
from tests.integration.chromium import PHONE, Opener
from tests.integration.serving import MODEL, Gate, Served, served, until

LONG = GenerationConfig(max_new_tokens=40, repetition_penalty=1.3)
_users = (f"user{i}" for i in itertools.count(1))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running() as browser:
        yield browser


@pytest.fixture(scope="module")
def held() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def server(browser: Browser, held: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    agent = Agent(
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        store=tmp_path_factory.mktemp("page") / "store.db",
        cache=tiny.CACHE,
        generation=LONG,
        embedder=tiny.WordEmbedder(),
        logits_processors=[held],
        rows=2,
    )
    with agent, served(agent, rows=2, with_page=True, grace_s=0.0) as server:
        yield server


@pytest.fixture
def user() -> str:
    """Somebody who has said nothing yet."""
    return next(_users)


@pytest.fixture
def open_(browser: Browser, server: Served, held: Gate, request: pytest.FixtureRequest) -> Iterator[Opener]:
    opener = Opener(browser, f"{server.url}/", request.node.name)
    yield opener
    held.open()  # or the server would wait for its replies
    opener.close()


def stored(server: Served, user: str) -> list[tuple[str, str, str]]:
    """Role, text and state of what a user's conversations hold."""
    with closing(sqlite3.connect(server.agent.memory.store.path)) as connection:
        return connection.execute(
            "select role, text, state from turns join conversations on conversations.id = conversation_id "
            "join owners on owners.id = owner_id where user_key = ? order by turns.id",
            (user,),
        ).fetchall()


def ask(server: Served, user: str, conversation: str, text: str) -> None:
    """A turn through the API."""
    client = server.client()
    messages: Any = [{"role": "user", "content": text}]
    headers = {"X-Conversation-Id": conversation}
    client.chat.completions.create(model=MODEL, messages=messages, user=user, extra_headers=headers)
    client.close()


# Talking


def test_a_reply_streams_and_stays(open_: Opener, server: Served, held: Gate, user: str) -> None:
    tab = open_(user=user)
    expect(tab.page.get_by_text("An endless conversation in")).to_be_visible()
    held.hold_after(14)
    tab.send("hello there")
    expect(tab.stop).to_be_visible()
    expect(tab.replies.last).not_to_be_empty()
    so_far = tab.replies.last.inner_text()
    expect(tab.page.locator(".line.assistant.pending")).to_have_count(1)
    assert [role for role, *_ in stored(server, user)] == ["user", "assistant"]
    held.open()
    expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(1)
    expect(tab.stop).to_be_hidden()
    (_, asked, _), (_, answered, state) = stored(server, user)
    assert (asked, state) == ("hello there", "complete")
    assert len(answered) > len(so_far)
    expect(tab.page.locator(".line.assistant .note")).to_contain_text("40 tokens")
    assert tab.errors == []


def test_enter_sends_and_shift_enter_makes_a_line(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    tab.message.press("Enter")  # there is nothing to send
    tab.message.type("one")
    tab.message.press("Shift+Enter")
    tab.message.type("two")
    tab.message.press("Enter")
    expect(tab.said).to_have_text("one\ntwo")
    expect(tab.message).to_have_value("")
    expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(1)
    assert [text for role, text, _ in stored(server, user) if role == "user"] == ["one\ntwo"]


def test_stop_keeps_what_was_said(open_: Opener, server: Served, held: Gate, user: str) -> None:
    tab = open_(user=user)
    held.hold_after(14)
    tab.send("hello there")
    expect(tab.replies.last).not_to_be_empty()
    tab.stop.click()
    held.open()
    expect(tab.page.locator(".line.assistant .note")).to_contain_text("stopped here")
    assert [state for *_, state in stored(server, user)] == ["complete", "cut"]
    tab.say("go on")
    assert [state for *_, state in stored(server, user)][2:] == ["complete", "complete"]


def test_a_reload_shows_the_conversation_again(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.say("first of all")
    tab.begin()
    tab.say("hello there")
    reply = tab.replies.inner_text()
    tab.reload()
    expect(tab.said).to_have_text(["hello there"])
    expect(tab.replies).to_have_text([reply])
    tab.page.get_by_role("button", name="first of all").click()
    expect(tab.said).to_have_text(["first of all"])


def test_a_reply_goes_on_while_the_page_is_loaded_again(open_: Opener, server: Served, held: Gate, user: str) -> None:
    tab = open_(user=user)
    held.hold_after(14)
    tab.send("hello there")
    expect(tab.replies.last).not_to_be_empty()
    tab.reload()
    expect(tab.said).to_have_text(["hello there"])
    expect(tab.replies.last).not_to_be_empty()
    held.open()
    expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(1)
    assert stored(server, user)[-1][2] == "complete"


def test_earlier_turns_come_when_asked_for(open_: Opener, server: Served, user: str) -> None:
    with server.agent.session(user=user, name="long") as session:
        for i in range(60):
            session.add(f"question {i}", f"answer {i}")
    tab = open_(user=user)
    expect(tab.said).to_have_count(50)
    expect(tab.said.first).to_have_text("question 10")
    tab.page.get_by_role("button", name="Earlier turns").click()
    expect(tab.said).to_have_count(60)
    expect(tab.said.first).to_have_text("question 0")
    expect(tab.page.get_by_role("button", name="Earlier turns")).to_be_hidden()


def test_whoever_is_refused_gets_the_text_back(
    open_: Opener, server: Served, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = open_(user=user)
    monkeypatch.setattr(server.turns, "_most", 0)
    tab.message.fill("hello there")
    tab.message.press("Enter")
    expect(tab.page.get_by_text("try again later")).to_be_visible()
    expect(tab.message).to_have_value("hello there")
    expect(tab.said).to_have_count(0)
    monkeypatch.undo()
    tab.say("hello there")


def test_what_does_not_fit_is_an_error_in_the_talk(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    tab.send("x" * 1000)
    expect(tab.page.locator(".line.error")).to_contain_text("the window has room for")
    assert stored(server, user) == []
    tab.say("short")
    expect(tab.page.locator(".line.error")).to_have_count(0)
    expect(tab.said).to_have_text(["short"])


def test_turns_of_the_page_are_counted(open_: Opener, server: Served, user: str) -> None:
    def counted() -> float:
        told = httpx.get(f"{server.url}/metrics").text
        return sum(float(n) for n in re.findall(r"^memstream_turns_total\{.*\} (\S+)$", told, re.MULTILINE))

    tab = open_(user=user)
    before = counted()
    tab.say("hello there")
    assert counted() == before + 1


# The cache


def test_the_bar_shows_the_cache_as_it_is(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    bar = tab.part("Cache")
    expect(bar).to_contain_text("no row in the cache now")
    tab.say("hello there")
    conversation = server.agent.conversations(user=user)[0].scope
    occupancy = server.turns.look(conversation)[0].occupancy
    told = f"{occupancy.window_tokens} / {occupancy.window_room} tokens, 1 exchange"
    expect(bar.locator(".legend-item.window")).to_contain_text(told)
    total = tiny.CACHE.total
    widths = bar.locator(".bar").evaluate(
        "bar => [...bar.children].map(part => part.getBoundingClientRect().width / bar.getBoundingClientRect().width)"
    )
    wanted = (occupancy.sink_tokens, occupancy.memory_room, occupancy.window_room)
    assert widths == pytest.approx([part / total for part in wanted], abs=0.03)
    block = bar.locator(".block")
    expect(block).to_have_attribute("title", f"{occupancy.exchanges[0].n_tokens} tokens: hello there")
    block.click()
    expect(bar).to_contain_text(f"{occupancy.exchanges[0].n_tokens} tokens · hello there")


def test_what_leaves_the_window_leaves_the_bar_and_is_listed(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.say("the first thing")
    blocks = tab.part("Cache").locator(".block:not(.gone)")
    expect(blocks).to_have_count(1)
    for i in range(5):
        tab.say(f"and then another long enough sentence, number {i}")
    titles = [block.get_attribute("title") for block in blocks.all()]
    assert len(titles) < 6
    assert not any("the first thing" in str(title) for title in titles)
    expect(tab.part("Just left").locator(".card")).not_to_have_count(0)
    expect(tab.part("Cache").locator(".gone")).to_have_count(0)


def test_the_curves_run_and_the_cache_is_flat(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    tab.say("hello there")
    curve = tab.page.get_by_role("group", name="cache")
    expect(curve).to_contain_text("KB")
    samples = server.app.state.page.curves.samples
    until(lambda: len(samples) >= 2)
    assert {sample.cache_bytes for sample in samples} == {server.agent.cache_bytes}
    until(lambda: any(sample.tokens_per_s > 0 for sample in samples))
    heights = {point.split(",")[1] for point in curve.locator("polyline").get_attribute("points").split()}
    assert len(heights) == 1


# Memory


def test_what_was_recalled_is_shown_with_the_reasons(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.say("my cat is called Tom")
    tab.begin()
    tab.say("what is my cat called")
    card = tab.part("Recalled").locator(".card")
    expect(card).to_have_count(1)
    expect(card).to_contain_text("my cat is called Tom")
    expect(card).to_contain_text("You said")
    expect(card.locator(".reason").first).to_contain_text("cat")
    expect(card.locator(".reason", has_text="meaning")).to_be_visible()
    expect(tab.page.locator(".line.assistant .note")).to_contain_text("1 recalled")


def test_somebody_else_recalls_nothing_of_it(open_: Opener, user: str) -> None:
    open_(user=user).say("my cat is called Tom")
    other = open_(user=next(_users))
    other.say("what is my cat called")
    expect(other.part("Recalled")).to_contain_text("Nothing was recalled")
    expect(other.page.locator(".item")).to_have_count(1)


def test_a_name_brings_its_memory_along(open_: Opener, user: str) -> None:
    name = next(_users)
    open_(user=name).say("my cat is called Tom")
    tab = open_(user=user)
    tab.page.get_by_role("button", name="Who are you?").click()
    dialog = tab.page.get_by_role("dialog", name="Who are you?")
    dialog.get_by_role("textbox", name="Your name").fill(f"  {name} ")
    dialog.get_by_role("textbox", name="Your name").press("Enter")
    expect(tab.said).to_have_text(["my cat is called Tom"])
    tab.reload()
    expect(tab.page.locator(".who")).to_contain_text(name)
    expect(tab.said).to_have_text(["my cat is called Tom"])


def test_forgetting_removes_and_shows_the_receipt(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    tab.say("my zebra is called Tom")
    tab.begin()
    tab.say("what is my zebra called")
    tab.ask("Search", "Search memory", "zebra called Tom")
    expect(tab.part("Search").locator(".card").first).to_contain_text("zebra")
    card = tab.part("Recalled").locator(".card", has_text="my zebra is called Tom")
    card.get_by_role("button", name="Forget").click()
    dialog = tab.page.get_by_role("dialog", name="Forget")
    dialog.get_by_role("button", name="Keep").click()
    expect(dialog).to_be_hidden()
    assert any("my zebra is called Tom" in text for _, text, _ in stored(server, user))
    card.get_by_role("button", name="Forget").click()
    dialog.get_by_role("button", name="Forget").click()
    expect(dialog.locator(".receipt-title")).to_have_text("Forgotten")
    expect(dialog.locator(".receipt")).to_contain_text("not found")
    expect(dialog.locator(".receipt")).to_contain_text("1 removed")
    dialog.get_by_role("button", name="Close").click()
    assert not any("my zebra is called Tom" in text for _, text, _ in stored(server, user))
    expect(tab.page.get_by_text("my zebra is called Tom")).to_have_count(0)
    tab.say("what is my zebra called")
    expect(tab.page.get_by_text("my zebra is called Tom")).to_have_count(0)


def test_a_pinned_fact_is_seen_by_every_reply_until_it_is_forgotten(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.ask("Pinned facts", "Remember a fact", "the shop closes at nine")
    expect(tab.part("Pinned facts").locator(".card-text")).to_have_text("the shop closes at nine")
    tab.say("hello there")
    expect(tab.part("Recalled").locator(".card")).to_contain_text("the shop closes at nine")
    tab.part("Pinned facts").get_by_role("button", name="Forget").click()
    tab.page.get_by_role("dialog", name="Forget").get_by_role("button", name="Forget").click()
    expect(tab.page.locator(".receipt-title")).to_have_text("Forgotten")
    expect(tab.part("Pinned facts")).to_contain_text("None yet")


def test_search_finds_and_says_when_it_does_not(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.say("the parcel is in the attic")
    tab.ask("Search", "Search memory", "parcel attic")
    expect(tab.part("Search").locator(".card-text").first).to_have_text("the parcel is in the attic")
    tab.ask("Search", "Search memory", "qqqq")
    expect(tab.part("Search")).to_contain_text("Nothing was found")


# Several tabs


def test_two_tabs_of_one_conversation_see_each_other(open_: Opener, held: Gate, user: str) -> None:
    context = open_.context(user=user)
    one = open_(context=context)
    one.say("hello there")
    two = open_(context=context)
    expect(two.said).to_have_text(["hello there"])
    held.hold_after(14)
    two.send("and hello again")
    expect(one.said).to_have_text(["hello there", "and hello again"])
    expect(one.replies.last).not_to_be_empty()
    until(lambda: one.replies.last.inner_text() == two.replies.last.inner_text())
    one.message.fill("me too")  # waits for its turn
    one.message.press("Enter")
    expect(two.said).to_have_text(["hello there", "and hello again", "me too"])
    held.open()
    for tab in (one, two):
        expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(3)
        expect(tab.said).to_have_text(["hello there", "and hello again", "me too"])
    assert one.replies.all_inner_texts() == two.replies.all_inner_texts()


def test_two_tabs_of_different_conversations_do_not_mix(open_: Opener, held: Gate, user: str) -> None:
    one, two = open_(user=user), open_(user=user)
    one.say("this is one")
    two.begin()
    two.say("this is two")
    held.hold_after(28)
    one.send("one more")
    two.send("two more")
    expect(one.replies.last).not_to_be_empty()
    expect(two.replies.last).not_to_be_empty()
    held.open()
    for tab, said in ((one, ["this is one", "one more"]), (two, ["this is two", "two more"])):
        expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(2)
        expect(tab.said).to_have_text(said)


def test_what_is_said_through_the_api_is_seen(open_: Opener, server: Served, user: str) -> None:
    ask(server, user, "shared", "by the API")
    tab = open_(user=user)
    expect(tab.said).to_have_text(["by the API"])
    tab.say("by the page")
    ask(server, user, "shared", "by the API again")
    expect(tab.said).to_have_text(["by the API", "by the page", "by the API again"])
    assert [text for role, text, _ in stored(server, user) if role == "user"][-1] == "by the API again"


# Looks


def test_a_narrow_screen_shows_one_thing_at_a_time(open_: Opener, user: str) -> None:
    tab = open_(user=user, size=PHONE, has_touch=True, is_mobile=True)
    tab.say("my cat is called Tom " + "and so on " * 8)
    for size in ({"width": 320, "height": 568}, PHONE):
        tab.page.set_viewport_size(size)
        assert tab.overflow() == 0
        box = tab.message.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size["width"]
        assert box["y"] + box["height"] <= size["height"]
        expect(tab.part("Cache")).to_be_hidden()
        tab.page.get_by_role("button", name="Cache and memory").click()
        expect(tab.part("Cache")).to_be_visible()
        expect(tab.message).to_be_hidden()
        assert tab.overflow() == 0
        tab.page.get_by_role("button", name="Talk", exact=True).click()
    tab.page.get_by_role("button", name="Conversations").click()
    expect(tab.page.locator(".item")).to_be_visible()
    tab.page.get_by_role("button", name="New conversation").click()
    expect(tab.message).to_be_visible()
    expect(tab.page.get_by_role("button", name="New conversation")).to_be_hidden()


def test_no_width_overflows(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.say("a" * 120)
    for width in (821, 1000, 1180, 1400, 2200):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert tab.overflow() == 0
        expect(tab.part("Cache")).to_be_visible()
        expect(tab.page.get_by_role("button", name="Conversations")).to_be_visible(visible=width <= 1180)


def background(tab: chromium.Tab) -> str:
    return str(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_look_follows_the_system_and_the_switch(open_: Opener, user: str) -> None:
    light, dark = "rgb(246, 247, 249)", "rgb(14, 16, 19)"
    tab = open_(user=user, color_scheme="dark")
    assert background(tab) == dark
    tab.page.emulate_media(color_scheme="light")
    expect(tab.page.locator("body.body--light")).to_have_count(1)
    assert background(tab) == light
    tab.page.get_by_role("button", name="Look: as the system").click()
    expect(tab.page.locator("body.body--dark")).to_have_count(1)
    tab.reload()
    expect(tab.page.get_by_role("button", name="Look: dark")).to_be_visible()
    assert background(tab) == dark
    tab.page.get_by_role("button", name="Look: dark").click()
    expect(tab.page.locator("body.body--light")).to_have_count(1)
    tab.page.get_by_role("button", name="Look: light").click()
    expect(tab.page.get_by_role("button", name="Look: as the system")).to_be_visible()


def test_every_text_can_be_read(open_: Opener, user: str) -> None:
    """Contrast of at least 4.5 between each text and what it stands on (WCAG AA), in both looks."""
    tab = open_(user=user)
    tab.say("my cat is called Tom")
    tab.begin()
    tab.ask("Pinned facts", "Remember a fact", "the shop closes at nine")
    tab.say("what is my cat called")
    expect(tab.part("Recalled").locator(".card")).to_have_count(2)
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        expect(tab.page.locator(f"body.body--{scheme}")).to_have_count(1)
        tab.page.wait_for_timeout(700)  # what fades has faded
        assert tab.page.evaluate(_CONTRAST) == []


_CONTRAST = """() => {
  const pixel = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data].map((part, i) => i === 3 ? part / 255 : part);
  };
  const over = (top, base) => top.slice(0, 3).map((part, i) => part * top[3] + base[i] * (1 - top[3]));
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(element.parentElement));
  };
  const light = (colour) => colour.map(part => part / 255)
    .map(part => part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [.2126, .7152, .0722][i], 0);
  const poor = [];
  for (const element of document.querySelectorAll(".memstream *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.offsetParent || element.closest("[aria-hidden]")) continue;
    const base = ground(element), ink = over(rgba(getComputedStyle(element).color), base);
    const [a, b] = [light(ink), light(base)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push([element.className, element.textContent.slice(0, 30), ratio]);
  }
  return poor;
}"""


# Nothing from elsewhere, and nothing that runs


EVIL = '<script>window.hit=1</script><img src="x" onerror="window.hit=2"><svg onload="window.hit=3"></svg>'


def test_what_is_said_is_text_and_never_runs(open_: Opener, server: Served, user: str) -> None:
    with server.agent.session(user=user, name=EVIL) as session:
        session.add("$${window.hit=5} {{ window.hit=6 }} `", f"{EVIL} [link](javascript:window.hit=4) **bold**")
        session.remember(EVIL)
    tab = open_(user=user)
    expect(tab.said.first).to_contain_text("{{ window.hit=6 }}")
    expect(tab.replies.first).to_contain_text("<script>window.hit=1</script>")
    expect(tab.replies.first.locator("strong")).to_have_text("bold")
    tab.send(EVIL)
    expect(tab.page.locator(".line.assistant:not(.pending)")).to_have_count(2)
    expect(tab.part("Pinned facts").locator(".card-text")).to_have_text(EVIL)
    tab.ask("Search", "Search memory", EVIL)
    expect(tab.part("Search").locator(".card").first).to_be_visible()
    tab.part("Pinned facts").get_by_role("button", name="Forget").click()
    expect(tab.page.get_by_role("dialog", name="Forget")).to_contain_text(EVIL)
    assert tab.page.evaluate("window.hit") is None
    tags = "document.querySelectorAll('.memstream :is(script, img, a[href^=javascript]), .line svg').length"
    assert tab.page.evaluate(tags) == 0
    assert tab.asked == {server.url.removeprefix("http://")}


def test_a_name_is_text_too(open_: Opener, user: str) -> None:
    tab = open_(user=user)
    tab.page.get_by_role("button", name="Who are you?").click()
    tab.page.get_by_role("textbox", name="Your name").fill(EVIL[:100])
    tab.page.get_by_role("textbox", name="Your name").press("Enter")
    expect(tab.page.locator(".who")).to_contain_text(EVIL[:60])
    tab.reload()
    expect(tab.page.locator(".who")).to_contain_text(EVIL[:60])
    assert tab.page.evaluate("window.hit") is None


def test_the_browser_would_not_run_it_either(open_: Opener, user: str) -> None:
    """What got past all else is stopped by the page's Content-Security-Policy."""
    tab = open_(user=user)
    tab.page.evaluate(
        """() => {
          const place = document.createElement("div");
          document.body.append(place);
          place.innerHTML = '<img src="/x" onerror="window.hit=1"><button onclick="window.hit=2">b</button>';
          place.querySelector("button").click();
          document.head.append(Object.assign(document.createElement("script"), {textContent: "window.hit=3"}));
        }"""
    )
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("window.hit") is None
    reached = tab.page.evaluate("fetch('http://evil.example/').then(() => true, () => false)")
    assert reached is False
    assert any("Content Security Policy" in error for error in tab.errors)


def test_nothing_is_asked_of_any_other_host(open_: Opener, server: Served, user: str) -> None:
    tab = open_(user=user)
    tab.say("hello there")
    tab.page.get_by_role("button", name="Who are you?").click()
    expect(tab.page.get_by_role("dialog", name="Who are you?")).to_be_visible()
    tab.reload()
    assert tab.asked == {server.url.removeprefix("http://")}
    assert tab.errors == []


def test_there_are_no_cookies_and_the_page_is_not_kept(open_: Opener, server: Served, user: str) -> None:
    context = open_.context(user=user)
    open_(context=context).say("hello there")
    assert context.cookies() == []
    headers = httpx.get(f"{server.url}/").headers
    assert headers["cache-control"] == "no-store"
    assert "set-cookie" not in headers
    nonces = {
        re.findall(r"'nonce-([^']+)'", httpx.get(f"{server.url}/").headers["content-security-policy"])[0]
        for _ in range(2)
    }
    assert len(nonces) == 2


def test_other_paths_stay_the_servers(server: Served) -> None:
    nothing = httpx.get(f"{server.url}/nonsense")
    assert nothing.status_code == 404
    assert nothing.json()["error"]["code"] == "not_found"
    assert httpx.get(f"{server.url}/v1/chat/completions").status_code == 405
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert "/" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


def test_foreign_names_and_pages_are_refused(server: Served) -> None:
    for path in ("/", "/v1/models", "/health"):
        assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(server.url + path, headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(server.url + path, headers={"Origin": "http://evil.example"}).status_code == 403
    socket = f"{server.url}/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert httpx.get(socket).status_code == 200
    assert httpx.get(socket, headers={"Origin": "http://evil.example"}).status_code == 403


def test_a_tab_too_many_is_told_so(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream.serving.page.host.MOST_TABS", 0)
    assert httpx.get(f"{server.url}/").status_code == 503


def test_a_tab_that_is_closed_lets_its_reply_go(
    open_: Opener, server: Served, held: Gate, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.app.config, "reconnect_timeout", 0.2)
    tab = open_(user=user)
    held.hold_after(14)
    tab.send("hello there")
    expect(tab.replies.last).not_to_be_empty()
    rooms = server.app.state.page.rooms
    (room,) = [room for scope, room in rooms._rooms.items() if scope.user == user]
    tab.page.close()
    until(lambda: room.n_watching == 0)
    time.sleep(0.2)  # there is no grace time here; what it says now would be too late
    held.open()
    until(lambda: server.turns.n_running == 0)
    assert [state for *_, state in stored(server, user)] == ["complete", "cut"]
    until(lambda: room not in rooms._rooms.values())


def test_two_servers_of_one_process_cannot_both_have_the_page(server: Served) -> None:
    app = create_app(server.agent, model="other", rows=1, with_page=True)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            pass

    with ThreadPoolExecutor() as threads, pytest.raises(ConfigError, match="shows the page already"):
        threads.submit(asyncio.run, live()).result()
