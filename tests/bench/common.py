"""What the benchmarks share: their arguments, the tests that must pass first, and one JSON line per result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before anything imports torch, transformers or tokenizers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
_began = time.monotonic()


def parser(bench: str, description: str) -> argparse.ArgumentParser:
    """The arguments every benchmark takes: ``--data``, ``--out``, ``--skip-tests``."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with the texts; parts without theirs are left out"
    )
    arguments.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("bench-out", f"{bench}.jsonl"), help="default: %(default)s"
    )
    arguments.add_argument("--skip-tests", action="store_true", help="do not run the tests first; noted in the output")
    return arguments


def say(text: str) -> None:
    """Writes one line of progress to stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _began:7.1f} s] {text}", file=sys.stderr, flush=True)


def require_tests(paths: Sequence[str], *, skip: bool) -> str:
    """Runs the tests of what is going to be measured; a figure of broken code is worth nothing.

    Returns:
        ``"passed"`` or ``"skipped"``, for the environment record.

    Raises:
        SystemExit: a test failed.
    """
    if skip:
        say("tests skipped, as asked")
        return "skipped"
    say(f"testing first: {' '.join(paths)}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *paths], cwd=ROOT, stdout=sys.stderr.fileno(), check=False
    )
    if done.returncode:
        raise SystemExit("the tests of this part fail, so it is not measured; mend them first, or give --skip-tests")
    return "passed"


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


class Records:
    """Writes results as JSON lines, each at once, so that a run that is stopped leaves what it has measured.

    Args:
        bench: the benchmark's name, in every record.
        out: the file; written anew.
        tests: what ``require_tests`` returned.
    """

    def __init__(self, bench: str, out: Path, *, tests: str) -> None:
        self._bench = bench
        out.parent.mkdir(parents=True, exist_ok=True)
        self._file = out.open("w", encoding="utf-8")
        import torch

        self.add(
            "environment",
            "cpus",
            os.cpu_count() or 0,
            "count",
            cpu=_cpu_name(),
            torch_threads=torch.get_num_threads(),
            python=platform.python_version(),
            versions={name: version(name) for name in ("memstream", "torch", "transformers")},
            tests=tests,
            load_average=round(os.getloadavg()[0], 2),
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
