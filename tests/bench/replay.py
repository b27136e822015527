"""Log watching: how well the default configuration points out what people later labelled, and how fast.

    python tests/bench/replay.py --data DIR --out p.jsonl

Chronological, no training, no label seen: BGL's label is dropped by the reader, HDFS's labels are in another file. One
configuration for both. The floors are computed in the same run from the same lines: severity, a word, how rare a
template has been so far (online), unigram. Blocks of HDFS: the log-mean-exp of their lines' scores, so that the
length of a block takes no part. ``--drain PYTHON`` names an interpreter with drain3, timed beside our miner.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow.parquet as parquet
from common import Results, data_file, say
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from memstream import Replay, ReplayConfig
from memstream.replay import Record, Summary
from memstream.replay.incidents import PastIncidents
from memstream.replay.normalise import mask
from memstream.replay.templates import TemplateMiner

TESTS = ["tests/unit/test_replay_alerts.py", "tests/unit/test_replay_templates.py", "tests/integration/test_replay.py"]
Floats = NDArray[np.float64]
N_ALERTS = 100
VOCABULARY = 49_152  # words that the unigram expects, as many as SmolLM2 has tokens


class Log:
    """One log with its labels, which nothing but the metrics sees.

    Args:
        path: of the file that is replayed.
        messages: of each line.
        levels: of each line.
        labels: of each line, or of each block.
        blocks: number of the block of each line; None: the lines are labelled.
        times: of each line, seconds.
    """

    def __init__(
        self,
        path: Path,
        messages: list[str],
        levels: list[str],
        labels: Sequence[bool],
        *,
        blocks: NDArray[np.int64] | None = None,
        times: Sequence[float] = (),
    ) -> None:
        self.path, self.messages, self.levels = path, messages, levels
        self.labels = np.array(labels)
        self.blocks, self.times = blocks, times
        miner = TemplateMiner(10_000)
        self.templates = [miner.add(message).template.id for message in messages]

    def of_blocks(self, scores: Floats, how: str) -> Floats:
        """Scores of blocks from those of their lines; those of lines where lines are labelled."""
        if self.blocks is None:
            return scores
        n = np.bincount(self.blocks)
        if how == "max":
            highest = np.full(len(n), -np.inf)
            np.maximum.at(highest, self.blocks, scores)
            return highest
        if how == "mean":
            return np.bincount(self.blocks, weights=scores) / n
        return np.log(np.bincount(self.blocks, weights=np.exp(scores)) / n)


def read_bgl(path: Path) -> tuple[Log, list[str]]:
    """BGL_2k: the label is field 1. Returns the labels too, which name the kind of failure."""
    lines = [line.rstrip("\r") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    fields = [line.split(" ", 9) for line in lines]
    kinds = [field[0] for field in fields]
    log = Log(
        path,
        [field[9] if len(field) > 9 else "" for field in fields],
        [field[8] for field in fields],
        [kind != "-" for kind in kinds],
        times=[float(field[1]) for field in fields],
    )
    return log, kinds


def read_hdfs(events: Path, sequences: Path, folder: Path) -> Log:
    """HDFS: written out as the raw lines it was parsed from; blocks are labelled."""
    rows = parquet.read_table(events).to_pylist()
    path = folder / "hdfs.log"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            f"{r['date']} {r['time']} {r['id']} {r['level']} {r['component']} {r['m_message']}\n" for r in rows
        )
    anomalous = {row["seq_id"]: row["anomaly"] for row in parquet.read_table(sequences).to_pylist()}
    number = {block: i for i, block in enumerate(anomalous)}
    return Log(
        path,
        [row["m_message"] for row in rows],
        [row["level"] for row in rows],
        list(anomalous.values()),
        blocks=np.array([number[row["seq_id"]] for row in rows]),
    )


def rarity(templates: Sequence[int]) -> Floats:
    """Nats: how rare the template of each line has been before it."""
    counts: Counter[int] = Counter()
    scores = np.empty(len(templates))
    for n, template in enumerate(templates):
        scores[n] = np.log((n + 1) / (counts[template] + 1))
        counts[template] += 1
    return scores


def unigram(messages: Sequence[str]) -> Floats:
    """Mean nats per word, what varies masked, under counts of all words before the line, add-one."""
    counts: Counter[str] = Counter()
    total, scores = 0, np.zeros(len(messages))
    for n, message in enumerate(messages):
        words = re.findall(r"\w+", mask(message))
        if words:
            scores[n] = np.mean([np.log((total + VOCABULARY) / (counts[word] + 1)) for word in words])
        counts.update(words)
        total += len(words)
    return scores


def quality(results: Results, case: str, name: str, labels: NDArray[np.bool_], scores: Floats, **more: Any) -> None:
    """AUROC, AP and best F1 with what one must know to read them."""
    precision, recall, _ = precision_recall_curve(labels, scores)
    told = {
        "row": name,
        "n": len(labels),
        "positives": int(labels.sum()),
        "base_rate": float(labels.mean()),
        "ties": int(len(scores) - len(np.unique(scores))),
        **more,
    }
    suffix = "" if name == "memstream" else f"[{name}]"
    results.add(case, f"auroc{suffix}", float(roc_auc_score(labels, scores)), "share", **told)
    results.add(case, f"ap{suffix}", float(average_precision_score(labels, scores)), "share", **told)
    f1 = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
    results.add(case, f"best_f1{suffix}", float(f1), "share", **told)


def runs_of(labels: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last index of each run of anomalous lines."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels.astype(int), [0]])))
    return [(int(first), int(end) - 1) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def incident_recall(log: Log, scores: Floats) -> float:
    """Share of runs of anomalous lines that hold one of the 100 highest grouped alerts.

    Lines of one template are one alert until the template stays away for 1,000 lines or half an hour, as the decision
    groups them; an alert lies where its first line lies, and has the highest score of its lines.
    """
    config = ReplayConfig()
    groups: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for i, template in enumerate(log.templates):
        group = latest.get(template)
        if (
            group is None
            or i - group[-1] > config.incident_lines
            or log.times[i] - log.times[group[-1]] > config.incident_s
        ):
            group = latest[template] = []
            groups.append(group)
        group.append(i)
    ranked = sorted(groups, key=lambda group: (-max(scores[group]), group[0]))[:N_ALERTS]
    runs = runs_of(log.labels)
    return sum(any(first <= group[0] <= last for group in ranked) for first, last in runs) / len(runs)


def replayed(
    path: Path, config: ReplayConfig, *, keep: bool = True, **options: Any
) -> tuple[list[Record], Summary, dict[int, int]]:
    """Runs a replay; returns its records, if they are kept, its summary, and resident bytes after so many lines."""
    records: list[Record] = []
    resident: dict[int, int] = {}
    process = psutil.Process()

    def look(event: object) -> None:
        if isinstance(event, Record):
            if keep:
                records.append(event)
            if event.line in (2000, 222_579):
                resident[event.line] = process.memory_info().rss

    with Replay(path, config=config, sinks=[look], **options) as replay:
        *_, summary = replay
    assert isinstance(summary, Summary)
    return records, summary, resident


def scores_of(records: Sequence[Record], n: int) -> Floats:
    """The score of each line; lines that were joined to an event have the event's."""
    scores = np.zeros(n)
    for record in records:
        if record.score is not None:
            scores[record.line - 1 : record.line - 1 + max(1, record.lines)] = record.score
    return scores


