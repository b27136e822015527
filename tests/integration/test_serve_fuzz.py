"""Malformed requests by the thousand: schemathesis reads the server's own description and breaks its rules."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memstream import GenerationConfig, RecallConfig
from memstream.serving import Keys
from tests.integration.serving import KEY, http, served

BRIEF = GenerationConfig(max_new_tokens=2)


class Counted:
    """An ASGI application that counts the statuses of what it wraps."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.statuses: collections.Counter[int] = collections.Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, noted if scope["type"] == "http" else send)


def fuzz(make: Any, tmp_path: Path, examples: int) -> collections.Counter[int]:
    """Sends at least so many requests for each operation; gives how often each status came."""
    agent = make(generation=BRIEF, recall=RecallConfig(enabled=False))
    counted: list[Counted] = []

    def wrap(app: Any) -> Counted:
        counted.append(Counted(app))
        return counted[0]

    with served(agent, keys=Keys([KEY]), wrap=wrap, max_reply_tokens=2) as server:
        command = [
            Path(sys.executable).with_name("st"), "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error",
            "--phases", "coverage,fuzzing", "--max-examples", examples, "--mode", "all", "--no-color", "--seed", 1,
            "--header", f"Authorization: Bearer {KEY}", "--request-timeout", 60, "--continue-on-failure",
            "--suppress-health-check", "all",
        ]  # fmt: skip
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert http.get(f"{server.url}/health").json() == {"status": "ok"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}
        answer = http.post(f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.json()["usage"]["completion_tokens"] == 2
    return counted[0].statuses


def test_hundreds_of_malformed_requests_are_the_clients_fault(make: Any, tmp_path: Path) -> None:
    statuses = fuzz(make, tmp_path, 15)
    assert not [status for status in statuses if status >= 500]
    assert statuses[400] > 100
    assert statuses[200] > 10


@pytest.mark.slow
def test_ten_thousand_malformed_requests_are_the_clients_fault(make: Any, tmp_path: Path) -> None:
    statuses = fuzz(make, tmp_path, 2200)
    assert not [status for status in statuses if status >= 500]
    assert sum(statuses.values()) > 10_000
