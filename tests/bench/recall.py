"""Recall, in two parts.

    python tests/bench/recall.py answers --out r.jsonl
    python tests/bench/recall.py evidence --data DIR --out e.jsonl

``evidence`` measures what is found in real conversations, see locomo.py. ``answers`` asks about what left the cache
long ago, memstream beside every other way of asking the same model: 100 facts of ten kinds are told, at least 20,000
tokens of scripted exchanges follow (prefilled, not generated), then every fact is asked about, each time from the same
state. An answer is right when the expected string occurs in it, case-folded. Greedy, SmolLM2-135M-Instruct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from common import Results, data_file
from locomo import evidence

from memstream import Agent, CacheConfig, GenerationConfig, RecallConfig
from memstream.conversation import NOTES_HEAD, note_line
from memstream.demo import Fact, acknowledgements, exchanges, facts
from memstream.models import load_model
from memstream.session import Session

CACHE = CacheConfig(cache_tokens=1024)
ANSWER = GenerationConfig(max_new_tokens=32)
OFF = RecallConfig(enabled=False)
DENSE_TOKENS = 8192
FILLER_SEED, FACT_SEED = 11, 7
WAYS = ("none", "memstream", "window_only", "after_sinks", "notes_in_turn", "dense_8k", "fact_in_window")

Exchanges = Iterable[tuple[str, str]]


def told(chosen: Iterable[Fact]) -> Iterator[tuple[str, str]]:
    """The exchanges in which the facts are told."""
    return zip((fact.statement for fact in chosen), acknowledgements(FACT_SEED), strict=False)


class Talk:
    """One conversation that is asked again and again from the same state."""

    def __init__(self, loaded: Any, *, cache: CacheConfig = CACHE) -> None:
        self.agent = Agent(loaded.model, tokenizer=loaded.tokenizer, store="memory", cache=cache, generation=ANSWER)
        self.session: Session = self.agent.session(user="bench")
        self.conversation = self.session._conversation
        self.n_tokens = 0
        self._state: Any = None

    def add(self, told: Exchanges, *, until_tokens: int | None = None) -> None:
        """Takes exchanges in, until the conversation is so many tokens long."""
        for user, assistant in told:
            tokens = len(self.conversation.template.exchange(user, assistant))
            if until_tokens is not None and self.n_tokens + tokens > until_tokens:
                return
            self.session.add(user, assistant)
            self.n_tokens += tokens

    def freeze(self) -> None:
        """Keeps this state; every ``ask`` begins from it."""
        self.agent.memory.flush()
        self.conversation.park()
        self._state = self.conversation.swapped._kept

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within, the conversation is as it was kept; afterwards what was said in it is superseded."""
        self.conversation.swapped._kept = self._state
        self.conversation.reserve()
        self.conversation.load()
        before = self.conversation.handle.next_sequence()
        try:
            yield
        finally:
            said = [turn.id for turn in self.conversation.handle.turns(first=before)]
            self.conversation.handle.supersede(said)
            self.conversation.drop()

    def ask(self, fact: Fact, *, recall: RecallConfig, position: str | None = None) -> tuple[str, bool]:
        """The answer, and whether the statement of the fact was recalled."""
        self.agent.memory.config = recall
        with self.frozen():
            if position is not None:
                self.conversation.resident.layout.memory_position = position
            reply = self.session.chat(fact.question)
        return reply.text, any(note.text == fact.statement for note in reply.recalled)

    def ask_with_notes_in_turn(self, fact: Fact) -> tuple[str, bool]:
        """The same notes, but written into the user's turn and computed anew."""
        self.agent.memory.config = RecallConfig()
        with self.frozen():
            notes = self.agent.memory.recall(
                self.session.scope,
                [*self.conversation.latest(2), fact.question],
                window_from=self.conversation.window[0].key,
                budget_tokens=self.conversation.note_budget(),
                count_tokens=self.conversation.count_note,
            ).notes
            self.agent.memory.config = OFF
            ranked = sorted(notes, key=lambda note: note.why.order)
            lines = "\n".join(note_line(note.text) for note in (*ranked, *ranked[-1:]))
            reply = self.session.chat(f"{NOTES_HEAD}\n{lines}\n\n{fact.question}" if notes else fact.question)
        return reply.text, any(note.text == fact.statement for note in notes)

    def close(self) -> None:
        self.session.close()
        self.agent.close()


def right(fact: Fact, answer: str) -> bool:
    """Whether the expected string occurs."""
    return fact.answer.casefold() in answer.casefold()