def bench_quality(results: Results, case: str, log: Log, options: dict[str, Any]) -> None:
    """The table of one log: memstream with and without the stated level, and the floors."""
    by_line = log.blocks is None
    how = "line" if by_line else "log-mean-exp"
    severe = np.array([level in ("FATAL", "WARN") for level in log.levels], dtype=float)
    rare, single = rarity(log.templates), unigram(log.messages)
    quality(results, case, "severity", log.labels, log.of_blocks(severe, "max"), fields="level")
    quality(results, case, "unigram", log.labels, log.of_blocks(single, "lme"), fields="message", blocks=how)
    for kind in ("lme",) if by_line else ("max", "mean", "lme"):
        quality(results, case, f"rarity {kind}", log.labels, log.of_blocks(rare, kind), fields="message", blocks=kind)
    for name, config, fields in (
        ("memstream", ReplayConfig(), "message, level"),
        ("memstream, level hidden", ReplayConfig(ignore_level=True), "message"),
    ):
        records, summary, _ = replayed(log.path, config, **options)
        lines = scores_of(records, len(log.messages))
        quality(results, case, name, log.labels, log.of_blocks(lines, "lme"), fields=fields, blocks=how)
        suffix = "" if name == "memstream" else f"[{name}]"
        results.add(case, f"alerts{suffix}", summary.alerts, "count", threshold=config.threshold)
        if by_line:
            fatal = np.array([level == "FATAL" for level in log.levels])
            within = float(roc_auc_score(log.labels[fatal], lines[fatal]))
            results.add(case, f"auroc_within_fatal{suffix}", within, "share", n=int(fatal.sum()))
            results.add(case, f"incident_recall_{N_ALERTS}{suffix}", incident_recall(log, lines), "share")
            if name == "memstream":
                alone_each_template(results, case, log, lines)
    if by_line:
        for name, scores in (("severity", severe), ("rarity", rare), ("unigram", single)):
            results.add(case, f"incident_recall_{N_ALERTS}[{name}]", incident_recall(log, scores), "share")


