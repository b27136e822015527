"""Takes lines to templates, gates them, and turns what the models found into records and alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from memstream.replay.alerts import Decision, Incident, Mark, Reason
from memstream.replay.config import ReplayConfig
from memstream.replay.events import Alert, IncidentCount, Record
from memstream.replay.incidents import PastIncidents
from memstream.replay.normalise import Line
from memstream.replay.rates import Rates
from memstream.replay.scores import Scores, novelty
from memstream.replay.templates import Template, TemplateMiner

if TYPE_CHECKING:
    from memstream.replay.scorer import Reading

_DICTIONARY_TEMPLATES = 20


@dataclass(slots=True)
class Pending:
    """An event that was read and not judged yet; without a template where it has no message."""

    line: Line
    template: Template | None = None
    new: bool = False
    novelty: float = 0.0
    reading: Reading | None = None
    mode: str = ""
    stored: bool = False


class Judge:
    """Everything between a line and an alert that needs no model.

    Args:
        config: the settings.
        recall: how many lines of a template were seen before this replay, by its text.
        scorer: the score that is decided on, of a line and its scores.
    """

    def __init__(
        self, config: ReplayConfig, recall: Callable[[str], int], scorer: Callable[[Line, Scores], float]
    ) -> None:
        self._config, self._scorer = config, scorer
        self._sample, self._by_surprise = config.sample, config.limit.kind == "surprise"
        self._miner = TemplateMiner(config.max_templates, recall)
        self._decision = Decision(config)
        self._rates = Rates()
        self._past = PastIncidents()
        self._n_events = 0  # taken, those without a message left out
        self._n_read = 0  # gated in, taken
        self._counts = dict.fromkeys(("scored", "counted", "joined", "empty", "truncated", "decode_errors"), 0)

    @property
    def n_lines(self) -> int:
        """Lines judged."""
        return sum(self._counts[name] for name in ("scored", "counted", "joined", "empty"))

    def counts(self) -> dict[str, int]:
        """Counts of the summary."""
        decision = self._decision
        return {
            **self._counts,
            "templates": len(self._miner),
            "alerts": decision.n_alerts,
            "held_back": decision.n_held_back,
            "limited": decision.n_limited,
            "repeats": decision.n_repeats,
        }

    def most_repeated(self) -> tuple[IncidentCount, ...]:
        """The incidents with the most repeats."""
        return tuple(
            IncidentCount(
                incident=incident.id,
                template=incident.template,
                stream=incident.stream,
                line=incident.line,
                repeats=incident.n_repeats,
            )
            for incident in self._decision.most_repeated()
        )

    def frequent_templates(self, n: int) -> list[tuple[int, str, int]]:
        """Number, text and lines of the templates with the most lines."""
        return [(template.id, template.text, template.n_lines) for template in self._miner.most_frequent(n)]

    def take(self, line: Line, mode: str) -> Pending:
        """Finds the template of a line, and whether the model has to read it."""
        if not line.message:
            return Pending(line, mode=mode)
        seen = self._miner.add(line.message)
        rare = novelty(self._n_events, seen.n_before)
        self._n_events += 1
        every = self._sample if mode != "novel" else 0
        reading = None
        if seen.new or seen.changed or (every and self._n_events % every == 0):
            reading = self._reading(line.message)
        return Pending(line, seen.template, seen.new, rare, reading, mode)

    def _reading(self, message: str) -> Reading:
        from memstream.replay.scorer import Reading

        self._n_read += 1
        if self._n_read % self._config.dictionary_lines:
            return Reading(message)
        frequent = self._miner.most_frequent(_DICTIONARY_TEMPLATES)
        return Reading(message, tuple(template.text for template in frequent))

    def not_understood(self, pending: Sequence[Pending]) -> list[tuple[Template, str]]:
        """Templates whose meaning is not known yet, with their first line."""
        found: dict[int, tuple[Template, str]] = {}
        for item in pending:
            if item.template is not None and item.template.meaning is None:
                found.setdefault(item.template.id, (item.template, item.line.message))
        return list(found.values())

    def judge(self, pending: Pending, surprise: float | None) -> tuple[Callable[[], Record], list[Alert]]:
        """Judges one line, in order. Returns what makes its record, for those who want one, and its alerts."""
        line, template = pending.line, pending.template
        self._counts["truncated"] += line.truncated
        self._counts["decode_errors"] += line.decode_errors
        if template is None:
            self._counts["empty"] += line.n_lines
            return partial(_record, pending, None, None, None, "quiet", None), []
        self._counts["scored" if pending.reading is not None else "counted"] += min(1, line.n_lines)
        self._counts["joined"] += max(0, line.n_lines - 1)
        assert template.meaning is not None
        severity = None if self._config.ignore_level else line.severity
        scores = Scores(surprise=surprise, novelty=pending.novelty, meaning=template.meaning, severity=severity)
        score = self._scorer(line, scores)
        threshold = self._decision.threshold
        mark = _mark(line, template, surprise if self._by_surprise else score, pending.new)
        verdict, incident = self._decision.judge(mark)
        alerts = []
        if verdict == "alert":
            assert incident is not None
            alerts.append(self._alert(pending, scores, incident, threshold))
        if self._config.rates:
            alerts += self._watch(pending, template)
        return partial(_record, pending, scores, score, threshold, verdict, incident), alerts

    def _watch(self, pending: Pending, template: Template) -> list[Alert]:
        """Counts the line's template; tells of those whose rate changed."""
        alerts = []
        line = pending.line
        for change in self._rates.add(template.id, template.text):
            mark = Mark(
                stream=line.stream,
                line=line.number,
                time=line.time,
                template_id=change.template_id,
                template=change.text,
                score=float(change.n_lines),
            )
            verdict, incident = self._decision.report(mark, change.kind)
            if verdict == "alert":
                assert incident is not None
                alerts.append(_change_alert(pending, incident, change.kind, change.expected))
        return alerts

    def _alert(self, pending: Pending, scores: Scores, incident: Incident, threshold: float) -> Alert:
        line = pending.line
        past = self._past.nearest(line.message)
        self._past.add(incident.id, line.message, stream=line.stream, line=line.number, time=line.time)
        return Alert(
            incident=incident.id,
            reason="score",
            stream=line.stream,
            line=line.number,
            offset=line.offset,
            time=line.time,
            level=line.level,
            severity=line.severity,
            score=round(incident.score, 4),
            threshold=threshold,
            surprise=scores.surprise,
            novelty=scores.novelty,
            meaning=scores.meaning,
            mode=pending.mode,
            template=incident.template,
            message=line.message,
            text=line.text,
            past=past,
        )

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``; nothing may be pending."""
        return {
            "miner": self._miner.state(),
            "decision": self._decision.state(),
            "rates": self._rates.state(),
            "past": self._past.state(),
            "counts": self._counts,
            "n_events": self._n_events,
            "n_read": self._n_read,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned."""
        self._miner.restore(state["miner"])
        self._decision.restore(state["decision"])
        self._rates.restore(state["rates"])
        self._past.restore(state["past"])
        self._counts, self._n_events, self._n_read = state["counts"], state["n_events"], state["n_read"]


