"""Speculative decoding: what several tokens in one forward cost, how much faster replies come that repeat something.

    python tests/bench/speculative.py --out speculative.jsonl [--weights int4] [--drafted 4]

Each prompt is answered with and without, in turns, in conversations of their own; a ratio is that of two replies next
to each other, and the median of all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click
import torch
from common import Results, say

from memstream import Agent, GenerationConfig, RecallConfig
from memstream.config import CacheConfig, WeightsChoice
from memstream.engine import Engine
from memstream.models import load_model
from memstream.report import Reply
from memstream.streaming.model import StreamingModel

MODEL = "smollm2-135m"
TESTS = ("tests/integration/test_speculation.py",)
PARAGRAPH = (
    "The harbour of Valparaiso lies in a wide bay that is open to the north. In winter, storms from there drive high "
    "waves against the quays, and ships used to leave for the open sea until all was over. A breakwater was begun in "
    "1912 and finished eighteen years later; it is 300 metres long, and 55 metres deep at its end."
)
LINES = "\n".join(
    f"2025-03-0{1 + i % 3} 12:0{i}:17 {level} worker-{i % 4}: {text}"
    for i, (level, text) in enumerate(
        (
            ("INFO", "request 8841 took 37 ms"),
            ("INFO", "request 8842 took 41 ms"),
            ("WARN", "queue is 80 % full, 412 of 512 entries"),
            ("INFO", "request 8843 took 39 ms"),
            ("ERROR", "connection to db-2 lost after 3 tries: timed out"),
            ("INFO", "request 8844 took 1022 ms"),
        )
    )
)
ITEMS = "- two loaves of rye bread\n- a kilogram of flour\n- six eggs\n- 250 grams of butter\n- a lemon\n- chocolate"
REPETITIVE = (
    f"Repeat the following text word for word.\n\n{PARAGRAPH}",
    f"Copy these log lines exactly, one by one.\n\n{LINES}",
    f"Here is my shopping list:\n{ITEMS}\nPlease write the whole list again, and put milk at its end.",
    f"Correct the spelling of this text and change nothing else.\n\n{PARAGRAPH.replace('winter', 'wintre')}",
)
FREE = (
    "Tell me a story about a whale and a lighthouse keeper.",
    "Why is the sky blue?",
    "Give me some advice for learning to cook.",
    "What happened in the French Revolution?",
    "Describe a walk through a forest in autumn.",
    "How does a bicycle stay upright?",
)


def bench_cost(results: Results, model: StreamingModel, ids: list[int]) -> None:
    """What a piece of n tokens costs, all of them with logits, against a single step."""
    engine = Engine(model, CacheConfig())
    row = engine.admit()
    row.layout.open_group(0)
    engine.feed(row, ids[:504])
    took: dict[int, list[float]] = {}
    for n in (1, 2, 3, 5, 9, 16) * 11:
        began = time.perf_counter()
        engine.verify(row, ids[504 : 504 + n])
        took.setdefault(n, []).append(time.perf_counter() - began)
        engine.retract(row, n)
    one = statistics.median(took[1])
    results.add("spec", "step_s", one, "s", history=504)
    for n, found in took.items():
        results.add("spec", f"piece_of_{n}_over_step", statistics.median(found) / one, "ratio", history=504)


def bench_replies(results: Results, agent: Agent, kind: str, prompts: Sequence[str], drafted: int, rounds: int) -> None:
    """Tokens a second with and without, in pairs, and whether the replies are the same."""
    ratios: list[float] = []
    rates: dict[int, list[float]] = {0: [], drafted: []}
    n_drafted, n_accepted, same, pairs = 0, 0, 0, 0
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            pair: dict[int, Reply] = {}
            for most in (0, drafted) if (turn + number) % 2 else (drafted, 0):
                config = GenerationConfig(max_new_tokens=160, speculative=most)
                with agent.session(name=f"{kind} {turn} {number} {most}") as session:
                    pair[most] = session.chat(prompt, generation=config)
                rates[most].append(1000 * pair[most].usage.reply_tokens / pair[most].timings.decode_ms)
            ratios.append(rates[drafted][-1] / rates[0][-1])
            pairs, same = pairs + 1, same + (pair[0].text == pair[drafted].text)
            n_drafted += pair[drafted].usage.drafted_tokens
            n_accepted += pair[drafted].usage.accepted_tokens
            if not turn:
                results.example(
                    kind, prompt=prompt, plain=pair[0].text, speculative=pair[drafted].text, ratio=ratios[-1],
                    drafted=pair[drafted].usage.drafted_tokens, accepted=pair[drafted].usage.accepted_tokens,
                )  # fmt: skip
    how: dict[str, Any] = {"prompts": len(prompts), "rounds": rounds, "drafted": drafted}
    for most, found in rates.items():
        name = f"tokens_per_s_{kind}" if most else f"tokens_per_s_{kind}_plain"
        results.add("spec", name, statistics.median(found), "tokens/s", **how)
    results.add("spec", f"tokens_per_s_{kind}_over_plain", statistics.median(ratios), "ratio", least=min(ratios), **how)
    results.add("spec", f"acceptance_{kind}", n_accepted / max(n_drafted, 1), "share", of=n_drafted, **how)
    results.add("spec", f"identical_{kind}", same / pairs, "share", of=pairs, **how)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/speculative.jsonl"), show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--weights", type=click.Choice(get_args(WeightsChoice)), default="auto", show_default=True)
@click.option("--drafted", default=4, show_default=True, help="Most tokens drafted at once.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(out: Path, threads: int, weights: WeightsChoice, drafted: int, rounds: int, skip_tests: bool) -> None:
    """Measures replies with and without speculative decoding."""
    torch.set_num_threads(threads)
    results = Results("speculative", out, tests=TESTS, skip_tests=skip_tests)
    loaded = load_model(MODEL, device="cpu", weights=weights)
    say(f"weights {weights}")
    with Agent(loaded, store="memory", recall=RecallConfig(enabled=False)) as agent:
        bench_cost(results, agent._engine.model, loaded.tokenizer(" ".join((*REPETITIVE, *FREE)) * 2)["input_ids"])
        bench_replies(results, agent, "repetitive", REPETITIVE, drafted, rounds)
        bench_replies(results, agent, "free", FREE, drafted, rounds)
    results.close()


if __name__ == "__main__":
    main()
