"""Compiles ``native.c`` for the processor it runs on, once, with the C compiler that is there."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import CDLL
from pathlib import Path

from memstream.config import kernel_choice, memstream_home
from memstream.errors import KernelUnavailableError

_log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
QUIET = ("-Wno-psabi",)  # vectors wider than the processor's own are cut in two, which is meant
PATIENCE_S = 120


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
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE_S).stdout
        made_of = (SOURCE.read_bytes(), version, _processor().encode(), " ".join(flags).encode())
        name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
        path = memstream_home() / "native" / f"{name}.so"
        if not path.exists():
            _compile(compiler, flags, path)
        return CDLL(str(path)), None
    except subprocess.SubprocessError as error:
        told = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        missing = f"{compiler} cannot compile them: {(told or [str(error)])[0]}"
    except OSError as error:
        missing = f"they cannot be compiled into {memstream_home() / 'native'}: {error}"
    _log.warning("without the native kernels, which is slower: %s", missing)
    return None, missing


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """In a file of its own first, so that no other process loads half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tuned = "-mcpu=native" if platform.machine().lower() in ("arm64", "aarch64") else "-march=native"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *flags, *QUIET, tuned, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S)
        made.replace(path)


def _processor() -> str:
    """What ``-march=native`` depends on, so that a home that several machines share holds a library for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
