"""Runs the application: one process, one port, an orderly end."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from memstream.errors import ConfigError
from memstream.serving.settings import ServerConfig

_LISTENING = "MEMSTREAM_LISTENING_FD"  # a socket that the process before this one handed over
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: a new one, or the one that was handed over on reload.

    Raises:
        ConfigError: the address cannot be used.
    """
    handed = os.environ.pop(_LISTENING, None)
    if handed is not None:
        return socket.socket(fileno=int(handed))
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports go from 0 to 65535"
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another with --port") from error
    return listening


class Server(uvicorn.Server):
    """Ends in order on SIGTERM and SIGINT; on SIGHUP too, to be begun anew with the same socket.

    Args:
        app: what it serves.
        config: limits.
        access_log: tells each request.
        ready: called once it takes requests, and is stopped in order from then on.

    Attributes:
        reloads: True where it ended for that.
    """

    def __init__(
        self, app: FastAPI, config: ServerConfig, *, access_log: bool = False, ready: Callable[[], None] = lambda: None
    ) -> None:
        self._app, self._ready = app, ready
        self.reloads = False
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=access_log,
                server_header=False,
                timeout_graceful_shutdown=int(config.drain_s) + 5,  # replies end by then, cut where need be
            )
        )

    def run_on(self, listening: socket.socket) -> None:
        """Serves until it is told to stop."""
        before = signal.signal(signal.SIGHUP, self._reload)
        try:
            self.run(sockets=[listening.dup()])  # which it closes; ours is handed over
        finally:
            signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take requests."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no new turn, and ends once the running ones have; a second SIGINT does not wait for them."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        turns = getattr(self._app.state, "turns", None)
        if turns is not None:
            turns.loop.call_soon_threadsafe(turns.stop_soon)

    def _reload(self, sig: int, frame: FrameType | None) -> None:
        self.reloads = True
        self.handle_exit(sig, frame)


def begin_anew(listening: socket.socket) -> None:
    """Replaces this process by a new one of the same command; clients that connect meanwhile wait."""
    os.set_inheritable(listening.fileno(), True)
    os.environ[_LISTENING] = str(listening.fileno())
    os.execv(sys.executable, sys.orig_argv)
