"""The page of a server with keys: the door, and that nobody gets past it into somebody else's namespace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from memstream import Agent
from memstream.memory import Scope
from memstream.serving import Keys
from tests.integration import chromium, tiny
from tests.integration.chromium import Opener, Tab
from tests.integration.serving import Served, served

ACME, OTHER = "the-key-of-acme-which-is-long", "the-key-of-other-which-is-long"
_users = (f"user{i}" for i in itertools.count(1))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.running() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    agent = Agent(
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        store=tmp_path_factory.mktemp("page") / "store.db",
        cache=tiny.CACHE,
        generation=tiny.SHORT,
        embedder=tiny.WordEmbedder(),
        rows=2,
    )
    keys = Keys([f"acme={ACME}", f"other={OTHER}"])
    with agent, served(agent, rows=2, keys=keys, with_page=True) as server:
        yield server


@pytest.fixture
def user() -> str:
    return next(_users)


@pytest.fixture
def open_(browser: Browser, server: Served, request: pytest.FixtureRequest) -> Iterator[Opener]:
    opener = Opener(browser, f"{server.url}/", request.node.name)
    yield opener
    opener.close()


def enter(tab: Tab, user: str, key: str) -> Tab:
    """Loads the page and shows a key at its door."""
    tab.page.goto(tab.url)
    show(tab, user, key)
    expect(tab.message).to_be_visible()
    return tab


def show(tab: Tab, user: str, key: str) -> None:
    tab.page.get_by_role("textbox", name="Your name").fill(user)
    tab.page.get_by_label("API key").fill(key)
    tab.page.get_by_role("button", name="Enter").click()


def said(server: Served, namespace: str, user: str) -> list[str]:
    """What a user of a namespace is known to have said."""
    return [memory.text for memory in server.agent.memory.memories(Scope(namespace, user)) if memory.role == "user"]


def test_the_door_opens_to_a_key_and_a_name_only(open_: Opener, server: Served, user: str) -> None:
    tab = open_.tab(user=None)
    tab.page.goto(tab.url)
    for name, key, complaint in (
        (user, "", "not valid"),
        (user, "a-key-that-opens-nothing-at-all", "not valid"),
        ("  ", ACME, "Say who you are"),
    ):
        show(tab, name, key)
        expect(tab.page.get_by_role("alert").filter(has_text=complaint)).to_be_visible()
        expect(tab.message).to_have_count(0)
    show(tab, user, ACME)
    tab.say("hello there")
    assert said(server, "acme", user) == ["hello there"]
    assert said(server, "other", user) == []


def test_the_key_stays_in_the_tab_and_out_of_every_address(open_: Opener, user: str) -> None:
    tab = open_.tab(user=None)
    addresses: list[str] = []
    tab.page.on("request", lambda request: addresses.append(request.url))
    tab.page.on("websocket", lambda socket: addresses.append(socket.url))
    enter(tab, user, ACME).say("hello there")
    tab.reload()
    expect(tab.said).to_have_text(["hello there"])
    assert addresses
    assert not any(ACME in address for address in [*addresses, tab.page.url])
    assert ACME not in tab.page.content()
    assert ACME not in tab.page.evaluate("JSON.stringify(localStorage)")
    assert tab.page.context.cookies() == []
    tab.page.get_by_role("button", name="Leave").click()
    expect(tab.page.get_by_label("API key")).to_be_visible()
    assert ACME not in tab.page.evaluate("JSON.stringify(sessionStorage)")


def test_a_key_that_is_not_valid_any_more_leads_to_the_door(open_: Opener, user: str) -> None:
    context = open_.context(user=user)
    context.add_init_script("sessionStorage.setItem('memstream.key', 'a-key-of-before-this-server')")
    tab = open_.tab(context=context)
    tab.page.goto(tab.url)
    expect(tab.page.get_by_role("alert")).to_contain_text("not valid any more")
    expect(tab.page.get_by_role("textbox", name="Your name")).to_have_value(user)
    assert tab.page.locator(".item").count() == 0


def test_the_same_name_under_two_keys_is_two_people(open_: Opener, server: Served, user: str) -> None:
    one, two = (enter(open_.tab(user=None), user, key) for key in (ACME, OTHER))
    one.say("my cat is called Tom")
    one.ask("Pinned facts", "Remember a fact", "the shop closes at nine")
    expect(one.part("Pinned facts").locator(".card")).to_have_count(1)
    two.say("what is my cat called")
    expect(two.part("Recalled")).to_contain_text("Nothing was recalled")
    two.ask("Search", "Search memory", "cat Tom shop")
    expect(two.part("Search").locator(".card-text")).to_have_text(["what is my cat called"])
    expect(two.part("Pinned facts")).to_contain_text("None yet")
    two.reload()
    expect(two.page.locator(".item")).to_have_count(1)
    assert said(server, "acme", user) == ["my cat is called Tom"]
    assert said(server, "other", user) == ["what is my cat called"]


def test_a_conversation_of_another_namespace_is_not_reached_by_its_name(
    open_: Opener, server: Served, user: str
) -> None:
    with server.agent.session(namespace="other", user=user, name="secret") as session:
        session.chat("the secret is blue")
    context = open_.context(user=user)
    context.add_init_script("sessionStorage.setItem('memstream.conversation', 'secret')")
    tab = enter(open_.tab(context=context), user, ACME)
    tab.reload()
    expect(tab.page.locator(".line")).to_have_count(0)
    tab.say("tell me the secret")
    assert said(server, "other", user) == ["the secret is blue"]


# What the page's own form sends: the client, the element and the listener that a message is for.
_TARGET = """() => {
  const [id, form] = Object.entries(mounted_app.elements).find(([, one]) => one.class.includes("composer-form"));
  return {client_id: window.clientId, id: Number(id), listener_id: form.events[0].listener_id};
}"""
_SEND = """([target, text]) => window.socket.emit("event", {...target, args: [JSON.stringify(text)]})"""


def test_a_socket_acts_for_its_own_tab_only_whatever_it_knows(open_: Opener, server: Served, user: str) -> None:
    victim = enter(open_.tab(user=None), user, ACME)
    victim.say("hello there")
    attacker = enter(open_.tab(user=None), "mallory", OTHER)
    target = victim.page.evaluate(_TARGET)
    attacker.page.evaluate(_SEND, [target, "said by somebody else"])
    attacker.say("my own turn")  # by then the message before it has been dealt with
    victim.page.evaluate(_SEND, [target, "said by me"])
    expect(victim.said).to_have_text(["hello there", "said by me"])
    expect(victim.page.locator(".line.assistant:not(.pending)")).to_have_count(2)
    assert said(server, "acme", user) == ["hello there", "said by me"]


def test_before_the_door_is_open_nothing_can_be_done(open_: Opener, server: Served) -> None:
    tab = open_.tab(user=None)
    tab.page.goto(tab.url)
    expect(tab.page.get_by_label("API key")).to_be_visible()
    classes = tab.page.evaluate("Object.values(mounted_app.elements).flatMap(element => element.class)")
    assert "composer-form" not in classes
    assert "conversations" not in classes
