"""``memstream serve`` as a process: it starts, is stopped, begun anew, and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration import tiny
from tests.integration.serving import MEMSTREAM, Process, until


@pytest.fixture
def serve(tmp_path: Path, model_folder: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        settings = tmp_path / "serve.toml"
        if not settings.exists():
            settings.write_text(
                f'model = "{model_folder}"\nstore = "{tmp_path / "store.db"}"\nrows = 2\n'
                "[cache]\ncache_tokens = 4096\n[generation]\nmax_new_tokens = 400\nrepetition_penalty = 1.05\n"
                "[serve]\ndrain_s = 300\n"
            )
        process = Process("--config", str(settings), "--port", "0", *arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def ask(url: str, text: str, **asked: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **asked}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers={"X-Conversation-Id": "c"}, timeout=180)


@pytest.fixture
def name(model_folder: Path) -> str:
    return model_folder.name


def streamed(url: str, model: str, text: str) -> Iterator[str]:
    """Lines of a stream, as they come."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers={"X-Conversation-Id": "c"}, timeout=180
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                yield line


def test_stopped_in_the_middle_of_a_reply_it_finishes_it(serve: Any, name: str, tmp_path: Path) -> None:
    process = serve()
    lines = streamed(process.ready(), name, "hello there")
    first = [next(lines) for _ in range(5)]
    process.popen.send_signal(signal.SIGTERM)
    rest = list(lines)
    assert len(first) + len(rest) > 100
    assert rest[-1] == "data: [DONE]"
    assert process.popen.wait(180) == 0
    assert [state for _, _, state in tiny.stored(tmp_path / "store.db")] == ["complete", "complete"]
    assert not [line for line in process.said if "Traceback" in line]


def test_killed_in_the_middle_of_a_reply_it_loses_only_that(serve: Any, name: str, tmp_path: Path) -> None:
    process = serve()
    url = process.ready()
    answered = ask(url, "my cat is called Tom", model=name, max_tokens=8).json()["choices"][0]["message"]["content"]
    lines = streamed(url, name, "tell me more")
    for _ in range(5):
        next(lines)
    process.end(signal.SIGKILL)
    with contextlib.suppress(httpx.HTTPError):
        list(lines)
    again = serve()
    assert ask(again.ready(), "go on", model=name, max_tokens=8).status_code == 200
    assert again.end(signal.SIGTERM) == 0
    said = tiny.stored(tmp_path / "store.db")
    assert said[:2] == [("user", "my cat is called Tom", "complete"), ("assistant", answered, "complete")]
    assert [(role, state) for role, _, state in said[2:]] == [
        ("user", "complete"),
        ("assistant", "cut"),
        ("user", "complete"),
        ("assistant", "complete"),
    ]


def test_begun_anew_it_keeps_port_process_and_conversations(serve: Any, name: str, tmp_path: Path) -> None:
    process = serve()
    url = process.ready()
    ask(url, "my cat is called Tom", model=name, max_tokens=8)
    process.popen.send_signal(signal.SIGHUP)
    # Whoever asks meanwhile waits; a connection that the old one had accepted may be refused, and is tried again.
    answer = until(lambda: kindly(url, name), 180)
    assert answer.json()["memstream"]["usage"]["context_tokens"] > answer.json()["memstream"]["usage"]["prompt_tokens"]
    assert process.ready(times=2) == url
    assert process.end(signal.SIGTERM) == 0
    assert [text for role, text, _ in tiny.stored(tmp_path / "store.db") if role == "user"] == [
        "my cat is called Tom",
        "go on",
    ]


def kindly(url: str, model: str) -> httpx.Response | None:
    """A request that is tried again where the server is being stopped."""
    try:
        answer = ask(url, "go on", model=model, max_tokens=8)
    except httpx.HTTPError:
        return None
    return answer if answer.status_code == 200 else None


def test_interrupted_it_ends_at_once_and_in_order(serve: Any) -> None:
    process = serve()
    process.ready()
    assert process.end(signal.SIGINT) == 0
    assert not [line for line in process.said if "Traceback" in line]


def refused(*arguments: str, **variables: str) -> str:
    """What a server says that does not start."""
    done = subprocess.run(
        [MEMSTREAM, "serve", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=180,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_listens_to_others_only_with_a_key() -> None:
    assert "so it needs a key" in refused("--host", "0.0.0.0", "--port", "0")
    assert "so it needs a key" in refused("--host", "::", "--port", "0")
    assert "at least 16" in refused("--api-key", "short")
    assert "given twice" in refused(MEMSTREAM_API_KEY="a=0123456789abcdef b=0123456789abcdef")
    assert "Scope.namespace" in refused("--api-key", f"{'x' * 1000}=0123456789abcdef")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refused("--port", port)
    assert "ports go from 0 to 65535" in refused("--port", "70000")
    assert "cannot listen on nowhere.invalid" in refused("--host", "nowhere.invalid", "--api-key", "0123456789abcdef")


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    settings = tmp_path / "serve.toml"
    settings.write_text("[serve]\nnonsense = 1\n")
    assert "unknown key 'nonsense' for ServerConfig" in refused("--config", str(settings))
    settings.write_text("nonsense = 1\n")
    assert "unknown key 'nonsense'" in refused("--config", str(settings), "--port", "0")
    settings.write_text("[serve]\nwait_s = 0\n")
    assert "ServerConfig.wait_s is 0; allowed is from 0.1 to 3600.0" in refused("--config", str(settings))
    assert "cannot read" in refused("--config", str(tmp_path / "none.toml"))
