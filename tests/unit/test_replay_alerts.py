"""The running quantile, the rising edge, and incidents."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.errors import ConfigError
from memstream.replay.alerts import Decision, Mark, RunningQuantile
from memstream.replay.config import ReplayConfig

STEP = 1 / 64
START = datetime(2026, 1, 1, tzinfo=UTC)


@given(st.lists(st.floats(0, 30), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 0.999]))
def test_the_quantile_is_numpys_to_one_step(values: list[float], share: float) -> None:
    quantile = RunningQuantile(share)
    for n, value in enumerate(values, 1):
        quantile.add(value)
        exact = float(np.quantile(values[:n], share, method="inverted_cdf"))
        assert exact < quantile.value <= exact + STEP + 1e-12


def test_the_quantile_falls_again() -> None:
    quantile = RunningQuantile(0.5)
    for value in [9.0] * 10 + [1.0] * 11:
        quantile.add(value)
    assert quantile.value == 1.0 + STEP


def test_a_huge_value_is_counted_at_the_top() -> None:
    quantile = RunningQuantile(0.5)
    quantile.add(1e9)
    assert quantile.value == 48.0


class Stream:
    """Feeds a decision; each template is made once."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {"threshold": "q0.9", "burn_in_lines": 20, "incident_lines": 50, **settings}
        self.decision = Decision(ReplayConfig(**values))
        self.templates: dict[str, int] = {}
        self.n = 0

    def mark(self, name: str, score: float | None, time_s: float | None = None) -> Mark:
        self.n += 1
        new = name not in self.templates
        template_id = self.templates.setdefault(name, len(self.templates) + 1)
        time = None if time_s is None else START + timedelta(seconds=time_s)
        return Mark(stream="x", line=self.n, time=time, template_id=template_id, template=name, score=score, new=new)

    def feed(self, name: str, score: float | None, time_s: float | None = None) -> str:
        return self.decision.judge(self.mark(name, score, time_s))[0]

    def burn_in(self) -> None:
        for _ in range(20):
            self.feed("usual", 1.0)


def test_nothing_alerts_during_the_burn_in() -> None:
    stream = Stream()
    assert {stream.feed(f"t{i}", 9.0) for i in range(20)} == {"quiet"}
    assert stream.feed("late", 9.0) == "alert"


def test_first_lines_of_the_burn_in_do_not_raise_the_threshold() -> None:
    stream = Stream(threshold="q0.5")
    for i in range(15):
        stream.feed(f"t{i}", 20.0)
    for _ in range(5):
        stream.feed("t0", 1.0)
    assert stream.decision._threshold.value == 1.0 + STEP
    assert stream.decision.threshold == 3.0  # one line in twenty is not rare


def test_each_template_alerts_once() -> None:
    stream = Stream(threshold="q0.5")
    stream.burn_in()
    assert [stream.feed(name, score) for name, score in [("a", 5.0), ("b", 5.0), ("usual", 1.0), ("a", 5.0)]] == [
        "alert",
        "alert",
        "quiet",
        "held_back",
    ]
    assert (stream.decision.n_alerts, stream.decision.n_held_back) == (2, 1)


def test_a_burst_hides_nothing_less_severe() -> None:
    """Sixty lines of 12 would be the top 2 % of the next 3,000 lines; a line of 6 is above all but them."""
    stream = Stream(threshold="q0.98")
    stream.burn_in()
    assert stream.feed("burst", 12.0) == "alert"
    for _ in range(59):
        assert stream.feed("burst", 12.0) == "held_back"
    assert stream.feed("less", 6.0) == "alert"


def test_an_incident_ends_after_its_time_in_the_log() -> None:
    stream = Stream(threshold="q0.5", incident_s=60)
    stream.burn_in()
    assert [stream.feed("a", 5.0, time_s) for time_s in (0, 60, 119, 180)] == [
        "alert",
        "held_back",
        "held_back",
        "alert",
    ]


def test_an_hour_has_so_many_alerts_at_most() -> None:
    stream = Stream(threshold="q0.5", max_alerts_per_hour=2)
    stream.burn_in()
    verdicts = [stream.feed(f"t{i}", 5.0, time_s) for i, time_s in enumerate((0, 10, 20, 3599, 3601, 3602))]
    assert verdicts == ["alert", "alert", "held_back", "held_back", "alert", "held_back"]
    assert (stream.decision.n_limited, stream.decision.n_alerts) == (3, 3)


