"""A hub of our own on this machine: a model is fetched once, and found in the cache when the hub is gone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.test_models_load import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one folder as ``me/tiny``, the way the hub does."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        data = self.answer()
        if data is not None:
            self.wfile.write(data)

    def answer(self) -> bytes | None:
        _, _, name = self.path.partition("/resolve/main/")
        file = self.folder / name
        known = "/me/tiny/" in self.path
        if not known or not name or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return data


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    save_tiny(tmp_path / "served")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, tmp_path / "served"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(name: str, endpoint: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Loads ``name`` in a process of its own: endpoint and cache are read when the hub library is imported."""
    code = (
        "import sys\n"
        "from memstream.errors import ModelError\n"
        "from memstream.models import load_model\n"
        "try:\n"
        "    loaded = load_model(sys.argv[1], device='cpu')\n"
        "except ModelError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
        "print(loaded.source, loaded.model.config.hidden_size, loaded.tokenizer('w3').input_ids)"
    )
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "PYTHONPATH": path, **settings, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_id_is_fetched_once(endpoint: str, tmp_path: Path) -> None:
    expected = f"hub:me/tiny@{COMMIT} 16 [3]\n"
    first = load("me/tiny", endpoint, tmp_path / "cache")
    assert (first.stdout, first.returncode) == (expected, 0), first.stderr
    gone = "http://127.0.0.1:9"  # the discard port: nobody listens
    assert load("me/tiny", gone, tmp_path / "cache").stdout == expected


def test_an_id_the_hub_does_not_know(endpoint: str, tmp_path: Path) -> None:
    done = load("me/tinny", endpoint, tmp_path / "cache")
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("ModelNotFoundError: cannot read the configuration of 'me/tinny'")
    )
