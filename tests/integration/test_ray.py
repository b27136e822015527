"""``memstream serve --ray``: two replicas over one database, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import REAL_HOME
from tests.integration.serving import until
from tests.postgres import Server

MEMSTREAM = Path(sys.executable).with_name("memstream")
ONE, TWO = "a-key-of-the-namespace-one", "a-key-of-the-namespace-two"
LONG = 4000  # tokens of a reply that is stopped before it ends
READY_S = 300


class Cluster:
    """A running ``memstream serve --ray``.

    Args:
        arguments: of the command.
        environment: of its process.
        database: what it stores in.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], database: str) -> None:
        self.database = database
        self.popen = subprocess.Popen(
            [MEMSTREAM, "serve", *arguments], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            self.said.extend(lines)

    def wait_until_ready(self) -> None:
        def ready() -> re.Match[str] | None:
            assert self.popen.poll() is None, "".join(self.said)
            return re.search(r"tiny at (http://\S+)/v1: 2 replicas", "".join(self.said))

        self.url = until(ready, READY_S)[1]

    def processes(self) -> list[psutil.Process]:
        """All of them that run."""
        whole = psutil.Process(self.popen.pid)
        return [whole, *whole.children(recursive=True)]

    def end(self) -> None:
        """Stops it as an operator does; nothing of it is left."""
        running = self.processes() if self.popen.poll() is None else []
        try:
            self.popen.send_signal(signal.SIGTERM)
            assert self.popen.wait(90) == 0, "".join(self.said)
            left = psutil.wait_procs(running, timeout=20)[1]
            assert not left, left
        finally:
            for process in running:
                if process.is_running():
                    process.kill()
            self.popen.wait(30)
            self._reader.join(30)

    # Talking

    def say(self, conversation: str, text: str, *, key: str = ONE, max_tokens: int = 1) -> str:
        """A whole reply, as the official client gets it, which tries again where a server tells it to."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=60) as client:
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": text}],
                max_tokens=max_tokens,
                extra_headers=named(conversation),
            )
        return answer.choices[0].message.content or ""

    def stream(self, stack: ExitStack, conversation: str, text: str, *, key: str = ONE) -> Iterator[dict[str, Any]]:
        """The events of a reply that is long."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": LONG, "stream": True}
        headers = {"Authorization": f"Bearer {key}", **named(conversation)}
        reply = stack.enter_context(
            httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        )
        assert reply.status_code == 200
        return (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line)

    def ask(self, method: str, path: str, *, key: str = ONE) -> httpx.Response:
        return httpx.request(method, f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60)

    # Looking

    def turns(self, conversation: str, *, namespace: str = "one") -> list[tuple[str, str, str]]:
        """Role, text and state of all that is stored."""
        statement = (
            "SELECT role, text, state FROM memstream.turns JOIN memstream.conversations ON conversation_id = "
            "conversations.id JOIN memstream.owners ON owner_id = owners.id WHERE name = %s AND namespace = %s "
            "ORDER BY sequence"
        )
        with psycopg.connect(self.database) as connection:
            return connection.execute(statement, [conversation, namespace]).fetchall()

    def was_cut(self, conversation: str) -> bool:
        """Whether its last reply is."""
        return self.turns(conversation)[-1][2] == "cut"

    def owner(self, conversation: str) -> int:
        """The process that has a conversation."""
        statement = (
            "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) JOIN memstream.conversations c "
            "ON objid = c.id JOIN memstream.owners o ON owner_id = o.id "
            "WHERE locktype = 'advisory' AND name = %s AND namespace = 'one'"
        )
        with psycopg.connect(self.database) as connection:
            [(name,)] = connection.execute(statement, [conversation]).fetchall()
        return int(name.split()[1])

    def counted(self) -> dict[str, float]:
        """Turns that each replica has answered."""
        told = self.ask("GET", "/metrics").text
        counts: dict[str, float] = {}
        for family in text_string_to_metric_families(told):
            for sample in family.samples:
                if sample.name == "memstream_turns_total":
                    replica = sample.labels["replica"]
                    counts[replica] = counts.get(replica, 0) + sample.value
        return counts


def named(conversation: str) -> dict[str, str]:
    return {"X-Conversation-Id": conversation}


