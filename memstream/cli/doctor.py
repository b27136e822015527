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
from memstream.config import RecallConfig, memstream_home
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
    "triton",
    "numpy",
)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), help="Store to check instead of the default one.")
@click.option(
    "--model", metavar="NAME", help="Tell whether this model can be streamed: alias, hub id, folder, GGUF file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(store: Path | None, model: str | None, as_json: bool) -> int:
    """Tell versions, devices, and the health of models and store; exit 1 when something is wrong.

    Reads every byte of the installed models, which takes a few seconds.
    """
    found = examine(store, model)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    return 1 if found["problems"] else 0


def examine(store: Path | None = None, model: str | None = None) -> dict[str, Any]:
    """Returns everything doctor tells, ready for JSON; ``problems`` is empty when all is well."""
    problems: list[str] = []
    models = [_model(status, problems) for status in list_models()]
    devices, threads = _devices()
    streaming = None if model is None else _streaming(model, problems)
    return {
        "memstream": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES} | {"sqlite": sqlite3.sqlite_version},
        "devices": devices,
        "cpu_threads": threads,
        "kernels": _kernels(problems),
        "weights": _weights(),
        "home": str(memstream_home()),
        "models": models,
        "streaming": streaming,
        "store": _store(store or memstream_home() / "memstream.db", problems),
        "problems": problems,
    }


def _kernels(problems: list[str]) -> dict[str, str] | None:
    """Which implementation of the kernels runs here, and why; None where the one asked for cannot."""
    import torch

    from memstream.streaming.model import explain_kernels

    try:
        active, why = explain_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except MemstreamError as error:
        problems.append(str(error))
        return None
    return {"active": active, "why": why}


def _weights() -> str | None:
    """The form in which the CPU holds weights; None where the kernels asked for cannot run, which is told already."""
    from memstream.models.packed import explain_weights

    try:
        return explain_weights()
    except MemstreamError:
        return None


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


def _streaming(name: str, problems: list[str]) -> dict[str, Any]:
    """Whether a model can be streamed, from its configuration alone."""
    from memstream.models import read_config
    from memstream.streaming.model import check_supported, sliding_layers

    found: dict[str, Any] = {"model": name, "type": None, "supported": False, "note": None}
    try:
        config = read_config(name)
        found["type"] = config.model_type
        check_supported(config)
    except MemstreamError as error:
        problems.append(str(error))
        return found
    sliding, width = sliding_layers(config)
    if sliding == config.num_hidden_layers:
        found["note"] = (
            f"every layer sees only the last {width} positions: with a cache of more than {width} tokens the pinned "
            "first tokens and the system text drop out of sight"
        )
    elif sliding:
        found["note"] = f"{sliding} of {config.num_hidden_layers} layers see only the last {width} positions"
    return {**found, "supported": True}


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
        ("kernels", "{active} ({why})".format(**found["kernels"]) if found["kernels"] else "unavailable"),
        ("cpu weights", found["weights"]),
        ("home", found["home"]),
    ]
    for model in found["models"]:
        state = "not installed" if not model["installed"] else f"installed, checksums {model['checksums']}"
        if model["converted"]:
            state += f", converted ({model['disk_bytes'] / 1e6:.0f} MB)"
        rows.append((f"{model['kind']} model" if model["kind"] == "chat" else "embedder", f"{model['alias']}: {state}"))
    if (streaming := found["streaming"]) is not None and streaming["supported"]:
        note = f"; {streaming['note']}" if streaming["note"] else ""
        rows.append(("streaming", f"{streaming['model']} ({streaming['type']}) can be streamed{note}"))
    store = found["store"]
    rows.append(("store", f"{store['path']}: {store['health'] if store['exists'] else 'none yet'}"))
    for name, value in rows:
        click.echo(f"{name:12} {value}")
    for problem in found["problems"]:
        click.echo(click.style("problem: ", fg="red") + problem, err=True)
    click.echo("no problems found" if not found["problems"] else f"{len(found['problems'])} problem(s) found", err=True)
