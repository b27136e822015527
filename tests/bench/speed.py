"""How fast is a token, and does it stay so? Beside the peers, in the same run.

    python tests/bench/speed.py --data DIR --out speed.jsonl [--peers] [--streaming-llm DIR]

DIR holds mobydick.txt. Every measurement is a process of its own (``contender.py``), and the rounds take turns, so
that what else the machine does falls on all alike; figures are medians of the rounds' medians. ``--peers`` also
measures other software, in environments that are built on first use; what cannot be built is named as missing.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from common import Results, data_file, say

from memstream.config import CacheConfig, memstream_home
from memstream.engine import Engine
from memstream.models import CATALOG, load_model
from memstream.models.wheels import find_gguf
from memstream.streaming.model import StreamingModel

MODEL = "smollm2-135m"
PROSE = "mobydick.txt"
TESTS = ("tests/unit/test_models_packed.py", "tests/integration/test_oracles.py")
ROUNDS = 3
HISTORIES = (250, 1000, 2000, 4000, 8000)
MOST_ONE_BY_ONE = 2000  # history of those who read it one token at a time
OLD = ("torch==2.13.0", "numpy<2")
PEERS = {
    "attention_sinks": (*OLD, "transformers==4.34.0", "attention-sinks==0.4.0", "accelerate==0.24.1", "einops"),
    "streaming_llm": (*OLD, "transformers==4.33.0"),
    "llama_cpp": ("llama-cpp-python==0.3.36",),
}
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode, in one situation."""

    name: str
    kind: str
    form: str
    history: int
    cache: int
    tokens: int = 64
    token_ms: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)


class Races:
    """Runs contenders in turns, and writes what they took."""

    def __init__(self, results: Results, prompt: Path, threads: int, peers: dict[str, Path], checkout: Path | None):
        self._results, self._prompt, self._threads = results, prompt, threads
        self._peers, self._checkout = peers, checkout
        self.missing: dict[str, str] = {}

    def run(self, case: str, contenders: Sequence[Contender], *, rounds: int = ROUNDS) -> dict[str, Contender]:
        """Those that could be measured, by name."""
        for _ in range(rounds):
            for contender in contenders:
                if contender.name not in self.missing:
                    self._measure(contender)
        measured = {c.name: c for c in contenders if c.token_ms}
        for c in measured.values():
            settings = {"history": c.history, "cache": c.cache, "threads": self._threads, "rounds": c.token_ms}
            settings["cache_bytes"] = c.cache_bytes[-1]
            self._results.add(case, f"{c.name}_ms_per_token", statistics.median(c.token_ms), "ms", **settings)
            if c.prefill:
                self._results.add(case, f"{c.name}_prefill", statistics.median(c.prefill), "tokens/s", **settings)
        return measured

    def ratio(self, case: str, metric: str, slow: Contender | None, fast: Contender | None) -> None:
        """How many times as long the first takes for a token."""
        if slow is not None and fast is not None:
            value = statistics.median(slow.token_ms) / statistics.median(fast.token_ms)
            self._results.add(case, metric, value, "ratio", of=slow.name, over=fast.name)

    def _measure(self, contender: Contender) -> None:
        python = self._peers.get(contender.kind, Path(sys.executable))
        model = find_gguf(CATALOG[MODEL]).parts[0] if contender.kind == "llama_cpp" else MODEL
        if contender.kind not in ("llama_cpp", "memstream"):
            model = load_model(MODEL, device="cpu").source
        command = [
            python, Path(__file__).with_name("contender.py"), contender.kind, "--model", model,
            "--form", contender.form, "--threads", self._threads, "--prompt", self._prompt,
            "--history", contender.history, "--cache", contender.cache, "--tokens", contender.tokens,
        ]  # fmt: skip
        if contender.kind == "streaming_llm":
            command += ["--checkout", self._checkout or ""]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            self.missing[contender.name] = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            miss(self._results, contender.name, self.missing[contender.name])
            return
        found = json.loads(done.stdout.strip().splitlines()[-1])
        contender.token_ms.append(statistics.median(found["token_ms"]))
        contender.cache_bytes.append(found["cache_bytes"])
        if found["prefill_tokens_per_s"]:
            contender.prefill.append(found["prefill_tokens_per_s"])
        say(f"  {contender.name}: {contender.token_ms[-1]:.1f} ms a token")


