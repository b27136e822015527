"""How much memory there is: of the machine, and of control groups of both kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from memstream.machine import Free, free_memory, is_low, out_of_memory, process_bytes

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 900 * MIB, "total": 2000 * MIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def group(root: Path, folder: str, files: dict[str, Any]) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name).write_text(f"{text}\n")


def in_group(root: Path, line: str) -> Path:
    group(root, "proc/self", {"cgroup": line})
    return root


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == Free(900 * MIB, 2000 * MIB)


def test_a_group_of_version_2_and_those_around_it(tmp_path: Path) -> None:
    root = in_group(tmp_path, "0::/service/worker")
    stat = f"anon 1\ninactive_file {20 * MIB}"
    group(root, "sys/fs/cgroup", {"memory.stat": stat})  # the root has no limit
    group(
        root,
        "sys/fs/cgroup/service",
        {"memory.max": 500 * MIB, "memory.current": 400 * MIB, "memory.stat": stat},
    )
    group(root, "sys/fs/cgroup/service/worker", {"memory.max": "max", "memory.current": 7, "memory.stat": stat})
    assert free_memory(root) == Free(120 * MIB, 500 * MIB)


def test_a_group_of_version_1_whose_name_is_of_the_host(tmp_path: Path) -> None:
    """In a container the name may be one that only the host knows: the container's own group is the root then."""
    root = in_group(tmp_path, "4:memory:/docker/0123\n3:cpuset:/\n1:name=systemd:/\n0::/")
    group(
        root,
        "sys/fs/cgroup/memory",
        {
            "memory.limit_in_bytes": 300 * MIB,
            "memory.usage_in_bytes": 290 * MIB,
            "memory.stat": f"total_inactive_file {MIB}",
        },
    )
    assert free_memory(root) == Free(11 * MIB, 300 * MIB)


def test_no_limit_is_none(tmp_path: Path) -> None:
    root = in_group(tmp_path, "4:memory:/")
    files = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 290 * MIB, "memory.stat": "a 1"}
    group(root, "sys/fs/cgroup/memory", files)
    assert free_memory(root).total == 2000 * MIB


def test_a_group_that_is_over_its_limit_has_nothing(tmp_path: Path) -> None:
    root = in_group(tmp_path, "0::/")
    group(root, "sys/fs/cgroup", {"memory.max": 5 * MIB, "memory.current": 6 * MIB, "memory.stat": "anon 1"})
    assert free_memory(root) == Free(0, 5 * MIB)
    assert is_low(free_memory(root))


@pytest.mark.parametrize(("available", "low"), [(0, True), (49, True), (50, False), (900, False)])
def test_less_than_a_twentieth_is_little(available: int, low: bool) -> None:
    assert is_low(Free(available, 1000)) == low


def test_a_gigabyte_is_enough_wherever_it_is() -> None:
    assert not is_low(Free(2**30, 2**40))
    assert is_low(Free(2**30 - 1, 2**40))


def test_what_says_that_memory_ran_out() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52)
    assert out_of_memory(raised.value)
    assert not out_of_memory(RuntimeError("shapes do not match"))
    assert not out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_a_process_takes_what_it_holds() -> None:
    before = process_bytes()
    held = torch.ones(16 * MIB)
    assert 60 * MIB < process_bytes() - before < 80 * MIB
    del held