def test_deviations() -> None:
    stream = Stream(threshold="z2", burn_in_lines=4)
    for score in (1.0, 9.0, 1.0, 9.0):  # the first line of a template is left out
        stream.feed("usual", score)
    values = [9.0, 1.0, 9.0]
    assert stream.decision.threshold == pytest.approx(np.mean(values) + 2 * np.std(values))


def test_a_fixed_surprise() -> None:
    stream = Stream(threshold="nll6")
    stream.burn_in()
    assert [stream.feed(f"t{score}", score) for score in (6.0, 6.1, None)] == ["quiet", "alert", "quiet"]


def test_reasons_are_incidents_apart() -> None:
    stream = Stream(threshold="q0.5")
    stream.burn_in()
    assert stream.feed("a", 5.0) == "alert"
    assert stream.decision.report(stream.mark("a", 90.0), "rate")[0] == "alert"
    assert stream.decision.report(stream.mark("a", 95.0), "rate")[0] == "held_back"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-2, 14), st.integers(0, 3000)), max_size=80), st.data())
def test_a_restored_decision_goes_on_as_if_nothing_had_happened(
    lines: list[tuple[str, float, int]], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["q0.8", "z1", "nll4"]))
    settings: dict[str, Any] = {"threshold": kind, "burn_in_lines": 5, "incident_lines": 6, "incident_s": 1000}
    settings["max_alerts_per_hour"] = 3
    at = data.draw(st.integers(0, len(lines)))
    whole, parts = Stream(**settings), Stream(**settings)
    expected = [whole.feed(*line) for line in lines]
    found = [parts.feed(*line) for line in lines[:at]]
    state = json.loads(json.dumps(parts.decision.state()))
    parts.decision = Decision(ReplayConfig(**settings))
    parts.decision.restore(state)
    found += [parts.feed(*line) for line in lines[at:]]
    assert found == expected
    assert parts.decision.state() == whole.decision.state()


def test_repeats_are_counted_into_the_incident() -> None:
    stream = Stream(threshold="q0.5")
    stream.burn_in()
    assert stream.feed("a", 5.0) == "alert"
    for score, verdict in ((None, "quiet"), (1.0, "quiet"), (5.0, "held_back")):
        assert stream.feed("a", score) == verdict
    (incident,) = stream.decision.most_repeated()
    assert (incident.line, incident.n_repeats, stream.decision.n_repeats) == (21, 3, 3)


def test_an_incident_ends_when_its_template_stays_away() -> None:
    stream = Stream(threshold="q0.5", incident_lines=50)
    stream.burn_in()
    assert stream.feed("a", 5.0) == "alert"
    for _ in range(49):
        stream.feed("usual", 1.0)
    assert stream.feed("a", 5.0) == "held_back"  # the 50th line after it
    for _ in range(50):
        stream.feed("usual", 1.0)
    assert stream.feed("a", 5.0) == "alert"  # the 51st
    assert [(i.id, i.n_repeats) for i in stream.decision.most_repeated()] == [(1, 1), (2, 0)]


def test_only_the_ten_most_repeated_incidents_are_kept() -> None:
    stream = Stream(threshold="q0.5", incident_lines=1)
    stream.burn_in()
    for i in range(30):
        assert stream.feed(f"a{i}", 5.0) == "alert"
        for _ in range(i):
            stream.feed(f"a{i}", None)
        stream.feed("usual", None)
        stream.feed("usual", None)
    assert [i.n_repeats for i in stream.decision.most_repeated()] == list(range(29, 19, -1))


@pytest.mark.parametrize("threshold", ["q1", "q0", "0.99", "q", "qx", "qnan", "q-0.5", "", 0.99, "z0", "nllinf", "nll"])
def test_a_threshold_that_is_none(threshold: Any) -> None:
    with pytest.raises(ConfigError, match=r"ReplayConfig\.threshold"):
        ReplayConfig(threshold=threshold)


def test_a_threshold() -> None:
    assert ReplayConfig(threshold="q0.995").limit == ("quantile", 0.995)
    assert ReplayConfig(threshold="z4").limit == ("deviations", 4.0)
    assert ReplayConfig(threshold="nll6").limit == ("surprise", 6.0)


@pytest.mark.parametrize(("score", "every"), [("novel", 0), ("all", 1), ("sample:7", 7)])
def test_a_gate(score: str, every: int) -> None:
    assert ReplayConfig(score=score).sample == every


@pytest.mark.parametrize("score", ["", "none", "sample", "sample:0", "sample:x", "sample:-1"])
def test_a_gate_that_is_none(score: str) -> None:
    with pytest.raises(ConfigError, match=r"ReplayConfig\.score"):
        ReplayConfig(score=score)
