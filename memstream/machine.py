"""How much memory this process has taken, and how much it may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

_LOW, _ENOUGH = 20, 2**30  # less than a twentieth of all memory is little, though not where that is more than so much


class Free(NamedTuple):
    """Bytes that may still be taken, of how many."""

    available: int
    total: int


def process_bytes() -> int:
    """Memory of this process that is in use now (resident set)."""
    return int(psutil.Process().memory_info().rss)


def free_memory(root: Path = Path("/")) -> Free:
    """Where it is least: of the machine, or of a control group that this process is in (containers, services).

    Args:
        root: of the file system; another one in tests.
    """
    machine = psutil.virtual_memory()
    return min([Free(machine.available, machine.total), *_groups(root)])


def is_low(free: Free) -> bool:
    """Whether so little is left that something should be given back."""
    return free.available < min(free.total // _LOW, _ENOUGH)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: Python's, a card's, or that of torch on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _groups(root: Path) -> Iterator[Free]:
    """Free memory of every control group of this process that has a limit; none where there are no such groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            files = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        base = root / files[0]
        inner = base / name.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(base) and (free := _free(folder, *files[1:])) is not None:
                yield free


def _free(folder: Path, limit: str, usage: str, reclaimable: str) -> Free | None:
    """Free memory of one control group; None where it has no limit. Files it has read only are no use of memory."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= 2**60:
        return None
    return Free(max(0, int(most) - used + int(stat.get(reclaimable, 0))), int(most))