def _change_alert(pending: Pending, incident: Incident, reason: Reason, expected: float) -> Alert:
    line = pending.line
    what = f"{int(incident.score)} lines instead of about {expected:.0f}: {incident.template}"
    return Alert(
        incident=incident.id,
        reason=reason,
        stream=line.stream,
        line=line.number,
        offset=line.offset,
        time=line.time,
        level=None,
        severity=None,
        score=incident.score,
        threshold=round(expected, 2),
        surprise=None,
        novelty=None,
        meaning=None,
        mode=pending.mode,
        template=incident.template,
        message=what,
        text=what,
        past=(),
    )


def _mark(line: Line, template: Template, score: float | None, new: bool) -> Mark:
    return Mark(
        stream=line.stream,
        line=line.number,
        time=line.time,
        template_id=template.id,
        template=template.text,
        score=score,
        new=new,
    )


def _record(
    pending: Pending,
    scores: Scores | None,
    score: float | None,
    threshold: float | None,
    verdict: str,
    incident: Incident | None,
) -> Record:
    line, template = pending.line, pending.template
    return Record(
        stream=line.stream,
        line=line.number,
        lines=line.n_lines,
        offset=line.offset,
        time=line.time,
        severity=line.severity,
        template=None if template is None else template.id,
        surprise=scores.surprise if scores else None,
        novelty=scores.novelty if scores else None,
        meaning=scores.meaning if scores else None,
        score=score,
        threshold=threshold,
        verdict=verdict,
        incident=incident.id if incident else None,
        mode=pending.mode,
        truncated=line.truncated,
        length=line.length,
        digest=line.digest,
        partial=line.partial,
    )
