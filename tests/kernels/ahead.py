"""Compiles every kernel ahead of time for a card that is not there, through its own launcher.

    python -m tests.kernels.ahead 90 [--every]

Prints one JSON line per kernel: registers, spills, shared memory, size, loads of keys and values, tensor-core products.
Runs as a process of its own: where Triton interprets, it cannot compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from memstream.kernels.rebase import kernel as rebase
from memstream.kernels.ring_write import kernel as ring_write
from memstream.kernels.segment_attention import kernel as segment_attention
from memstream.kernels.token_nll import kernel as token_nll

SHARED_LIMIT_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of one block
PROCESSORS = {80: 108, 90: 132, 100: 148}
DIMS = (64, 80, 96, 128, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


class Absent:
    """Stands in for the driver of a card that is not there."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiling:
    """Takes a kernel's place in its module; a launch compiles it and notes the result."""

    def __init__(self, module: Any, name: str, into: list[Any]) -> None:
        self._kernel, self._into = getattr(module, name), into
        setattr(module, name, self)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._into.append(self._kernel.warmup(*args, grid=grid, **options))

        return launch


def attention(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, n: int, features: bool) -> None:
    """Launches attention over a cache of 4,096 with four heads to a kv head."""
    heads, kv_heads, slots = 32, 8, 4096
    int8 = kv_dtype == torch.int8
    table = torch.zeros(1, 64, dtype=torch.int32)
    store = torch.empty(1, kv_heads, slots, dim, dtype=kv_dtype)
    scales = torch.empty(1, kv_heads, slots, dtype=torch.float16) if int8 else None
    segment_attention.launch(
        torch.empty(1, n, heads, dim, dtype=dtype).transpose(1, 2),
        store,
        store,
        rows=table[:, 0],
        positions=table[:, 1],
        parts=table[:, 2:22].unflatten(1, (5, 4)),
        cos=torch.empty(1, 5, dim),
        sin=torch.empty(1, 5, dim),
        partner=torch.arange(dim),
        scaling=0.1,
        width=1000 if features else None,
        softcap=30.0 if features else None,
        sink_logits=torch.empty(heads) if features else None,
        key_scales=scales,
        value_scales=scales,
    )


def write(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, n: int) -> None:
    """Launches a write of n tokens."""
    table = torch.zeros(1, 64 + n, dtype=torch.int32)
    store = torch.empty(1, 8, 4096, dim, dtype=kv_dtype)
    scales = torch.empty(1, 8, 4096, dtype=torch.float16) if kv_dtype == torch.int8 else None
    new = torch.empty(1, n, 8, dim, dtype=dtype).transpose(1, 2)
    ring_write.launch(
        store, store, new, new, rows=table[:, 0], slots=table[:, 1 : 1 + n], key_scales=scales, value_scales=scales
    )


def turn(kv_dtype: torch.dtype, dim: int) -> None:
    """Launches a rebase."""
    keys = torch.empty(2, 8, 4096, dim, dtype=kv_dtype)
    scales = torch.empty(2, 8, 4096, dtype=torch.float16) if kv_dtype == torch.int8 else None
    rebase.launch(keys, scales, 1, [(32, 4064), (1, 1)], torch.empty(dim), torch.empty(dim), torch.arange(dim))


def nll(dtype: torch.dtype, depth: int, words: int) -> None:
    """Launches the likelihood of 512 tokens."""
    token_nll.launch(
        torch.empty(512, depth, dtype=dtype),
        torch.zeros(512, dtype=torch.int64),
        torch.empty(words, depth, dtype=dtype),
        bias=None,
        softcap=None,
    )


def kv_names(name: str, *, every: bool) -> list[str]:
    """Types of the cache under a model of type ``name``."""
    return ["int8", *DTYPES] if every else [name, "int8"]