def ask_all(
    results: Results, case: str, chosen: list[Fact], ask: Callable[[Fact], tuple[str, bool]], **settings: Any
) -> None:
    """Asks about every fact; records the share of right answers, whole and by kind."""
    hits, recalled = [], []
    for fact in results.progress(chosen, f"answers/{case}"):
        answer, found = ask(fact)
        hits.append(right(fact, answer))
        recalled.append(found)
        results.example(case, question=fact.question, expected=fact.answer, answer=answer, recalled=found)
    share = 100 * sum(hits) / len(hits)
    by_kind = {
        kind: f"{sum(h for h, f in zip(hits, chosen, strict=True) if f.kind == kind)}/"
        f"{sum(f.kind == kind for f in chosen)}"
        for kind in sorted({fact.kind for fact in chosen})
    }
    results.add("answers", case, share, "%", n=len(hits), by_kind=by_kind, **settings)
    if any(recalled):
        results.add("recalled", case, 100 * sum(recalled) / len(recalled), "%", n=len(recalled))


def answers(results: Results, *, n_facts: int, filler_tokens: int, only: set[str]) -> None:
    """All ways of asking, in one run."""
    loaded = load_model("smollm2-135m", device="cpu")
    chosen = facts(n_facts, FACT_SEED)

    if "none" in only:
        talk = Talk(loaded)
        talk.conversation.reserve()
        talk.conversation.load()
        talk.freeze()
        ask_all(results, "none", chosen, lambda fact: talk.ask(fact, recall=OFF), tokens=0)
        talk.close()
    if {"memstream", "window_only", "after_sinks", "notes_in_turn"} & only:
        talk = Talk(loaded)
        talk.add(told(results.progress(chosen, "telling the facts")))
        begun = talk.n_tokens
        talk.add(results.progress(exchanges(FILLER_SEED), "filler"), until_tokens=begun + filler_tokens)
        assert talk.n_tokens >= begun + filler_tokens - 200
        talk.freeze()
        settings = {"tokens": talk.n_tokens, "cache_tokens": CACHE.total}
        asks: dict[str, Callable[[Fact], tuple[str, bool]]] = {
            "memstream": lambda fact: talk.ask(fact, recall=RecallConfig()),
            "window_only": lambda fact: talk.ask(fact, recall=OFF),
            "after_sinks": lambda fact: talk.ask(fact, recall=RecallConfig(), position="after_sinks"),
            "notes_in_turn": talk.ask_with_notes_in_turn,
        }
        for way, ask in asks.items():
            if way in only:
                ask_all(results, way, chosen, ask, **settings)
        talk.close()
    if "dense_8k" in only:
        cache = CacheConfig(cache_tokens=DENSE_TOKENS, memory_tokens=0)
        talk = Talk(loaded, cache=cache)
        talk.add(told(chosen))
        talk.add(results.progress(exchanges(FILLER_SEED), "filler"), until_tokens=DENSE_TOKENS - 200)
        talk.freeze()
        ask_all(results, "dense_8k", chosen, lambda fact: talk.ask(fact, recall=OFF), tokens=talk.n_tokens)
        talk.close()
    if "fact_in_window" in only:
        ask_all(results, "fact_in_window", chosen, lambda fact: in_window(loaded, fact), tokens=600)


def in_window(loaded: Any, fact: Fact) -> tuple[str, bool]:
    """Tells one fact, 600 tokens of filler, and asks: it never left the window."""
    talk = Talk(loaded)
    talk.add(told([fact]))
    talk.add(exchanges(FILLER_SEED), until_tokens=talk.n_tokens + 600)
    talk.freeze()
    answer, _ = talk.ask(fact, recall=OFF)
    talk.close()
    return answer, False


@click.command()
@click.argument("part", type=click.Choice(["answers", "evidence"]), default="answers")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of locomo10.json, for PART evidence.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to.  [default: bench-out/recall-PART.jsonl]")
@click.option("--facts", "n_facts", default=100, show_default=True, help="Facts told and asked.")
@click.option("--filler-tokens", default=20_000, show_default=True, help="Tokens between telling and asking.")
@click.option("--only", multiple=True, type=click.Choice(WAYS), help="Only this way of asking; repeatable.")
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(
    part: str,
    data: Path | None,
    out: Path | None,
    n_facts: int,
    filler_tokens: int,
    only: tuple[str, ...],
    skip_tests: bool,
) -> None:
    """Recall benchmarks; PART answers asks about facts that left the cache long ago, evidence about LoCoMo."""
    tested = "tests/integration/test_agent.py" if part == "answers" else "tests/stores/test_memory_recall.py"
    path = data_file(data, "locomo10.json") if part == "evidence" else None
    out = out or Path(f"bench-out/recall-{part}.jsonl")
    results = Results("recall", out, tests=[tested], skip_tests=skip_tests)
    if part == "answers":
        answers(results, n_facts=n_facts, filler_tokens=filler_tokens, only=set(only or WAYS))
    elif path is not None:
        evidence(results, path)
    results.close()


if __name__ == "__main__":
    main()
