"""A real server in a thread, with the tiny model, and a gate that holds its replies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from memstream import Agent
from memstream.serving import Keys, ServerConfig, create_app, listen

MODEL = "tiny"
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
    """

    url: str
    agent: Agent
    app: Any
    server: uvicorn.Server

    def client(self, key: str = KEY, **settings: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **settings)

    @property
    def turns(self) -> Any:
        """Those that run, and the conversations that are open."""
        return self.app.state.turns


@contextlib.contextmanager
def served(agent: Agent, *, rows: int = 1, keys: Keys | None = None, **limits: Any) -> Iterator[Served]:
    """Serves an agent on a free port of this machine."""
    app = create_app(agent, model=MODEL, rows=rows, config=ServerConfig(**limits), keys=keys)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", agent, app, server)
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
