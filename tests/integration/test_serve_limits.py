"""Clients that leave, clients that wait, servers that are stopped: what is stored, what is answered."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from memstream import Agent, GenerationConfig, RecallConfig
from tests.integration import tiny
from tests.integration.serving import MODEL, Gate, Served, http, served, until

OFF = RecallConfig(enabled=False)
LONG = GenerationConfig(max_new_tokens=200, repetition_penalty=1.3)


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.open()  # or the server would wait for its replies


def make_gated(make: Any, gate: Gate, **settings: Any) -> Agent:
    settings = {"generation": LONG, "recall": OFF, "logits_processors": [gate], **settings}
    agent = make(**settings)
    assert isinstance(agent, Agent)
    return agent


def ask(
    server: Served, text: str, conversation: str | None = "c", timeout: float = 60.0, **asked: Any
) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **asked}
    headers = {} if conversation is None else {"X-Conversation-Id": conversation}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=timeout)


def leave_while_streaming(server: Served, gate: Gate, text: str) -> str:
    """Takes some pieces of a stream and closes the connection."""
    client = server.client()
    messages: Any = [{"role": "user", "content": text}]
    taken = ""
    gate.hold_after(12)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, extra_headers={"X-Conversation-Id": "c"}
    )
    for chunk in stream:
        taken += chunk.choices[0].delta.content or ""
        if len(taken) >= 4:
            break
    stream.close()
    client.close()
    return taken


def test_a_stream_that_is_left_is_stored_as_far_as_it_went(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), grace_s=0.0) as server:
        taken = leave_while_streaming(server, gate, "hello there")
        until(lambda: any(turn.told_to_stop for turn in server.turns.running()))
        gate.open()
        until(lambda: server.turns.n_running == 0)
        (_, said, _), (role, text, state) = tiny.stored(tmp_path / "store.db")
        assert (said, role, state) == ("hello there", "assistant", "cut")
        assert text.startswith(taken)
        assert gate.n_tokens <= 14
        assert ask(server, "go on").status_code == 200


def test_within_the_grace_time_a_reply_ends_by_itself(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), grace_s=60.0) as server:
        leave_while_streaming(server, gate, "hello there")
        gate.open()
        until(lambda: server.turns.n_running == 0)
        assert tiny.stored(tmp_path / "store.db")[1][2] == "complete"


def test_whoever_waits_for_the_whole_reply_may_leave_too(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), grace_s=0.0) as server:
        gate.hold_after(5)
        with pytest.raises(httpx.ReadTimeout):
            ask(server, "hello there", timeout=1.0)
        until(lambda: any(turn.told_to_stop for turn in server.turns.running()))
        gate.open()
        until(lambda: server.turns.n_running == 0)
        assert tiny.stored(tmp_path / "store.db")[1][2] == "cut"


def test_whoever_leaves_while_waiting_leaves_nothing(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), grace_s=0.0) as server, ThreadPoolExecutor() as threads:
        running = held(server, gate, threads, "first")
        for conversation in ("c", "d"):  # one waits for the conversation's turn, the other for the row
            with pytest.raises(httpx.ReadTimeout):
                ask(server, "never said", conversation, timeout=0.7)
        until(lambda: server.turns.n_running == 1)
        gate.open()
        assert running.result().status_code == 200
        until(lambda: server.turns.n_running == 0)
        assert [text for role, text, _ in tiny.stored(tmp_path / "store.db") if role == "user"] == ["first"]


def held(server: Served, gate: Gate, threads: ThreadPoolExecutor, text: str, **asked: Any) -> Future[httpx.Response]:
    """A request whose reply has begun and is held."""
    before = gate.n_tokens
    gate.hold_after(3)
    running = threads.submit(ask, server, text, **asked)
    until(lambda: gate.n_tokens == before + 3)
    return running


def test_too_many_are_told_to_come_again(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), max_waiting=1) as server, ThreadPoolExecutor() as threads:
        first = held(server, gate, threads, "first")
        second = threads.submit(ask, server, "second", "d")
        until(lambda: server.turns.n_waiting == 1)
        third = ask(server, "third", "e")
        assert third.status_code == 503
        assert third.headers["Retry-After"] == "1"
        assert third.json()["error"]["code"] == "overloaded"
        with pytest.raises(openai.InternalServerError, match="run or wait already"):
            server.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        gate.open()
        assert first.result().status_code == second.result().status_code == 200
        assert ask(server, "third", "e").status_code == 200
    assert len(tiny.stored(tmp_path / "store.db")) == 6


def test_nobody_waits_for_ever(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), wait_s=0.5) as server, ThreadPoolExecutor() as threads:
        first = held(server, gate, threads, "first")
        for conversation in ("c", "d"):
            late = ask(server, "late", conversation)
            assert late.status_code == 503
            assert "no room within 0.5 seconds" in late.json()["error"]["message"]
        gate.open()
        assert first.result().status_code == 200
        until(lambda: server.turns.n_running == 0)
    assert [text for role, text, _ in tiny.stored(tmp_path / "store.db") if role == "user"] == ["first"]


def test_requests_of_one_conversation_are_answered_in_order(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate, generation=tiny.SHORT)) as server, ThreadPoolExecutor() as threads:
        asked = [held(server, gate, threads, "0")]
        for i in range(1, 5):
            asked.append(threads.submit(ask, server, str(i)))
            until(lambda n=i: server.turns.n_running == n + 1)
        gate.open()
        assert [answer.result().status_code for answer in asked] == [200] * 5
    turns = tiny.stored(tmp_path / "store.db")
    assert [text for role, text, _ in turns if role == "user"] == ["0", "1", "2", "3", "4"]
    assert [role for role, _, _ in turns] == ["user", "assistant"] * 5


def test_a_server_that_is_stopped_finishes_its_replies(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), drain_s=60.0) as server, ThreadPoolExecutor() as threads:
        running = held(server, gate, threads, "hello there")
        server.turns.loop.call_soon_threadsafe(server.turns.stop_soon)
        until(lambda: server.turns.draining)
        assert http.get(f"{server.url}/health").status_code == 503
        refused = ask(server, "too late", "d")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        server.server.should_exit = True
        gate.open()
        answer = running.result().json()
        assert answer["usage"]["completion_tokens"] == LONG.max_new_tokens
    assert [state for _, _, state in tiny.stored(tmp_path / "store.db")] == ["complete", "complete"]


def test_replies_that_take_too_long_to_end_are_stored_as_cut(make: Any, gate: Gate, tmp_path: Path) -> None:
    with served(make_gated(make, gate), drain_s=0.2) as server, ThreadPoolExecutor() as threads:
        running = held(server, gate, threads, "hello there")
        waiting = threads.submit(ask, server, "waits", "d")
        until(lambda: server.turns.n_waiting == 1)
        server.turns.loop.call_soon_threadsafe(server.turns.stop_soon)
        assert waiting.result().status_code == 503
        gate.open()
        assert running.result().json()["memstream"]["finish_reason"] == "cancelled"
    said = tiny.stored(tmp_path / "store.db")
    assert said[0] == ("user", "hello there", "complete")
    assert said[1][2] == "cut"
    assert len(said) == 2


def test_idle_conversations_are_given_up(make: Any, gate: Gate) -> None:
    with served(make_gated(make, gate, generation=tiny.SHORT), idle_s=0.2) as server:
        assert ask(server, "hello there").status_code == 200
        owner = make(recall=OFF)
        session = until(lambda: opened(owner))
        session.chat("said elsewhere")
        busy = ask(server, "go on", timeout=120)
        assert busy.status_code in (200, 503)
        session.close()


def opened(agent: Agent) -> Any:
    """The server's conversation, once another agent may have it."""
    try:
        return agent.session(name="c")
    except Exception:  # noqa: BLE001
        return None


