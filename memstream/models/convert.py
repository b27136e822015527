"""Converted models: each GGUF file becomes a folder of safetensors once, whole or not at all.

A conversion is written to a temporary folder beside its place, flushed to disk, and renamed into place, under a lock
that holds between processes. ``manifest.json`` lists every file with size, time and SHA-256. Each load compares sizes
and times, which takes microseconds; only where they differ are the bytes read. A folder that fails is built again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from memstream.config import memstream_home
from memstream.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from memstream.models.checksum import sha256_of
from memstream.models.wheels import GgufSource, check_digest, join_parts

_log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 1800.0


def converted_folder(source: GgufSource) -> Path:
    """Returns where the conversion of ``source`` is kept, whether or not it exists."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model"
    return memstream_home() / "models" / f"{safe}-{source.sha256[:16]}"


@dataclass(frozen=True, slots=True)
class _Stamp:
    n_bytes: int
    mtime_ns: int


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return _Stamp(status.st_size, status.st_mtime_ns)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        return None
    return manifest


def check_folder(folder: Path, *, full: bool = False) -> list[str]:
    """Returns what is wrong with a converted folder; empty when it is whole.

    Args:
        folder: a folder written by ``ensure_converted``.
        full: read every byte and compare checksums; otherwise only of files whose size or time changed.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        return [f"{folder} has no readable {MANIFEST} of format {FORMAT}"]
    problems = []
    for name, entry in manifest["files"].items():
        path = folder / name
        stamp = _stamp(path)
        if stamp is None:
            problems.append(f"{path} is missing")
        elif stamp.n_bytes != entry["bytes"]:
            problems.append(f"{path} has {stamp.n_bytes} bytes, expected {entry['bytes']}")
        elif (full or stamp.mtime_ns != entry["mtime_ns"]) and sha256_of(path) != entry["sha256"]:
            problems.append(f"{path} has another checksum than when it was written")
    return problems


def _untouched(folder: Path) -> bool:
    """Tells whether every file still has the size and time of the manifest; reads no weights."""
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    return all(
        _stamp(folder / name) == _Stamp(entry["bytes"], entry["mtime_ns"]) for name, entry in manifest["files"].items()
    )


def ensure_converted(source: GgufSource) -> Path:
    """Returns the folder with the converted model, converting it first when there is none that is whole.

    Raises:
        ModelNotFoundError: the GGUF file is damaged or half downloaded.
        UnsupportedModelError: its architecture or tokenizer cannot be converted exactly.
        ModelError: the disk is full or read-only, or another process has held the lock for too long.
    """
    folder = converted_folder(source)
    if _untouched(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.parent / f".{folder.name}.lock", timeout=LOCK_TIMEOUT_S):
            if folder.is_dir():
                problems = check_folder(folder)
                if not problems:
                    _refresh_times(folder)
                    return folder
                _log.warning("the converted model is damaged (%s); converting it again", problems[0])
            _convert(source, folder)
    except filelock.Timeout:
        raise ModelError(
            f"another process has been converting {source.name!r} for {LOCK_TIMEOUT_S:.0f} s; "
            f"stop it, or delete {folder.parent / f'.{folder.name}.lock'}"
        ) from None
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model to {folder}: {error.strerror or error}; "
            "free some space there, or set MEMSTREAM_HOME to another folder"
        ) from error
    return folder


def _convert(source: GgufSource, folder: Path) -> None:
    """Converts into a temporary folder and renames it into place. The caller holds the lock."""
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    _log.info("converting %s once; this takes a moment", source.name)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        if len(source.parts) == 1:
            file = source.parts[0]
            check_digest(file, source)
        else:
            file = work / "joined.gguf"
            join_parts(source, file)
        built = work / "built"
        built.mkdir()
        _run_conversion(source, file, built)
        _seal(source, built)
        if folder.exists():
            folder.rename(work / "damaged")
        built.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_conversion(source: GgufSource, file: Path, built: Path) -> None:
    """Runs ``memstream.models.dequantise`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "memstream.models.dequantise", str(file.absolute()), str(built)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        result = {"error": "crash", "message": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    if done.returncode == 0 and result.get("ok"):
        return
    kind, message = result["error"], result["message"]
    _log.debug("conversion of %s failed: %s", source.name, done.stderr)
    where = source.parts[0] if len(source.parts) == 1 else source.name
    if kind == "damaged":
        raise ModelNotFoundError(f"cannot read {where}: {message}; download it again")
    if kind == "unsupported":
        raise UnsupportedModelError(f"cannot convert {where}: {message}")
    if kind == "disk":
        raise OSError(message)
    killed = " (killed, perhaps for lack of memory)" if done.returncode < 0 else ""
    raise ModelError(f"converting {where} failed{killed}: {message}")


def _seal(source: GgufSource, built: Path) -> None:
    """Flushes every file to disk and writes the manifest last."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(built.iterdir()):
        _flush(path)
        stamp = _stamp(path)
        assert stamp is not None
        files[path.name] = {"bytes": stamp.n_bytes, "mtime_ns": stamp.mtime_ns, "sha256": sha256_of(path)}
    manifest = {
        "format": FORMAT,
        "name": source.name,
        "dtype": "float32",
        "source": {"sha256": source.sha256, "bytes": source.n_bytes},
        "files": files,
    }
    _write_manifest(built, manifest)
    _flush(built)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f".{MANIFEST}.new"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(folder / MANIFEST)


def _refresh_times(folder: Path) -> None:
    """Stores the present times of files whose bytes were checked, so that they are not read again each time."""
    manifest = _read_manifest(folder)
    assert manifest is not None
    for name, entry in manifest["files"].items():
        entry["mtime_ns"] = (folder / name).stat().st_mtime_ns
    _write_manifest(folder, manifest)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
