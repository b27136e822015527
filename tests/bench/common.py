"""What the benchmarks share: the tests that must pass first, and one JSON line per result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

# Before anything imports torch, transformers or tokenizers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_began = time.monotonic()


def say(text: str) -> None:
    """Writes one line of progress to stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _began:7.1f} s] {text}", file=sys.stderr, flush=True)


def require_tests(paths: Sequence[str], *, skip: bool) -> None:
    """Runs the tests of what is going to be measured; a figure of broken code is worth nothing.

    Raises:
        SystemExit: a test fails.
    """
    if skip:
        say("tests skipped, as asked")
        return
    say(f"testing first: {' '.join(paths)}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", *paths]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr.fileno(), check=False).returncode:
        raise SystemExit("the tests of this part fail, so it is not measured; mend them first, or give --skip-tests")


def data_file(folder: Path | None, name: str) -> Path | None:
    """The path of a data file, or None, with a line on stderr, where it is absent."""
    if folder is None:
        say(f"left out: what needs {name}; give --data DIR")
        return None
    path = folder / name
    if not path.is_file():
        say(f"left out: what needs {name}; it is not in {folder}")
        return None
    return path


class Results:
    """Writes results as JSON lines, each at once, so that a run that is stopped leaves what it has measured.

    Args:
        bench: the benchmark's name, in every record.
        out: the file, written anew; longer material goes into a second one beside it.
        tests: test files that must pass before anything is measured.
        skip_tests: leave them out; noted in the environment record.

    Raises:
        SystemExit: a test fails.
    """

    def __init__(self, bench: str, out: Path, *, tests: Sequence[str], skip_tests: bool = False) -> None:
        require_tests(tests, skip=skip_tests)
        import torch

        self._bench = bench
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = out.open("w", encoding="utf-8")
        self._examples_path = out.with_suffix(".examples.jsonl")
        self._examples_path.unlink(missing_ok=True)
        self.add(
            "environment",
            "cpus",
            os.cpu_count() or 0,
            "count",
            cpu=_cpu_name(),
            load_average=round(os.getloadavg()[0], 2),
            torch_threads=torch.get_num_threads(),
            python=platform.python_version(),
            torch=version("torch"),
            transformers=version("transformers"),
            tests="skipped" if skip_tests else "passed",
        )

    def add(self, case: str, metric: str, value: float, unit: str, **settings: Any) -> None:
        """Writes one result and shows it on stderr.

        Args:
            case: what was measured.
            metric: which figure of it.
            value: the figure, unrounded.
            unit: of the figure.
            settings: whatever one must know to read or repeat it.
        """
        record = {"bench": self._bench, "case": case, "metric": metric, "value": value, "unit": unit, **settings}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        say(f"{case}/{metric} {value:.6g} {unit}")

    def example(self, case: str, **fields: Any) -> None:
        """Keeps one answer, line or the like in ``<out>.examples.jsonl``, to look behind a figure."""
        with self._examples_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"bench": self._bench, "case": case, **fields}, ensure_ascii=False) + "\n")

    def progress(self, items: Iterable[T], label: str) -> Iterator[T]:
        """Passes items through, saying every ten seconds how many there have been."""
        last = time.monotonic()
        n = 0
        for n, item in enumerate(items, start=1):
            if time.monotonic() - last >= 10:
                say(f"  {label}: {n - 1} done")
                last = time.monotonic()
            yield item
        say(f"  {label}: all {n} done")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
