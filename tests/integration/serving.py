"""A real server in a thread, with the tiny model, and a gate that holds its replies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from memstream import Agent
from memstream.bots import Talk
from memstream.serving import Keys, ServerConfig, create_app, listen

MEMSTREAM = Path(sys.executable).with_name("memstream")
MODEL = "tiny"
http = httpx.Client(timeout=60)  # the machine may be busy
KEY = "a-key-of-the-default-namespace"


class Gate:
    """A logits processor that lets tokens through while it is open.

    Attributes:
        n_tokens: how many it has let through.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: int | None = None
        self.n_tokens = 0

    def __call__(self, ids: Any, scores: Any) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._left is None or self._left > 0, 60)
            if self._left is not None:
                self._left -= 1
            self.n_tokens += 1
        return scores

    def hold_after(self, n: int) -> None:
        """Holds what comes after ``n`` more tokens."""
        with self._changed:
            self._left = n

    def open(self) -> None:
        """Lets everything through."""
        with self._changed:
            self._left = None
            self._changed.notify_all()


@dataclass
class Served:
    """A running server.

    Attributes:
        url: without a path.
        agent: behind it.
        app: the application.
        server: what runs it.
        clients: that were made for it.
    """

    url: str
    agent: Agent
    app: Any
    server: uvicorn.Server
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, key: str = KEY) -> openai.OpenAI:
        """The official client, closed with the server."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.clients.append(client)
        return client

    @property
    def turns(self) -> Any:
        """Those that run, and the conversations that are open."""
        return self.app.state.turns


@contextlib.contextmanager
def served(
    agent: Agent,
    *,
    rows: int = 1,
    keys: Keys | None = None,
    with_page: bool = False,
    talk: Talk | None = None,
    wrap: Callable[[Any], Any] = lambda app: app,
    **limits: Any,
) -> Iterator[Served]:
    """Serves an agent on a free port of this machine."""
    app = create_app(
        agent, model=MODEL, rows=rows, config=ServerConfig(**limits), keys=keys, talk=talk, with_page=with_page
    )
    server = uvicorn.Server(uvicorn.Config(wrap(app), lifespan="on", log_config=None))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            assert server.started
            running = Served(f"http://127.0.0.1:{listening.getsockname()[1]}", agent, app, server)
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: [client.close() for client in running.clients])
                yield running
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Waits until something holds, and gives it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)
    return found


class Process:
    """A server process and what it has said; the ``command`` line is ``memstream serve``'s unless it is given."""

    def __init__(self, *arguments: str, command: Sequence[str | Path] = (MEMSTREAM, "serve")) -> None:
        self.popen = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.said.extend(self.popen.stderr)

    def ready(self, times: int = 1) -> str:
        """Waits until it listens, for the so-manieth time; gives its address."""

        def lines() -> list[str]:
            assert self.popen.poll() is None, "".join(self.said)
            return [line for line in self.said if " at http://" in line]

        until(lambda: len(lines()) >= times, 180)
        return lines()[-1].split(" at ")[1].split("/v1:")[0]

    def end(self, sig: int) -> int:
        self.popen.send_signal(sig)
        return self.popen.wait(180)

    def close(self) -> None:
        """Kills it where it runs."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait(30)
        assert self.popen.stderr is not None
        self.popen.stderr.close()
