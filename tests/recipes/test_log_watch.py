"""The recipe as an operator plays it: an afternoon in two runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WATCH = Path(__file__).parents[2] / "recipes" / "log_watch" / "watch.py"


def test_the_script_plays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, WATCH, "--script"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1500 lines, 1 alerts" in done.stdout
    assert done.stdout.count("FATAL payment gateway: connection refused\n") == 3  # one in the first answer, two later
    assert done.stderr == ""


def test_it_is_under_60_lines() -> None:
    assert len(WATCH.read_text().splitlines()) < 60
