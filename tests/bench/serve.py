"""Many conversations at once: tokens a second together and alone, who waits how long, and that no row is mixed up.

    python tests/bench/serve.py --data DIR --out serve.jsonl [--minutes 15]

DIR holds mobydick.txt. ``--minutes`` lets threads talk in 1,000 conversations on 8 rows, and then repeats some of
them alone: greedy replies in float32 have to be the same.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from common import Results, data_file, say

from memstream import Agent, GenerationConfig, RecallConfig
from memstream.batching import Batch
from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.models import load_model
from memstream.streaming.model import StreamingModel

MODEL = "smollm2-135m"
PROSE = "mobydick.txt"
TESTS = ("tests/integration/test_batching.py",)
ROWS = 8
CONVERSATIONS = 1000
OFF = RecallConfig(enabled=False)
SAYINGS = ("What is the sea?", "Tell me about whales.", "Who are you?", "Count to ten.", "Name three colours.")


def at_once(jobs: Sequence[Callable[[], object]]) -> float:
    """Runs jobs in a thread each; returns seconds until the last has ended."""
    gate = threading.Barrier(len(jobs) + 1)
    raised: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        gate.wait()
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return time.perf_counter() - began


def bench_batch(results: Results, ids: list[int], n_tokens: int = 64) -> None:
    """Tokens a second of 1 to 16 threads, each with a row of its own and a greedy choice after each token."""
    model = StreamingModel(load_model(MODEL, device="cpu").model)
    for history, suffix in ((128, ""), (1000, "_at_1000")):
        rates: dict[int, list[float]] = {}
        for n in (1, 2, 4, ROWS, 2 * ROWS) * 3:
            engine = Engine(model, CacheConfig(cache_tokens=history + n_tokens + 64, memory_tokens=0), rows=n)
            batch, rows = Batch(engine, most=n), [engine.admit() for _ in range(n)]
            for i, row in enumerate(rows):
                row.layout.open_group(0)
                engine.feed(row, ids[100 * i : 100 * i + history])

            def decode(row: Any, batch: Batch = batch) -> None:
                for _ in range(n_tokens):
                    batch.step(row, int(row.logits.argmax()))

            seconds = at_once([lambda row=row: decode(row) for row in rows])  # type: ignore[misc]
            rates.setdefault(n, []).append(n * n_tokens / seconds)
        for n, found in rates.items():
            results.add("batch", f"tokens_per_s_{n}{suffix}", statistics.median(found), "tokens/s", history=history)
        ratio = statistics.median(rates[ROWS]) / statistics.median(rates[1])
        results.add("batch", f"tokens_per_s_{ROWS}_over_1{suffix}", ratio, "ratio", history=history)


def bench_first_token(results: Results) -> None:
    """How long a short turn waits for its first token, alone and while seven others are answered."""
    with tempfile.TemporaryDirectory() as folder:
        long = GenerationConfig(max_new_tokens=400, repetition_penalty=1.1)
        with Agent(MODEL, store=Path(folder) / "s.db", rows=ROWS, recall=OFF, generation=long) as agent:
            sessions = [agent.session(name=str(i)) for i in range(ROWS)]
            for session in sessions:
                session.chat("Hello.", generation=GenerationConfig(max_new_tokens=2))

            def first() -> float:
                began = time.perf_counter()
                stream = sessions[0].stream("What is the sea?", generation=GenerationConfig(max_new_tokens=4))
                next(stream)
                waited = time.perf_counter() - began
                list(stream)
                return waited

            alone = [first() for _ in range(7)]
            begun = threading.Barrier(ROWS)
            done = threading.Event()

            def talk(session: Any) -> None:
                stream = session.stream("Tell me a long story about a whale.")
                next(stream)
                begun.wait()
                for _ in stream:
                    if done.is_set():
                        session.cancel()

            together: list[float] = []

            def ask() -> None:
                begun.wait()
                together.extend(first() for _ in range(7))
                done.set()

            at_once([ask, *(lambda session=session: talk(session) for session in sessions[1:])])  # type: ignore[misc]
            for session in sessions:
                session.close()
    results.add("ttft", "alone_s", statistics.median(alone), "s")
    results.add("ttft", "with_7_running_s", statistics.median(together), "s")
    results.add("ttft", "with_7_running_over_alone", statistics.median(together) / statistics.median(alone), "ratio")


def bench_equal(results: Results) -> None:
    """Replies of eight conversations at once against the same alone, float32, greedy."""
    texts = {str(i): [f"{SAYINGS[i % 5]} ({i})", SAYINGS[(i + 1) % 5]] for i in range(ROWS)}
    brief = GenerationConfig(max_new_tokens=32)
    found: dict[int, dict[str, list[str]]] = {}
    for rows in (1, ROWS):
        with Agent(MODEL, store="memory", rows=rows, recall=OFF, generation=brief, weights="float32") as agent:
            said: dict[str, list[str]] = {name: [] for name in texts}
            sessions = {name: agent.session(name=name) for name in texts}

            def talk(name: str, said: Any = said, sessions: Any = sessions) -> None:
                said[name] += [sessions[name].chat(text).text for text in texts[name]]

            if rows == 1:
                for name in texts:
                    talk(name)
            else:
                at_once([lambda name=name, talk=talk: talk(name) for name in texts])  # type: ignore[misc]
            found[rows] = said
    same = sum(found[1][name] == found[ROWS][name] for name in texts)
    results.add("batch", "conversations_equal", same, "count", of=len(texts), weights="float32")


def bench_many(results: Results, minutes: float) -> None:
    """1,000 conversations on 8 rows for some minutes; then some of them again, alone."""
    brief = GenerationConfig(max_new_tokens=12)
    process, ends = psutil.Process(), time.monotonic() + 60 * minutes
    said: dict[int, list[tuple[str, str]]] = {}
    waits: list[float] = []
    resident: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"recall": OFF, "generation": brief, "weights": "float32"}
        settings["cache"] = CacheConfig(cache_tokens=512, memory_tokens=0)
        with Agent(MODEL, store=Path(folder) / "s.db", rows=ROWS, **settings) as agent:
            busy, lock = set[int](), threading.Lock()

            def talk(seed: int) -> None:
                draw = random.Random(seed)
                while time.monotonic() < ends:
                    with lock:
                        chosen = draw.choice([c for c in draw.sample(range(CONVERSATIONS), 40) if c not in busy])
                        busy.add(chosen)
                    text = f"{draw.choice(SAYINGS)} ({chosen}, {draw.randrange(100)})"
                    with agent.session(name=str(chosen)) as session:
                        reply = session.chat(text)
                    with lock:
                        busy.discard(chosen)
                        said.setdefault(chosen, []).append((text, reply.text))
                        waits.append(reply.timings.wait_ms)
                        if len(waits) % 50 == 0:
                            resident.append((time.monotonic(), process.memory_info().rss / 2**20))
                            say(f"  {len(waits)} turns in {len(said)} conversations, {resident[-1][1]:.0f} MiB")

            at_once([lambda seed=seed: talk(seed) for seed in range(ROWS)])  # type: ignore[misc]
        sample = sorted(said, key=lambda c: -len(said[c]))[:20]
        with Agent(MODEL, store="memory", **settings) as alone:
            same = sum(
                [alone.chat(text, session=str(c)).text for text, _ in said[c]] == [answer for _, answer in said[c]]
                for c in sample
            )
    turns = sum(map(len, said.values()))
    results.add("many", "turns", turns, "count", conversations=len(said), rows=ROWS, minutes=minutes)
    results.add("many", "repeated_alone_equal", same, "count", of=len(sample), turns=sum(len(said[c]) for c in sample))
    results.add("many", "wait_ms_p50", statistics.median(waits), "ms")
    results.add("many", "wait_ms_p99", statistics.quantiles(waits, n=100)[-1], "ms")
    half = len(resident) // 2
    if half:
        results.add("many", "memory_growth_second_half", resident[-1][1] - resident[half][1], "MiB")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with mobydick.txt.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/serve.jsonl"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--minutes", default=0.0, show_default=True, help="How long 1,000 conversations talk; 0 leaves it out.")
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(data: Path | None, out: Path, threads: int, minutes: float, skip_tests: bool) -> None:
    """Measures many conversations on the rows of one agent."""
    path = data_file(data, PROSE)
    if path is None:
        raise SystemExit("nothing to read")
    torch.set_num_threads(threads)
    results = Results("serve", out, tests=TESTS, skip_tests=skip_tests)
    ids: list[int] = load_model(MODEL, device="cpu").tokenizer(path.read_text(encoding="utf-8")[:60_000])["input_ids"]
    bench_batch(results, ids)
    bench_first_token(results)
    bench_equal(results)
    if minutes:
        bench_many(results, minutes)
    results.close()


if __name__ == "__main__":
    main()
