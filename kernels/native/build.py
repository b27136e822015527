"""Compiles ``native.c`` for the processor it runs on, once, with the C compiler that is there."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path

from memstream.config import kernel_choice, memstream_home
from memstream.errors import KernelUnavailableError

_log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
QUIET = ("-Wno-psabi",)  # vectors wider than the processor's own are cut in two, which is meant
PATIENCE_S = 120
MOST_KEPT = 16  # libraries: of other sources, compilers and processors that share the home


def native_runs() -> bool:
    """Whether products and decode steps on the CPU are those of ``native.c``; False: torch's.

    Raises:
        ConfigError: ``$MEMSTREAM_KERNELS`` is not a choice.
        KernelUnavailableError: they were asked for and cannot be made.
    """
    choice = kernel_choice()
    if choice not in ("auto", "native"):
        return False
    _, missing = _built()
    if missing and choice == "native":
        raise KernelUnavailableError(f"MEMSTREAM_KERNELS is 'native', but {missing}; unset it to use torch")
    return missing is None


def why_no_native() -> str | None:
    """The reason why there are no native kernels; None where they run. Compiles them where that was not done yet."""
    return _built()[1]


def library() -> CDLL:
    """The compiled kernels; only where ``native_runs``."""
    found, missing = _built()
    assert found is not None, missing
    return found


def _built() -> tuple[CDLL | None, str | None]:
    return _build(FLAGS)


@functools.cache
def _build(flags: tuple[str, ...]) -> tuple[CDLL | None, str | None]:
    """The library, or the reason why there is none."""
    compiler = _compiler()
    if compiler is None:
        return None, "there is no C compiler (gcc, cc or clang)"
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE_S).stdout
        made_of = (SOURCE.read_bytes(), version, _processor().encode(), " ".join(flags).encode())
        name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
        path = _own_folder() / f"{name}.so"
        if not path.exists():
            _compile(compiler, flags, path)
        try:
            return _load(path), None
        except OSError:  # half of it, perhaps, from a disk that was full
            _compile(compiler, flags, path)
            return _load(path), None
    except subprocess.SubprocessError as error:
        told = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        missing = f"{shlex.join(compiler)} cannot compile them: {(told or [str(error)])[0]}"
    except (OSError, RuntimeError, AttributeError) as error:
        missing = f"they cannot be compiled and loaded: {error}"
    _log.warning("without the native kernels, which is slower: %s", missing)
    return None, missing


def _compiler() -> list[str] | None:
    """The command of a C compiler; on macOS only one that is named: the system's knows no OpenMP."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    if sys.platform == "darwin":
        return None
    found = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    return None if found is None else [found]


def _own_folder() -> Path:
    """Where libraries are kept.

    Raises:
        OSError: it cannot be made, or somebody else could have put a library there.
    """
    home = memstream_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = home / "native"
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_own(folder)
    return folder


def _check_own(path: Path) -> None:
    found = path.stat()
    if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise OSError(f"others may write to {path}; make it yours alone (chmod go-w), or set MEMSTREAM_HOME")


def _load(path: Path) -> CDLL:
    _check_own(path)
    loaded = CDLL(str(path))
    for name in ("ms_packed_bytes", "ms_product", "ms_step", "ms_spread", "ms_nll"):
        getattr(loaded, name)
    return loaded


def _compile(compiler: Sequence[str], flags: Sequence[str], path: Path) -> None:
    """In a file of its own first, so that no other process loads half of it; drops libraries long unused."""
    tuned = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler, *flags, *QUIET, tuned, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
        made.chmod(0o700)
        made.replace(path)
    older = sorted(path.parent.glob("*.so"), key=lambda other: other.stat().st_mtime, reverse=True)
    for other in older[MOST_KEPT:]:
        other.unlink(missing_ok=True)


def _processor() -> str:
    """What ``-march=native`` depends on, so that a home that several machines share holds a library for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