def test_no_more_conversations_are_open_than_may_be(make: Any, gate: Gate) -> None:
    with served(make_gated(make, gate, generation=tiny.SHORT), open_conversations=3) as server:
        for i in range(8):
            assert ask(server, "hello there", str(i)).status_code == 200
        until(lambda: server.turns.n_open <= 3)
        for i in range(8):
            assert ask(server, "go on", str(i)).status_code == 200
            assert http.get(f"{server.url}/v1/conversations/{i}").json()["turns"] == 4


def test_a_disk_that_is_full_is_told_and_heals(make: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    from memstream.errors import StoreError
    from memstream.memory import ConversationHandle

    with served(make_gated(make, gate, generation=tiny.SHORT)) as server:
        ask(server, "hello there")
        begin = ConversationHandle.begin_turn

        def full(*arguments: Any, **named: Any) -> int:
            raise StoreError("the disk is full; free some space")

        monkeypatch.setattr(ConversationHandle, "begin_turn", full)
        refused = ask(server, "go on")
        assert refused.status_code == 503
        assert refused.json()["error"] == {
            "message": "the disk is full; free some space",
            "type": "server_error",
            "param": None,
            "code": "store_unavailable",
        }
        monkeypatch.setattr(ConversationHandle, "begin_turn", begin)
        assert ask(server, "go on").status_code == 200
        assert http.get(f"{server.url}/v1/conversations/c").json()["turns"] == 4


def test_a_fault_in_the_middle_of_a_stream_is_told_in_it(make: Any, gate: Gate) -> None:
    class Broken:
        n = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.n += 1
            if self.n == 4:
                raise RuntimeError("secret detail")
            return scores

    agent = make(generation=LONG, recall=OFF, logits_processors=[Broken()])
    with served(agent) as server:
        messages: Any = [{"role": "user", "content": "hello"}]
        stream = server.client().chat.completions.create(
            model=MODEL, messages=messages, stream=True, extra_headers={"X-Conversation-Id": "c"}
        )
        with pytest.raises(openai.APIError, match="a fault of the server") as raised:
            list(stream)
        assert "secret" not in str(raised.value)
        assert ask(server, "go on").status_code == 200


def test_threads_are_not_left_behind(make: Any, gate: Gate) -> None:
    before = threading.active_count()
    with served(make_gated(make, gate, generation=tiny.SHORT), max_waiting=8) as server:
        for i in range(4):
            ask(server, "hello", str(i))
    deadline = time.monotonic() + 30
    while threading.active_count() > before + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 3  # those of the agent: its memory, its watch
