"""What a summary keeps: LoCoMo's sessions, each within what the embedder reads, beside other ways to shorten them.

    python tests/bench/summaries.py --data DIR --out s.jsonl

Every session stands for something that left a window as one; a question asks for a few turns of it. ``answer_words``:
of the words of the right answer that these turns say and the question does not, how many the summary keeps;
``evidence_words``: of all words of these turns; both leave out words that say nothing. ``own_in_ten``: how often the
question finds the summaries of its sessions among the ten nearest of all pairs'. Compared with the first sentences of
a session and with random ones, of the same length.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
from common import Results, data_file, say
from locomo import CHOSEN_ON, read

from memstream.memory import SentenceTransformerEmbedder
from memstream.memory.chunker import MAX_PIECES, estimated_pieces
from memstream.memory.summarizer import sentences, summarise
from memstream.stores.fulltext import query_terms

ROOM = MAX_PIECES - 2
Shorten = Callable[[Sequence[str]], str]


def lead(texts: Sequence[str]) -> str:
    """The first sentences, as long as they fit."""
    return _filled(range(10**9), texts)


def at_random(texts: Sequence[str]) -> str:
    """Sentences drawn by chance, in their order."""
    order = list(range(sum(len(sentences(text)) for text in texts)))
    random.Random(1).shuffle(order)
    return _filled(order, texts)


def _filled(order: Sequence[int], texts: Sequence[str]) -> str:
    said = [sentence for text in texts for sentence in sentences(text)]
    kept, left = [], ROOM
    for i in order[: len(said)]:
        cost = sum(estimated_pieces(word) for word in said[i].split())
        if cost <= left:
            kept.append(i)
            left -= cost
    return " ".join(said[i] for i in sorted(kept))


def stems(text: str) -> set[str]:
    """Words that say something, without the commonest endings."""
    found = set()
    for word in query_terms(text, 10_000):
        ending = next((e for e in ("ing", "ies", "ed", "es", "s") if word.endswith(e) and len(word) > len(e) + 2), "")
        found.add(word.removesuffix(ending))
    return found


def answers(path: Path) -> list[dict[str, str]]:
    """The right answer to each question of each pair."""
    return [
        {asked["question"]: str(asked.get("answer", "")) for asked in item["qa"]}
        for item in json.loads(path.read_text(encoding="utf-8"))
    ]


def measure(results: Results, path: Path, way: str, shorten: Shorten, embedder: SentenceTransformerEmbedder) -> None:
    """Shortens every session in one way, and asks all questions."""
    pairs, right = read(path), answers(path)
    summaries = [[shorten([text for _, text in said]) for _, said in pair.sessions] for pair in pairs]
    matrix = embedder.embed([text for found in summaries for text in found])
    owners = [(number, session) for number, found in enumerate(summaries) for session in range(len(found))]
    for suffix, low, high in (("", CHOSEN_ON, len(pairs)), ("_chosen_on", 0, CHOSEN_ON)):
        kept: list[float] = []
        covered: list[float] = []
        near: list[float] = []
        for number in range(low, high):
            pair = pairs[number]
            place = {turn: (i, text) for i, (_, said) in enumerate(pair.sessions) for turn, text in said}
            queries = embedder.embed([question.text for question in pair.questions])
            for question, query in zip(pair.questions, queries, strict=True):
                said, left, sessions = _evidence(place, question.evidence, summaries[number])
                covered.append(len(left) / max(1, len(said)))
                wanted = stems(right[number][question.text]) & said - stems(question.text)
                if wanted:
                    kept.append(len(wanted & left) / len(wanted))
                best = {owners[i] for i in np.argsort(-(matrix @ query))[:10]}
                near.append(len({(number, session) for session in sessions} & best) / len(sessions))
        for metric, values in (("answer_words", kept), ("evidence_words", covered), ("own_in_ten", near)):
            results.add(way, f"{metric}{suffix}", float(np.mean(values)), "share", n=len(values))


def _evidence(
    place: dict[str, tuple[int, str]], turns: frozenset[str], summaries: Sequence[str]
) -> tuple[set[str], set[str], set[int]]:
    """Of the turns that answer a question: their words, those of them in their summaries, and their sessions."""
    said: set[str] = set()
    left: set[str] = set()
    for turn in turns:
        session, text = place[turn]
        said |= stems(text)
        left |= stems(text) & stems(summaries[session])
    return said, left, {place[turn][0] for turn in turns}


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder of locomo10.json.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/summaries.jsonl"), show_default=True)
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(data: Path | None, out: Path, skip_tests: bool) -> None:
    """What extractive summaries keep."""
    path = data_file(data, "locomo10.json")
    results = Results("summaries", out, tests=["tests/unit/test_memory_words.py"], skip_tests=skip_tests)
    embedder = SentenceTransformerEmbedder()
    ways: dict[str, Shorten] = {"memstream": summarise, "lead": lead, "random": at_random}
    for way, shorten in ways.items() if path is not None else ():
        say(f"summarising by {way}")
        assert path is not None
        measure(results, path, way, shorten, embedder)
    results.close()


if __name__ == "__main__":
    main()
