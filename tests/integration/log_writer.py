"""A process that writes numbered lines as a service would, and rotates its file in one of several ways.

python log_writer.py PATH N_LINES MODE SEED PAUSE_S GATE

Begins when the file GATE is there.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path

KINDS = ("disk sda{} ok", "user u{} logged in", "cache miss at {}", "job {} done in 3 ms")
LINES_PER_FILE = 400


def line(i: int) -> str:
    """The i-th line; a new kind now and then, and a failure that comes back."""
    if i % 97 == 96:
        return f"line {i} FATAL unit {chr(97 + i // 97 % 20) * 3} broke down"
    return f"line {i} " + KINDS[i % 4].format(i * 37 % 1000)


def rotate(path: Path, mode: str, n: int) -> None:
    """Puts the file away and begins a new one."""
    if mode == "rename":
        path.rename(path.with_name(f"{path.name}.{n}"))
    elif mode == "delete":  # the next file may get the inode of this one
        path.unlink()
    elif mode == "copytruncate":
        shutil.copyfile(path, path.with_name(f"{path.name}.{n}"))
        os.truncate(path, 0)


def main(path: Path, n_lines: int, mode: str, seed: int, pause_s: float, gate: Path) -> None:
    """Writes all lines in writes of random length that do not end where lines do."""
    chance = random.Random(seed)
    while not gate.exists():
        time.sleep(0.01)
    for start in range(0, n_lines, LINES_PER_FILE):
        data = "".join(line(i) + "\n" for i in range(start, min(n_lines, start + LINES_PER_FILE))).encode()
        with path.open("ab", buffering=0) as file:
            while data:
                n = chance.randint(1, 3000)
                file.write(data[:n])
                data = data[n:]
                if chance.random() < 0.5:
                    time.sleep(chance.random() * pause_s)
        if start + LINES_PER_FILE < n_lines:
            if mode in ("delete", "copytruncate"):
                time.sleep(1.0)  # what is deleted or truncated before it was read is lost to every reader
            rotate(path, mode, start // LINES_PER_FILE)
    print("written", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), Path(sys.argv[6]))
