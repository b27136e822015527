"""``memstream demo``: the main job on a real model, with its proof: a long talk, a fixed cache, and questions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from memstream.config import CacheConfig, GenerationConfig, RecallConfig
from memstream.errors import ConfigError

if TYPE_CHECKING:
    from memstream.agent import Agent
    from memstream.demo import Fact
    from memstream.report import Reply

FACT_SEED, FILLER_SEED = 3, 4
ANSWER = GenerationConfig(max_new_tokens=32)


@dataclass(slots=True)
class Course:
    """What was measured along the way, one entry an exchange."""

    tokens: list[int] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)
    process_bytes: list[int] = field(default_factory=list)

    def note(self, tokens: int, cache_bytes: int) -> None:
        self.tokens.append(tokens)
        self.cache_bytes.append(cache_bytes)
        self.process_bytes.append(process_bytes())


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with its two answers."""

    question: str
    expected: str
    without_memory: str
    with_memory: str
    recalled: tuple[str, ...]

    def right(self, answer: str) -> bool:
        return self.expected.casefold() in answer.casefold()


@click.command("demo")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Length of the talk before the questions.",
)
@click.option("--questions", default=24, show_default=True, help="Facts told at the start and asked at the end.")
@click.option("--cache-tokens", default=1024, show_default=True, help="Size of the fixed cache.")
@click.option("--model", default=None, help="Alias, hub id, folder or .gguf file.  [default: smollm2-135m]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("demo-out"), show_default=True)
@click.option("--json", "as_lines", is_flag=True, help="One JSON object instead of the table.")
def command(tokens: int, questions: int, cache_tokens: int, model: str | None, out: Path, as_lines: bool) -> None:
    """Talk for 20,000 tokens through a cache of 1,024, then ask about the beginning.

    Facts are told first, scripted small talk follows, and the model answers questions about the facts, once with
    memory and once without. Writes demo.png and the store demo.db into --out; look into it with
    memstream memory search --store demo-out/demo.db --user demo WORDS.
    """
    from memstream.demo import MOST_FACTS, facts

    if not 1 <= questions <= MOST_FACTS:
        raise ConfigError(f"--questions is {questions}; allowed is from 1 to {MOST_FACTS}")
    cache = CacheConfig(cache_tokens=cache_tokens)
    _clear(out)
    begun = time.monotonic()
    progress = Progress()
    progress.say("loading the model; the first time it is converted, which takes half a minute")
    from memstream.agent import Agent
    from memstream.models import DEFAULT_MODEL, load_model

    loaded = load_model(model or DEFAULT_MODEL)
    common: dict[str, Any] = {"tokenizer": loaded.tokenizer, "cache": cache, "generation": ANSWER}
    chosen = facts(questions, FACT_SEED)
    course = Course()
    with Agent(loaded.model, store=out / "demo.db", **common) as agent:
        _talk(agent, chosen, tokens, course, progress)
        after = list(_ask(agent, chosen, course, progress, "asking with memory"))
    # The same kind of window without recall: what a bounded cache knows by itself.
    with Agent(loaded.model, store="memory", recall=RecallConfig(enabled=False), **common) as agent:
        _talk(agent, [], cache_tokens, Course(), progress)
        before = list(_ask(agent, chosen, Course(), progress, "asking without memory"))
    asked = [
        Asked(fact.question, fact.answer, plain.text, reply.text, tuple(note.text for note in reply.recalled))
        for fact, plain, reply in zip(chosen, before, after, strict=True)
    ]
    pictured = draw(course, out / "demo.png", bytes_per_token=agent.cache_bytes / cache.total)
    _tell(asked, course, time.monotonic() - begun, pictured, out, as_lines)


def _talk(agent: Agent, chosen: list[Fact], tokens: int, course: Course, progress: Progress) -> int:
    """Tells the facts, then small talk until the talk is ``tokens`` long. Returns its length in tokens."""
    from memstream.demo import acknowledgements, exchanges

    told = zip((fact.statement for fact in chosen), acknowledgements(FACT_SEED), strict=False)
    total = 0
    with agent.session(user="demo", name="talk") as chat, progress.task("talking", tokens) as advance:
        for user, assistant in itertools.chain(told, exchanges(FILLER_SEED)):
            if total >= tokens:
                break
            added = chat.add(user, assistant)
            total += added.n_tokens
            course.note(total, agent.cache_bytes)
            advance(added.n_tokens)
    agent.memory.flush()
    return total


def _ask(agent: Agent, chosen: list[Fact], course: Course, progress: Progress, label: str) -> Iterator[Reply]:
    """Asks about every fact in the same conversation, one after the other."""
    with agent.session(user="demo", name="talk") as chat, progress.task(label, len(chosen)) as advance:
        for fact in chosen:
            reply = chat.chat(fact.question)
            if course.tokens:
                course.note(course.tokens[-1] + reply.usage.prompt_tokens + reply.usage.reply_tokens, reply.cache_bytes)
            advance(1)
            yield reply


def _tell(asked: list[Asked], course: Course, seconds: float, pictured: Path | None, out: Path, as_json: bool) -> None:
    """Prints the table and the figures, or all of it as JSON."""
    figures = {
        "tokens": course.tokens[-1],
        "seconds": round(seconds, 1),
        "cache_bytes_at_start": course.cache_bytes[0],
        "cache_bytes_at_end": course.cache_bytes[-1],
        "right_without_memory": sum(one.right(one.without_memory) for one in asked),
        "right_with_memory": sum(one.right(one.with_memory) for one in asked),
        "questions": len(asked),
    }
    if as_json:
        files = {"store": str(out / "demo.db"), "plot": str(pictured) if pictured else None}
        click.echo(json.dumps({**figures, **files, "asked": [dataclasses.asdict(one) for one in asked]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for heading in ("question", "without memory", "with memory", "recalled"):
        table.add_column(heading)
    for one in asked:
        marks = [("[green]" if one.right(answer) else "[red]") for answer in (one.without_memory, one.with_memory)]
        table.add_row(
            escape(one.question),
            marks[0] + escape(one.without_memory),
            marks[1] + escape(one.with_memory),
            escape("\n".join(one.recalled)) or "-",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    n = figures["questions"]
    console.print(
        f"right without memory {figures['right_without_memory']} of {n}, with memory {figures['right_with_memory']} "
        f"of {n}\ncache at the start {figures['cache_bytes_at_start']:,} bytes, at the end "
        f"{figures['cache_bytes_at_end']:,} bytes, after {figures['tokens']:,} tokens in {seconds:.0f} s",
        highlight=False,
    )
    console.print(f"plot: {pictured}" if pictured else "no plot: pip install 'memstream[plots]'", highlight=False)


def draw(course: Course, path: Path, *, bytes_per_token: float) -> Path | None:
    """Draws cache and process memory against tokens, beside a cache that grows; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    mib = 2.0**20
    growing = [tokens * bytes_per_token / mib for tokens in course.tokens]
    axes.plot(course.tokens, growing, "--", color="tab:red", label="key/value cache that grows")
    process = [n / mib for n in course.process_bytes]
    axes.plot(course.tokens, process, color="tab:gray", label="whole process, measured")
    axes.plot(course.tokens, [b / mib for b in course.cache_bytes], color="tab:blue", label="memstream's cache")
    axes.set(
        xlabel="tokens of conversation", ylabel="MiB", title="A long conversation in a fixed cache", ylim=(0, None)
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def process_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Progress:
    """Says on stderr what is going on: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Within, the yielded function is told of every advance."""
        if self._console.is_terminal:
            from rich.progress import Progress as Bar

            with Bar(console=self._console) as bar:
                task = bar.add_task(label, total=total)
                yield lambda n: bar.advance(task, n)
            return
        done, shown = 0, -1

        def advance(n: int) -> None:
            nonlocal done, shown
            done += n
            if done * 10 // total > shown:
                shown = done * 10 // total
                self.say(f"{label}: {min(done, total)} of {total}")

        yield advance


def _clear(out: Path) -> None:
    """Makes the output folder, without the files of an earlier demo."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("demo.db*"):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    (out / "demo.png").unlink(missing_ok=True)