def cases(*, every: bool) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """What is compiled: every type and head dimension, or the most used ones."""
    names = list(DTYPES) if every else ["bfloat16"]
    for dim in DIMS if every else (64, 128):
        for name in names:
            dtype = DTYPES[name]
            for kv_name in kv_names(name, every=every):
                kv_dtype = torch.int8 if kv_name == "int8" else DTYPES[kv_name]
                about = {"dtype": name, "kv_dtype": kv_name, "dim": dim}
                for n, phase in ((1, "decode"), (128, "prefill")):
                    for features in (False, True) if every and name == "bfloat16" else (False,):
                        yield (
                            {**about, "phase": phase, "features": features},
                            lambda a=(dtype, kv_dtype, dim, n, features): attention(*a),
                        )
                    yield {**about, "phase": phase}, lambda a=(dtype, kv_dtype, dim, n): write(*a)
                yield about, lambda a=(kv_dtype, dim): turn(*a)
    for name in names:
        for depth, words in ((576, 49_152), (4096, 128_256)):
            yield {"dtype": name, "depth": depth, "words": words}, lambda a=(DTYPES[name], depth, words): nll(*a)


def assembled(compiled: Any, arch: int) -> dict[str, int]:
    """Registers and spilled bytes, as the assembler reports them for the kernel's own PTX."""
    nvidia = triton.knobs.nvidia
    assembler = (nvidia.ptxas_blackwell if arch >= 100 else nvidia.ptxas).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
        assert target is not None
        command = [assembler, "-v", f"--gpu-name={target[1]}", "-o", str(Path(folder) / "kernel.cubin"), str(source)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = {}
    for name, pattern in (("registers", r"Used (\d+) registers"), ("spills", r"(\d+) bytes spill stores")):
        found = re.search(pattern, said)
        assert found is not None, said
        numbers[name] = int(found[1])
    return numbers


def loads_per_tile(compiled: Any) -> int | None:
    """Loads of two-dimensional tiles in the innermost loop: of keys and of values, once each; None without a loop."""
    depth, found = 0, {}
    for line in compiled.asm["ttir"].splitlines():
        if "scf.for" in line:
            depth += 1
            found.setdefault(depth, 0)
        elif re.search(r"\btt\.load\b.*tensor<\d+x\d+x", line):
            found[depth] = found.get(depth, 0) + 1
    return found[max(found)] if found and max(found) else None


def examine(arch: int, *, every: bool) -> Iterator[dict[str, Any]]:
    """Compiles all cases for one architecture."""
    driver.set_active(Absent(arch))  # type: ignore[arg-type]
    made: list[Any] = []
    for module, name in (
        (segment_attention, "attention_kernel"),
        (segment_attention, "merge_kernel"),
        (ring_write, "write_kernel"),
        (rebase, "rebase_kernel"),
        (token_nll, "nll_kernel"),
    ):
        Compiling(module, name, made)
    token_nll.arch = lambda _device: arch  # type: ignore[assignment]
    for module in (segment_attention, token_nll):
        module.processors = lambda _device: PROCESSORS[arch]  # type: ignore[attr-defined]
    done: set[str] = set()
    for about, launch in cases(every=every):
        made.clear()
        launch()
        for compiled in made:
            if compiled.hash in done:
                continue
            done.add(compiled.hash)
            ptx = compiled.asm["ptx"]
            yield {
                "arch": arch,
                "kernel": compiled.metadata.name,
                **about,
                **assembled(compiled, arch),
                "shared_bytes": compiled.metadata.shared,
                "cubin_bytes": len(compiled.asm["cubin"]),
                "warps": compiled.metadata.num_warps,
                "stages": compiled.metadata.num_stages,
                "tile_loads": loads_per_tile(compiled),
                "products": sum(ptx.count(product) for product in PRODUCTS),
                "product": next((product for product in PRODUCTS if product in ptx), None),
                "local_loads": len(re.findall(r"\bld\.local", ptx)),
            }


if __name__ == "__main__":
    for record in examine(int(sys.argv[1]), every="--every" in sys.argv):
        print(json.dumps(record), flush=True)
