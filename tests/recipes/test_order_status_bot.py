"""The bot as customers play it on two days."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BOT = Path(__file__).parents[2] / "recipes" / "order_status_bot" / "bot.py"


def test_the_script_plays(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, BOT, "--script"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Order 48213 was shipped on Monday and arrives on Thursday.") == 2
    assert done.stdout.endswith("bela> Where is my order?\nWhat is your order number?\n")
    assert done.stderr == ""


def test_it_is_under_60_lines() -> None:
    assert len(BOT.read_text().splitlines()) < 60
