"""Every kernel compiles for cards that are not there, spills nothing and fits their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of one block, from NVIDIA's tuning guides


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_without_spills(arch: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {record["kernel"] for record in records}
    assert kernels == {"attention_kernel", "merge_kernel", "write_kernel", "rebase_kernel", "nll_kernel"}
    for record in records:
        assert record["spills"] == 0, record
        assert record["local_loads"] == 0, record
        assert record["shared_bytes"] <= SHARED_LIMIT_BYTES[arch], record
        if record["kernel"] in ("attention_kernel", "nll_kernel"):
            assert record["products"] > 0, record  # tensor cores
            assert record["tile_loads"] == 2, record  # keys and values, or hidden states and weights, once each