def alone_each_template(results: Results, case: str, log: Log, scores: Floats) -> None:
    """AUROC with each template counted once, by its first line: what few frequent templates cannot carry."""
    first = {template: i for i, template in reversed(list(enumerate(log.templates)))}
    anomalous = {template for template, label in zip(log.templates, log.labels, strict=True) if label}
    labels = np.array([template in anomalous for template in first])
    auroc = float(roc_auc_score(labels, scores[list(first.values())]))
    results.add(case, "auroc_per_template", auroc, "share", n=len(first), positives=int(labels.sum()))


def incidents_of(kinds: Sequence[str]) -> list[tuple[int, int]]:
    """First and last index of each run of lines with the same label."""
    found: list[tuple[int, int]] = []
    for i, kind in enumerate(kinds):
        if kind == "-":
            continue
        if found and found[-1][1] == i - 1 and kinds[i - 1] == kind:
            found[-1] = found[-1][0], i
        else:
            found.append((i, i))
    return found


def bench_past(results: Results, log: Log, kinds: Sequence[str]) -> None:
    """Of incidents that have an earlier one of the same kind: how often such a one is named first."""
    past, ends = PastIncidents(), dict[str, int]()
    hits: list[bool] = []
    far: list[bool] = []
    for first, last in incidents_of(kinds):
        kind = kinds[first]
        if kind in ends:
            found = past.nearest(log.messages[first], limit=1)
            hits.append(bool(found) and kinds[found[0].incident] == kind)
            if first - ends[kind] >= 20:
                far.append(hits[-1])
        past.add(first, log.messages[first], stream="bgl", line=first + 1, time=None)
        ends[kind] = last
    results.add("ask", "past_incident_r_at_1", float(np.mean(hits)), "share", n=len(hits))
    results.add("ask", "past_incident_r_at_1_far", float(np.mean(far)), "share", n=len(far), least_lines_back=20)