@pytest.fixture(scope="module")
def cluster(server: Server, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    home = folder / "home"
    home.mkdir()
    for shared in ("models", "native"):
        (home / shared).symlink_to(REAL_HOME / shared)
    (folder / "tiny").symlink_to(model_folder)
    name = server.take()
    settings = folder / "serve.toml"
    settings.write_text(
        f'model = "{folder / "tiny"}"\nstore = "{server.url_of(name)}"\nrows = 2\n[cache]\ncache_tokens = 4096\n'
        f"[generation]\nrepetition_penalty = 1.05\n[serve]\nmax_reply_tokens = {LONG}\ngrace_s = 0\ndrain_s = 1\n"
    )
    environment = {
        **os.environ,
        "HOME": str(folder),  # Ray keeps the token of its cluster there
        "MEMSTREAM_HOME": str(home),
        "MEMSTREAM_API_KEY": f"one={ONE} two={TWO}",
        "OMP_NUM_THREADS": "1",
    }
    cluster = Cluster(
        ["--config", str(settings), "--ray", "--replicas", "2", "--port", "0"], environment, server.url_of(name)
    )
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.end()
        server.give_back(name)
    assert sorted(path.name for path in home.iterdir()) == ["models", "native"]  # all that is said is in the database


@pytest.fixture(scope="module")
def apart(cluster: Cluster) -> tuple[str, str]:
    """Two conversations, each on a replica of its own."""
    first: dict[int, str] = {}
    for i in range(64):  # one of two goes to either
        cluster.say(f"apart {i}", "amber")
        first.setdefault(cluster.owner(f"apart {i}"), f"apart {i}")
        if len(first) == 2:
            break
    one, two = first.values()
    return one, two


def test_fifty_requests_of_one_conversation_go_to_one_replica(cluster: Cluster, apart: tuple[str, str]) -> None:
    for conversation in apart:
        before, owner = cluster.counted(), cluster.owner(conversation)
        for i in range(25):
            cluster.say(conversation, f"request {i}")
        after = cluster.counted()
        assert sorted(after[replica] - before.get(replica, 0) for replica in after) == [0, 25]
        assert cluster.owner(conversation) == owner
        shown = cluster.ask("GET", f"/v1/conversations/{conversation}").json()
        assert shown["cache"] is not None  # what only its own replica knows
        assert shown["turns"] == 52


def test_conversations_talk_in_parallel_and_stop_when_left(cluster: Cluster, apart: tuple[str, str]) -> None:
    with ExitStack() as stack:
        one, two = (cluster.stream(stack, conversation, "long") for conversation in apart)
        for events in (one, two, one, two, one):  # neither waits for the end of the other
            assert next(events)["choices"][0]["finish_reason"] is None
    for conversation in apart:
        until(partial(cluster.was_cut, conversation))
        assert cluster.turns(conversation)[-1][1]  # what was said so far


def test_another_key_reaches_nothing(cluster: Cluster, apart: tuple[str, str]) -> None:
    name, before = apart[0], cluster.turns(apart[0])
    assert before
    assert cluster.ask("GET", f"/v1/conversations/{name}", key=TWO).status_code == 404
    assert cluster.ask("DELETE", f"/v1/conversations/{name}", key=TWO).status_code == 404
    assert cluster.ask("GET", "/v1/conversations", key=TWO).json()["data"] == []
    assert cluster.ask("GET", "/v1/conversations", key="no key of anybody's").status_code == 401
    cluster.say(name, "basil", key=TWO)  # another conversation of that name
    assert [turn[:2] for turn in cluster.turns(name, namespace="two")][:1] == [("user", "basil")]
    assert cluster.turns(name) == before


def test_a_replica_is_killed_in_the_middle_of_a_reply(cluster: Cluster, apart: tuple[str, str]) -> None:
    lost = apart[0]
    said = [(text, cluster.say(lost, text, max_tokens=8)) for text in ("cedar", "delta")]
    before, killed = cluster.turns(lost), cluster.owner(lost)
    with ExitStack() as stack:
        events = cluster.stream(stack, lost, "ember")
        for _ in range(3):
            next(events)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    said += [(text, cluster.say(lost, text, max_tokens=8)) for text in ("fjord", "grove")]
    assert cluster.owner(lost) != killed
    turns = cluster.turns(lost)
    acknowledged = [[("user", text, "complete"), ("assistant", reply, "complete")] for text, reply in said]
    assert turns[: len(before)] == before
    assert before[-4:] == [*acknowledged[0], *acknowledged[1]]
    assert turns[len(before) :] == [
        ("user", "ember", "complete"), ("assistant", "", "cut"), *acknowledged[2], *acknowledged[3]
    ]  # fmt: skip
