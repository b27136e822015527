"""``memstream doctor``: versions, devices, kernel path, health of models and store."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from memstream import __version__
from memstream.config import RecallConfig, kernel_path, memstream_home
from memstream.errors import MemstreamError
from memstream.models import DEFAULT_EMBEDDER, DEFAULT_MODEL, ModelStatus, check_model, list_models

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "sentence-transformers",
    "sqlalchemy",
    "faiss-cpu",
    "numpy",
)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), help="Store to check instead of the default one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(store: Path | None, as_json: bool) -> int:
    """Tell versions, devices, and the health of models and store; exit 1 when something is wrong.

    Reads every byte of the installed models, which takes a few seconds.
    """
    found = examine(store)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    return 1 if found["problems"] else 0


def examine(store: Path | None = None) -> dict[str, Any]:
    """Returns everything doctor tells, ready for JSON; ``problems`` is empty when all is well."""
    problems: list[str] = []
    models = [_model(status, problems) for status in list_models()]
    try:
        kernels: str | None = kernel_path()
    except MemstreamError as error:
        kernels = None
        problems.append(str(error))
    devices, threads = _devices()
    return {
        "memstream": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES} | {"sqlite": sqlite3.sqlite_version},
        "devices": devices,
        "cpu_threads": threads,
        "kernels": kernels,
        "home": str(memstream_home()),
        "models": models,
        "store": _store(store or memstream_home() / "memstream.db", problems),
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[str], int]:
    import torch

    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    described = [f"cuda:{n} {card.name} {card.total_memory / 2**30:.0f} GiB" for n, card in enumerate(cards)]
    return ["cpu", *described], torch.get_num_threads()


def _model(status: ModelStatus, problems: list[str]) -> dict[str, Any]:
    """Checks the checksums of one model, wheels and conversion, when it is installed."""
    wrong: list[str] = []
    if status.installed:
        click.echo(f"checking {status.alias}", err=True)
        wrong = check_model(status.alias)
        problems.extend(wrong)
    elif status.alias in (DEFAULT_MODEL, DEFAULT_EMBEDDER):
        problems.append(f"{status.alias} is not installed; run: memstream models pull {status.alias}")
    return {
        "alias": status.alias,
        "kind": status.kind,
        "installed": status.installed,
        "converted": status.converted,
        "disk_bytes": status.disk_bytes,
        "checksums": ("damaged" if wrong else "good") if status.installed else None,
    }


def _store(path: Path, problems: list[str]) -> dict[str, Any]:
    """Checks the store when there is one."""
    if not path.exists():
        return {"path": str(path), "exists": False, "health": None}
    from memstream.memory import Memory, SqlStore

    click.echo(f"checking {path}", err=True)
    wrong: list[str] = []
    try:
        with closing(Memory(SqlStore.open(path, create=False), None, RecallConfig())) as memory:
            wrong = list(memory.verify().problems)
    except MemstreamError as error:
        wrong = [str(error)]
    problems.extend(f"the store {path}: {line}" for line in wrong)
    return {"path": str(path), "exists": True, "health": "damaged" if wrong else "good"}


def _print(found: dict[str, Any]) -> None:
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    rows = [
        ("memstream", found["memstream"]),
        ("python", f"{found['python']} on {found['platform']}"),
        ("packages", packages),
        ("devices", ", ".join(found["devices"])),
        ("cpu threads", str(found["cpu_threads"])),
        ("kernels", found["kernels"] or "unavailable"),
        ("home", found["home"]),
    ]
    for model in found["models"]:
        state = "not installed" if not model["installed"] else f"installed, checksums {model['checksums']}"
        if model["converted"]:
            state += f", converted ({model['disk_bytes'] / 1e6:.0f} MB)"
        rows.append((f"{model['kind']} model" if model["kind"] == "chat" else "embedder", f"{model['alias']}: {state}"))
    store = found["store"]
    rows.append(("store", f"{store['path']}: {store['health'] if store['exists'] else 'none yet'}"))
    for name, value in rows:
        click.echo(f"{name:12} {value}")
    for problem in found["problems"]:
        click.echo(click.style("problem: ", fg="red") + problem, err=True)
    click.echo("no problems found" if not found["problems"] else f"{len(found['problems'])} problem(s) found", err=True)
