"""Limits of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memstream.config import Settings, check_range

DEFAULTS: Mapping[str, Any] = {"model": "smollm2-135m", "rows": 8}  # of an agent that is served


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Settings):
    """Limits of a server.

    Attributes:
        max_waiting: requests that may wait for a row or for their conversation; more are answered 503.
        wait_s: seconds that one may wait before it is answered 503.
        grace_s: seconds that a reply goes on for a client that is gone; what was said by then is stored.
        drain_s: seconds that running replies have to end once the server is told to stop; then they are stored as cut.
        max_body_bytes: longest request.
        max_reply_tokens: longest reply that may be asked for.
        open_conversations: conversations kept open between their requests; the longest unused one is closed first.
        idle_s: seconds after which an unused conversation is closed, so that another process may have it.
    """

    max_waiting: int = 64
    wait_s: float = 60.0
    grace_s: float = 2.0
    drain_s: float = 30.0
    max_body_bytes: int = 1 << 20
    max_reply_tokens: int = 4096
    open_conversations: int = 1024
    idle_s: float = 300.0

    def __post_init__(self) -> None:
        check_range(self, "max_waiting", 0, 10_000)
        check_range(self, "wait_s", 0.1, 3600.0)
        check_range(self, "grace_s", 0.0, 3600.0)
        check_range(self, "drain_s", 0.0, 3600.0)
        check_range(self, "max_body_bytes", 1024, 1 << 30)
        check_range(self, "max_reply_tokens", 1)
        check_range(self, "open_conversations", 1)
        check_range(self, "idle_s", 0.1)
