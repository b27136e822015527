"""Many conversations at once: tokens a second together and alone, who waits how long, and that no row is mixed up.

    python tests/bench/serve.py --data DIR --out serve.jsonl [--minutes 15] [--only many]

DIR holds mobydick.txt. ``--minutes`` lets threads talk in 1,000 conversations on 8 rows, with a quarter of them open at
once, and then repeats some of them alone: greedy replies in float32 have to be the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from common import Results, data_file, say

from memstream import Agent, EngineState, GenerationConfig, RecallConfig
from memstream.batching import Batch
from memstream.config import CacheConfig
from memstream.conversation import Conversation
from memstream.engine import Engine
from memstream.models import load_model
from memstream.streaming import snapshot
from memstream.streaming.model import StreamingModel
from memstream.swap import Swapped

T = TypeVar("T")
MODEL = "smollm2-135m"
PROSE = "mobydick.txt"
TESTS = ("tests/integration/test_batching.py", "tests/integration/test_swap.py", "tests/integration/test_waiting.py")
ROWS = 8
CONVERSATIONS = 1000
OFF = RecallConfig(enabled=False)
PARTS = ("batch", "ttft", "equal", "swap", "many")
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


def bench_swap(results: Results, ids: list[int]) -> None:
    """How long a full row takes out and in: in memory, as a file, and computed again."""
    model = StreamingModel(load_model(MODEL, device="cpu").model)
    engine = Engine(model, CacheConfig(), rows=2)
    row, other = engine.admit(), engine.admit()
    row.layout.open_group(0)
    began = time.perf_counter()
    engine.feed(row, ids[: row.layout.window_room - 64])
    results.add("swap", "computed_ms", 1e3 * (time.perf_counter() - began), "ms", tokens=row.layout.held)
    row.layout.close_group()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "1.snapshot"
        for _ in range(9):
            state = timed(times, "out_memory", lambda: engine.take(row))
            timed(times, "out_file", lambda state=state: snapshot.save(path, *state, fingerprint="f"))
            timed(times, "in_memory", lambda state=state: engine.put(other, state))
            timed(times, "in_file", lambda: engine.put(other, snapshot.load(path, fingerprint="f")))  # type: ignore[arg-type]
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            timed(times, "in_file_cold", lambda: engine.put(other, snapshot.load(path, fingerprint="f")))  # type: ignore[arg-type]
    results.add("swap", "bytes", snapshot.n_bytes(state), "bytes")
    for name, found in times.items():
        results.add("swap", f"{name}_ms", statistics.median(found), "ms")


def timed(times: dict[str, list[float]], name: str, job: Callable[[], T]) -> T:
    """Does something, and notes how many milliseconds it took."""
    began = time.perf_counter()
    done = job()
    times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
    return done


@contextlib.contextmanager
def swaps_timed() -> Iterator[dict[str, list[float]]]:
    """Milliseconds of everything that goes out of a row or comes into one meanwhile, by where it goes or comes from."""
    times: dict[str, list[float]] = {}
    park, write, load, rebuild = Conversation.park, Swapped.write, Conversation.load, Conversation._rebuild
    rebuilt = set[Conversation]()

    def loaded(self: Conversation) -> None:
        source, began = "memory" if self.swapped.memory_bytes else "file", time.perf_counter()
        load(self)
        if self in rebuilt:
            rebuilt.discard(self)
            source = "turns" if self.window else "nothing"
        times.setdefault(f"in_from_{source}", []).append(1e3 * (time.perf_counter() - began))

    def parked(self: Conversation) -> None:
        if self.row is not None:
            timed(times, "out_to_memory", lambda: park(self))

    def written(self: Swapped, *given: Any) -> None:
        if self.memory_bytes:
            timed(times, "memory_to_file", lambda: write(self, *given))

    def built(self: Conversation) -> None:
        rebuilt.add(self)
        rebuild(self)

    changed = {"park": parked, "load": loaded, "_rebuild": built}
    for name, method in changed.items():
        setattr(Conversation, name, method)
    Swapped.write = written  # type: ignore[method-assign]
    try:
        yield times
    finally:
        Conversation.park, Conversation.load, Conversation._rebuild = park, load, rebuild  # type: ignore[method-assign]
        Swapped.write = write  # type: ignore[method-assign]


class Crowd:
    """Threads that talk in many conversations, some of which are open at a time.

    Args:
        agent: has the rows.
        ends: when they stop; monotonic.

    Attributes:
        said: what was said and answered, by conversation.
        waits: milliseconds that turns waited.
        errors: how many turns ended in which error.
    """

    def __init__(self, agent: Agent, ends: float) -> None:
        self._agent, self._ends = agent, ends
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._busy = set[int]()
        self.said: dict[int, list[tuple[str, str]]] = {}
        self.waits: list[float] = []
        self.errors: Counter[str] = Counter()

    def talk(self, seed: int) -> None:
        """Says one thing after another, each in a conversation drawn by chance."""
        draw = random.Random(seed)
        while time.monotonic() < self._ends:
            with self._lock:
                chosen = draw.choice([c for c in draw.sample(range(CONVERSATIONS), 40) if c not in self._busy])
                self._busy.add(chosen)
                session = self._open.pop(chosen, None)
            text = f"{draw.choice(SAYINGS)} ({chosen}, {draw.randrange(100)})"
            try:
                session = session or self._agent.session(name=str(chosen))
                reply = session.chat(text)
                with self._lock:
                    self.said.setdefault(chosen, []).append((text, reply.text))
                    self.waits.append(reply.timings.wait_ms)
            except Exception as error:  # noqa: BLE001
                self.errors[repr(error)] += 1
            finally:
                self._put_back(chosen, session)

    def _put_back(self, chosen: int, session: Any) -> None:
        """Leaves a conversation open for its next turn, and closes the longest unused one where too many are."""
        stale = None
        with self._lock:
            if session is not None:
                self._open[chosen] = session
            if len(self._open) > CONVERSATIONS // 4:
                number, stale = self._open.popitem(last=False)
                self._busy.add(number)
            self._busy.discard(chosen)
        if stale is not None:
            stale.close()
            with self._lock:
                self._busy.discard(number)


def bench_many(results: Results, minutes: float) -> None:
    """1,000 conversations on 8 rows for some minutes; then some of them again, alone."""
    settings: dict[str, Any] = {"recall": OFF, "generation": GenerationConfig(max_new_tokens=12), "weights": "float32"}
    settings["cache"] = CacheConfig(cache_tokens=512, memory_tokens=0)
    states: list[EngineState] = []
    with tempfile.TemporaryDirectory() as folder, swaps_timed() as times:
        with Agent(MODEL, store=Path(folder) / "s.db", rows=ROWS, **settings) as agent:
            crowd = Crowd(agent, time.monotonic() + 60 * minutes)

            def look() -> None:
                while time.monotonic() < crowd._ends:
                    time.sleep(min(10.0, 6 * minutes))
                    states.append(agent.state())
                    say(f"  {len(crowd.waits)} turns in {len(crowd.said)} conversations; {states[-1]}")

            at_once([look, *(lambda seed=seed: crowd.talk(seed) for seed in range(ROWS))])  # type: ignore[misc]
        said = crowd.said
        sample = sorted(said, key=lambda c: -len(said[c]))[:20]
        with Agent(MODEL, store="memory", **settings) as alone:
            same = sum(
                [alone.chat(text, session=str(c)).text for text, _ in said[c]] == [answer for _, answer in said[c]]
                for c in sample
            )
    turns, last = sum(map(len, said.values())), states[-1]
    results.add("many", "turns", turns, "count", conversations=len(said), rows=ROWS, minutes=minutes)
    results.add("many", "errors", crowd.errors.total(), "count", which=dict(crowd.errors))
    results.add("many", "repeated_alone_equal", same, "count", of=len(sample), turns=sum(len(said[c]) for c in sample))
    results.add("many", "wait_ms_p50", statistics.median(crowd.waits), "ms")
    results.add("many", "wait_ms_p99", statistics.quantiles(crowd.waits, n=100)[-1], "ms")
    for name, found in times.items():
        p99 = statistics.quantiles(found, n=100)[-1] if len(found) > 1 else found[0]
        results.add("many", f"{name}_ms_p50", statistics.median(found), "ms", n=len(found), p99=p99)
    results.add("many", "rows_in_one_step", last.tokens / last.steps, "rows", steps=last.steps, tokens=last.tokens)
    results.add("many", "pressure_events", last.pressure_events, "count")
    mib = [state.process_bytes / 2**20 for state in states]
    swapped = [state.swap_bytes / 2**20 for state in states]
    half = len(states) // 2
    results.add("many", "memory_growth", mib[-1] - mib[0], "MiB", samples=[round(m) for m in mib])
    results.add("many", "memory_growth_second_half", mib[-1] - mib[half], "MiB")
    results.add("many", "swap_in_memory", swapped[-1], "MiB", samples=[round(m) for m in swapped])
    results.add("many", "swap_in_files", last.swap_file_bytes / 2**20, "MiB")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with mobydick.txt.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/serve.jsonl"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--minutes", default=0.0, show_default=True, help="How long 1,000 conversations talk; 0 leaves it out.")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only these parts; several may be named.")
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(data: Path | None, out: Path, threads: int, minutes: float, only: tuple[str, ...], skip_tests: bool) -> None:
    """Measures many conversations on the rows of one agent."""
    path = data_file(data, PROSE)
    if path is None:
        raise SystemExit("nothing to read")
    torch.set_num_threads(threads)
    results = Results("serve", out, tests=TESTS, skip_tests=skip_tests)
    ids: list[int] = load_model(MODEL, device="cpu").tokenizer(path.read_text(encoding="utf-8")[:60_000])["input_ids"]
    parts: dict[str, Callable[[], None]] = {
        "batch": lambda: bench_batch(results, ids),
        "ttft": lambda: bench_first_token(results),
        "equal": lambda: bench_equal(results),
        "swap": lambda: bench_swap(results, ids),
        "many": lambda: bench_many(results, minutes) if minutes else None,
    }
    for name in only or PARTS:
        parts[name]()
    results.close()


if __name__ == "__main__":
    main()
