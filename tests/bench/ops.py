"""The kernels: compiled ahead of time for cards that are not here, and timed on the one that is.

python tests/bench/ops.py --aot --out k.jsonl [--docs docs/kernels.md]
python tests/bench/ops.py --out k.jsonl          on a CUDA card: against bandwidth, torch's attention, FlashInfer
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import roofline
from common import ROOT, Results, say

TESTS = ("tests/kernels",)
ARCHS = (80, 90, 100)
SHARED_LIMIT_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}


def compile_ahead(results: Results) -> list[dict[str, Any]]:
    """Compiles every op, type and head dimension for every architecture; one record each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    records = []
    for arch in ARCHS:
        command = [sys.executable, "-m", "tests.kernels.ahead", str(arch), "--every"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in results.progress(process.stdout, f"sm_{arch}"):
                record = json.loads(line)
                records.append(record)
                case = f"aot/sm_{arch}/{record['kernel']}"
                results.add(case, "registers", record["registers"], "count", **record)
        if process.returncode:
            raise SystemExit(f"compiling for sm_{arch} failed")
        own = [record for record in records if record["arch"] == arch]
        results.add(f"aot/sm_{arch}", "kernels", len(own), "count")
        results.add(f"aot/sm_{arch}", "spills", sum(record["spills"] for record in own), "bytes")
        shared = max(record["shared_bytes"] for record in own)
        results.add(f"aot/sm_{arch}", "shared_bytes_max", shared, "bytes", limit=SHARED_LIMIT_BYTES[arch])
        bare = [r for r in own if r["kernel"] == "attention_kernel" and r["phase"] == "prefill" and not r["products"]]
        bare = [r for r in bare if r["dtype"] != "float32"]
        results.add(f"aot/sm_{arch}", "prefill_without_tensor_cores", len(bare), "count")
    return records


def aot_tables(records: list[dict[str, Any]]) -> str:
    """Markdown: a line per kernel and setting, the three architectures side by side."""
    grouped: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for r in records:
        size = f"{r['dim']}" if "dim" in r else f"E {r['depth']}, V {r['words']:,}"
        phase = r.get("phase", "") + (", width, cap, sinks" if r.get("features") else "")
        types = r["dtype"] if r.get("kv_dtype", r["dtype"]) == r["dtype"] else f"{r['dtype']}, {r['kv_dtype']} cache"
        grouped[r["kernel"], phase, types, size][r["arch"]] = r
    heads = " | ".join(f"sm_{arch}: registers, spills, shared KiB, cubin KiB" for arch in ARCHS)
    lines = [f"| kernel | phase | types | D | {heads} | tile loads | products |", "|---" * 9 + "|"]
    for (kernel, phase, types, size), by_arch in grouped.items():
        cells = " | ".join(
            f"{r['registers']}, {r['spills']}, {r['shared_bytes'] / 1024:.0f}, {r['cubin_bytes'] / 1024:.0f}"
            if (r := by_arch.get(arch))
            else "as another"
            for arch in ARCHS
        )
        products = ", ".join(dict.fromkeys(r["product"] for r in by_arch.values() if r["product"])) or "none"
        loads = next(iter(by_arch.values()))["tile_loads"]
        lines.append(f"| {kernel} | {phase} | {types} | {size} | {cells} | {loads or 'no loop'} | {products} |")
    return "\n".join(lines) + "\n"


def write_docs(path: Path, name: str, table: str) -> None:
    """Replaces the table between ``<!-- name -->`` and ``<!-- end -->``."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path} has no place for the table {name}")
    path.write_text(pattern.sub(lambda found: f"{found[1]}{table}{found[2]}", text), encoding="utf-8")
    say(f"written: the table {name} in {path}")


@click.command()
@click.option("--aot", is_flag=True, help="Compile for sm_80, sm_90 and sm_100; needs no card.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/ops.jsonl"), show_default=True)
@click.option("--docs", type=click.Path(path_type=Path, exists=True), help="Page whose tables are written anew.")
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
@click.option("--data", hidden=True, help="Not used; every benchmark takes it.")
def main(aot: bool, out: Path, docs: Path | None, skip_tests: bool, data: str | None) -> None:
    """Kernels: the ahead-of-time table, or times on a card."""
    import torch

    if not aot and not torch.cuda.is_available():
        say("left out: times of the kernels need a CUDA card; --aot compiles them anywhere")
        return
    results = Results("ops", out, tests=TESTS, skip_tests=skip_tests)
    if aot:
        records = compile_ahead(results)
        if docs is not None:
            write_docs(docs, "aot", aot_tables(records))
            write_docs(docs, "roofline", roofline.tables())
    else:
        from card import measure

        measure(results)
    results.close()


if __name__ == "__main__":
    main()