def bench_speed(results: Results, case: str, log: Log, options: dict[str, Any], *, everything: bool) -> None:
    """Lines per second of the whole pipeline, loading left out, and of flat memory."""
    with tempfile.TemporaryDirectory() as folder:
        for store in (None, Path(folder) / "lines.db"):
            _, summary, resident = replayed(log.path, ReplayConfig(), keep=False, store=store, **options)
            suffix = "" if store is None else "[store]"
            results.add(
                case,
                f"lines_per_s_novel{suffix}",
                summary.lines / summary.seconds,
                "1/s",
                scored=summary.scored,
                tokens=summary.tokens,
                weights=options["weights"],
            )
            same = summary.cache_bytes_start == summary.cache_bytes_end
            results.add(case, f"cache_bytes{suffix}", summary.cache_bytes_end, "bytes", constant=same)
            if len(resident) == 2:
                growth = (resident[222_579] - resident[2000]) / 2**20
                results.add(case, f"memory_growth{suffix}", growth, "MiB", first=2000, last=222_579)
    if everything:
        _, summary, _ = replayed(log.path, replace(ReplayConfig(), score="all"), keep=False, **options)
        results.add(case, "lines_per_s_all", summary.lines / summary.seconds, "1/s", tokens=summary.tokens)
        results.add(case, "tokens_per_s_all", summary.tokens / summary.seconds, "1/s")


DRAIN = """
import json, sys, time
from drain3 import TemplateMiner
from drain3.template_miner_config import TemplateMinerConfig
config = TemplateMinerConfig(); config.profiling_enabled = False
miner = TemplateMiner(config=config)
messages = open(sys.argv[1], encoding="utf-8").read().split("\\n")
began = time.perf_counter()
for message in messages: miner.add_log_message(message)
print(json.dumps({"lines_per_s": len(messages) / (time.perf_counter() - began), "clusters": len(miner.drain.clusters)}))
"""


def bench_miner(results: Results, log: Log, drain: str | None) -> None:
    """Our miner and Drain3, masks left out there and in ours included."""
    miner = TemplateMiner(10_000)
    began = time.perf_counter()
    for message in log.messages:
        miner.add(message)
    seconds = time.perf_counter() - began
    results.add("miner", "lines_per_s", len(log.messages) / seconds, "1/s", templates=len(miner))
    if drain is None:
        say("left out: Drain3; give --drain PYTHON")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "messages"
        path.write_text("\n".join(log.messages), encoding="utf-8")
        told = subprocess.run([drain, "-c", DRAIN, str(path)], capture_output=True, text=True, check=True).stdout
    found = json.loads(told.splitlines()[-1])
    results.add("miner", "lines_per_s[drain3]", found["lines_per_s"], "1/s", templates=found["clusters"])


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with loghub/BGL_2k.log and the HDFS files.")
@click.option("--out", type=click.Path(path_type=Path), default="bench-out/replay.jsonl", show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--weights", default="auto", show_default=True, help="Form of the model's weights.")
@click.option("--drain", help="An interpreter that has drain3.")
@click.option("--skip-speed", is_flag=True, help="Quality only.")
@click.option("--skip-all", is_flag=True, help="Leave out the mode all, which takes minutes.")
@click.option("--skip-tests", is_flag=True, help="Do not run the tests of this part first.")
def main(
    data: Path | None,
    out: Path,
    model: str,
    weights: str,
    drain: str | None,
    skip_speed: bool,
    skip_all: bool,
    skip_tests: bool,
) -> None:
    """Measures log watching."""
    results = Results("replay", out, tests=TESTS, skip_tests=skip_tests)
    options: dict[str, Any] = {"model": model, "weights": weights}
    with tempfile.TemporaryDirectory() as folder:
        bgl_path = data_file(data, "loghub/BGL_2k.log")
        if bgl_path:
            bgl, kinds = read_bgl(bgl_path)
            bench_quality(results, "bgl", bgl, options)
            bench_past(results, bgl, kinds)
            if not skip_speed:
                bench_speed(results, "bgl", bgl, options, everything=not skip_all)
        events = data_file(data, "hdfs_events_2percent.parquet")
        sequences = data_file(data, "hdfs_seqs_2percent.parquet")
        if events and sequences:
            hdfs = read_hdfs(events, sequences, Path(folder))
            bench_miner(results, hdfs, drain)
            bench_quality(results, "hdfs", hdfs, options)
            if not skip_speed:
                bench_speed(results, "hdfs", hdfs, options, everything=False)
    results.close()


if __name__ == "__main__":
    sys.exit(main())