def miss(results: Results, name: str, why: str) -> None:
    """Says that a peer is not there, and why."""
    results.add("peers", f"{name}_missing", 1, "count", why=why)


def build(results: Results, folder: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """The interpreters of the peers' environments, built where they are not there yet."""
    built: dict[str, Path] = {}
    for kind in kinds:
        place = folder / kind
        python = place / "bin" / "python"
        if not (place / "whole").exists():
            say(f"building the environment of {kind}")
            venv.create(place, with_pip=True, clear=True)
            why = install(python, PEERS[kind])
            if kind == "llama_cpp" and not why and crashes(python):
                results.add("peers", "llama_cpp_without_amx", 1, "count", why="its AMX products crash on this machine")
                flags = f"-DCMAKE_C_FLAGS='{WITHOUT_AMX}' -DCMAKE_CXX_FLAGS='{WITHOUT_AMX}'"
                again = ("--no-cache-dir", "--force-reinstall", "--no-deps", *PEERS[kind])
                why = install(python, again, CMAKE_ARGS=flags)
            if why:
                miss(results, kind, why)
                continue
            (place / "whole").touch()
        built[kind] = python
    return built


def install(python: Path, packages: Sequence[str], **environment: str) -> str:
    """Installs packages into an environment; returns what went wrong, or nothing."""
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return (done.stderr.strip().splitlines() or ["pip said nothing"])[-1] if done.returncode else ""


def crashes(python: Path) -> bool:
    """Whether llama.cpp, as it was built for this processor, is killed by a signal when it reads a few tokens."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompt:
        json.dump([1] * 66, prompt)
        prompt.flush()
        command = [
            python, Path(__file__).with_name("contender.py"), "llama_cpp", "--threads", 2, "--prompt", prompt.name,
            "--model", find_gguf(CATALOG[MODEL]).parts[0], "--history", 64, "--cache", 128, "--tokens", 2,
        ]  # fmt: skip
        return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode < 0


def race(results: Results, races: Races, peers: dict[str, Path]) -> None:
    """Milliseconds a token in the situations that are compared."""
    # 24 tokens fill the cache of 1,024: llama.cpp takes no more
    forms = [Contender(form, "memstream", form, 1000, 1024, 24) for form in ("int4", "int8", "float32")]
    theirs = [Contender("llama_cpp", "llama_cpp", "Q4_1", 1000, 1024, 24)] if "llama_cpp" in peers else []
    found = races.run("decode_1000", [*forms, *theirs])
    races.ratio("decode", "vs_llama_cpp", found.get("llama_cpp"), found.get("int4"))
    if "llama_cpp" in found and "int4" in found:
        ratio = statistics.median(found["int4"].prefill) / statistics.median(found["llama_cpp"].prefill)
        results.add("prefill", "vs_llama_cpp", ratio, "ratio")

    dense = [Contender(f"dense_{form}", "transformers", form, 8000, 8192, 24) for form in ("float32", "bfloat16")]
    found = races.run("decode_8000", [Contender("memstream", "memstream", "int4", 8000, 1024), *dense])
    best = min(
        (c for name, c in found.items() if name != "memstream"),
        key=lambda c: statistics.median(c.token_ms),
        default=None,
    )
    races.ratio("decode", "vs_transformers_dense", best, found.get("memstream"))

    small = [
        Contender("memstream", "memstream", "int4", 1000, 512),
        Contender("memstream_float32", "memstream", "float32", 1000, 512),
        Contender("recompute", "recompute", "float32", 1000, 512, 8),
        *(Contender(kind, kind, "float32", 1000, 512, 32) for kind in PEERS if kind in peers and kind != "llama_cpp"),
    ]
    found = races.run("decode_512", small)
    races.ratio("decode", "vs_recompute", found.get("recompute"), found.get("memstream"))
    races.ratio("decode", "vs_streaming_llm", found.get("streaming_llm"), found.get("memstream"))
    races.ratio("decode", "vs_attention_sinks", found.get("attention_sinks"), found.get("memstream"))


def curve(races: Races, peers: dict[str, Path], picture: Path) -> None:
    """Milliseconds a token and bytes of the cache against the length of the history, drawn."""
    lines: dict[str, list[Contender]] = {}
    for history in HISTORIES:
        contenders = [
            Contender("memstream", "memstream", "int4", history, 1024, 16),
            Contender("dense", "transformers", "float32", history, history, 16),
            Contender("recompute", "recompute", "float32", history, 1024, 3),
        ]
        if "llama_cpp" in peers:
            contenders.append(Contender("llama_cpp", "llama_cpp", "Q4_1", history, history + 64, 16))
        if history <= MOST_ONE_BY_ONE:
            singles = [kind for kind in PEERS if kind in peers and kind != "llama_cpp"]
            contenders += [Contender(kind, kind, "float32", history, 1024, 16) for kind in singles]
        for name, found in races.run(f"curve_{history}", contenders, rounds=1).items():
            lines.setdefault(name, []).append(found)

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, points in lines.items():
        histories = [point.history for point in points]
        axes[0].plot(histories, [point.token_ms[-1] for point in points], marker="o", label=name)
        axes[1].plot(histories, [point.cache_bytes[-1] / 2**20 for point in points], marker="o", label=name)
    axes[0].set(yscale="log", ylabel="milliseconds a token, median")
    axes[1].set(ylabel="MiB of keys and values")
    for axis in axes:
        axis.set_xlabel("tokens of history")
        axis.grid(alpha=0.3)
    axes[1].legend(loc="upper left")
    figure.savefig(picture, dpi=120)
    say(f"picture: {picture}")


def flat(results: Results, ids: list[int], n_tokens: int) -> None:
    """Times a tenth of the tokens of a long stream one by one; the others are fed in pieces."""
    engine = Engine(StreamingModel(load_model(MODEL, device="cpu").model), CacheConfig(cache_tokens=1024))
    row = engine.admit()
    row.layout.open_group(0)
    taken: list[float] = []
    for start in results.progress(range(0, n_tokens, 1000), "thousands of tokens"):
        piece = [ids[i % len(ids)] for i in range(start, start + 1000)]
        engine.feed(row, piece[:900])
        for token in piece[900:]:
            began = time.perf_counter()
            engine.feed(row, [token])
            taken.append(1e3 * (time.perf_counter() - began))
    settings = {"tokens": n_tokens, "timed": len(taken)}
    late = taken[1000:] if len(taken) > 2000 else taken  # the cache is full from the second thousand on
    p50, p99 = statistics.median(late), statistics.quantiles(late, n=100)[-1]
    results.add("flat", "p50_ms", p50, "ms", **settings)
    results.add("flat", "p99_over_p50", p99 / p50, "ratio", **settings)
    n = min(1000, len(late) // 2)
    last_over_first = statistics.median(late[-n:]) / statistics.median(late[:n])
    results.add("flat", "last_over_first", last_over_first, "ratio", each=n, **settings)


def quality(results: Results, ids: list[int]) -> None:
    """Perplexity of one text in each form, through the decode path: one token at a time."""
    found: dict[str, float] = {}
    for form in ("float32", "int4", "int8"):
        engine = Engine(
            StreamingModel(load_model(MODEL, device="cpu", weights=form).model),  # type: ignore[arg-type]
            CacheConfig(cache_tokens=1024, memory_tokens=0),
        )
        row = engine.admit()
        row.layout.open_group(0)
        if form == "float32":  # exact however it is cut; see the oracles
            nll = -engine.score(row, ids)[1:]
        else:
            nll = torch.stack(list(results.progress(_decoded(engine, row, ids), f"perplexity in {form}")))
        found[form] = float(torch.exp(nll.double().mean()))
        results.add("quality", f"ppl_{form}", found[form], "perplexity", tokens=len(ids))
    for form in ("int4", "int8"):
        results.add("quality", f"ppl_{form}_over_float32", found[form] / found["float32"], "ratio", tokens=len(ids))


def _decoded(engine: Engine, row: Any, ids: list[int]) -> Iterator[torch.Tensor]:
    for token, following in itertools.pairwise(ids):
        engine.feed(row, [token])
        yield -row.logits.float().log_softmax(-1)[following]


def startup(results: Results) -> None:
    """What somebody waits for at the start."""
    for metric, arguments in (
        ("import_s", ["-c", "import memstream"]),
        ("help_s", ["-c", "from memstream.cli import run; run(['--help'])"]),
    ):
        taken = []
        for _ in range(7):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            taken.append(time.perf_counter() - began)
        results.add("startup", metric, statistics.median(taken[1:]), "s")
    waited = [_chat("Hello, who are you?\n") for _ in range(3)]
    for metric, seconds in zip(("prompt_s", "first_token_s"), zip(*waited, strict=True), strict=True):
        results.add("startup", metric, statistics.median(seconds), "s", of="a new process of memstream chat")


def _chat(line: str) -> tuple[float, float]:
    """Seconds until a new chat in a terminal shows its prompt, and until a line typed there begins to be answered."""
    screen, its_end = os.openpty()
    command = [sys.executable, "-c", "from memstream.cli import main; main()", "chat", "--store", "memory"]
    began = time.perf_counter()
    chat = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=subprocess.DEVNULL)
    os.close(its_end)

    def until(shown: Callable[[str], bool]) -> float:
        seen = ""
        while not shown(seen):
            seen += os.read(screen, 4096).decode(errors="replace").replace("\r", "")
        return time.perf_counter() - began

    try:
        prompt_s = until(lambda seen: "> " in seen)
        os.write(screen, line.encode())
        return prompt_s, until(lambda seen: bool(seen.partition(line)[2].strip()))
    finally:
        chat.kill()
        chat.wait()
        os.close(screen)


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with mobydick.txt.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/speed.jsonl"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--peers", is_flag=True, help="Measure other software too; builds its environments on first use.")
@click.option("--streaming-llm", type=click.Path(path_type=Path), help="A checkout of the paper's code.")
@click.option("--envs", type=click.Path(path_type=Path), help="Where environments are; default $MEMSTREAM_HOME/peers.")
@click.option("--flat-tokens", default=100_000, show_default=True, help="Length of the long stream; 0 leaves it out.")
@click.option("--quality-tokens", default=20_000, show_default=True, help="Length of the text; 0 leaves it out.")
@click.option("--skip-curve", is_flag=True, help="Leave out the picture of time and bytes against history.")
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(
    data: Path | None,
    out: Path,
    threads: int,
    peers: bool,
    streaming_llm: Path | None,
    envs: Path | None,
    flat_tokens: int,
    quality_tokens: int,
    skip_curve: bool,
    skip_tests: bool,
) -> None:
    """Milliseconds a token, of memstream and of others; whether they stay; what a form of the weights costs."""
    path = data_file(data, PROSE)
    if path is None:
        raise SystemExit("nothing to read")
    torch.set_num_threads(threads)
    results = Results("speed", out, tests=TESTS, skip_tests=skip_tests)
    ids: list[int] = load_model(MODEL, device="cpu").tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    built: dict[str, Path] = {}
    if peers:
        kinds = [kind for kind in PEERS if kind != "streaming_llm" or streaming_llm is not None]
        built = build(results, envs or memstream_home() / "peers", kinds)
    for kind in PEERS:
        if kind not in built and not peers:
            say(f"left out: {kind}; give --peers")
    if peers and streaming_llm is None:
        miss(results, "streaming_llm", "no --streaming-llm DIR was given")
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.json"
        prompt.write_text(json.dumps(ids[:10_000]))
        races = Races(results, prompt, threads, built, streaming_llm)
        race(results, races, built)
        if not skip_curve:
            curve(races, built, out.with_suffix(".png"))
    startup(results)
    if flat_tokens:
        flat(results, ids, flat_tokens)
    if quality_tokens:
        quality(results, ids[:quality_tokens])
    results.close()


if __name__ == "__main__":
    main()
