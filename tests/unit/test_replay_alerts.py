"""The running quantile, the rising edge, and incidents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.config import ReplayConfig
from memstream.errors import ConfigError
from memstream.replay.alerts import Decision, RunningQuantile
from memstream.replay.normalise import Line
from memstream.replay.templates import Template

STEP = 1 / 64


@given(st.lists(st.floats(0, 30), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 0.999]))
def test_the_quantile_is_numpys_to_one_step(values: list[float], share: float) -> None:
    quantile = RunningQuantile(share)
    for n, value in enumerate(values, 1):
        quantile.add(value)
        exact = float(np.quantile(values[:n], share, method="inverted_cdf"))
        assert exact < quantile.value <= exact + STEP


def test_the_quantile_falls_again() -> None:
    quantile = RunningQuantile(0.5)
    for value in [9.0] * 10 + [1.0] * 11:
        quantile.add(value)
    assert quantile.value == 1.0 + STEP


def test_a_huge_value_is_counted_at_the_top() -> None:
    quantile = RunningQuantile(0.5)
    quantile.add(1e9)
    assert quantile.value == 32.0


class Stream:
    """Feeds a decision; each template is made once."""

    def __init__(self, **settings: float) -> None:
        values = {"share": 0.9, "burn_in_lines": 20, "incident_lines": 50, **settings}
        self.decision = Decision(**values)  # type: ignore[arg-type]
        self.templates: dict[str, Template] = {}
        self.n = 0

    def feed(self, name: str, score: float | None) -> str:
        self.n += 1
        new = name not in self.templates
        template = self.templates.setdefault(name, Template(len(self.templates) + 1, [name], ()))
        line = Line(stream="x", number=self.n, text=name, message=name)
        return self.decision.judge(line, template, score, new=new)[0]

    def burn_in(self) -> None:
        for _ in range(20):
            self.feed("usual", 1.0)


def test_nothing_alerts_during_the_burn_in() -> None:
    stream = Stream()
    assert {stream.feed(f"t{i}", 9.0) for i in range(20)} == {"quiet"}
    assert stream.feed("late", 9.0) == "alert"


def test_first_lines_of_the_burn_in_do_not_raise_the_threshold() -> None:
    stream = Stream(share=0.5)
    for i in range(15):
        stream.feed(f"t{i}", 20.0)
    for _ in range(5):
        stream.feed("t0", 1.0)
    assert stream.decision.threshold == 1.0 + STEP


def test_a_rise_alerts_once() -> None:
    stream = Stream(share=0.5)
    stream.burn_in()
    assert [stream.feed(name, score) for name, score in [("a", 5.0), ("b", 5.0), ("usual", 1.0), ("c", 5.0)]] == [
        "alert",
        "held_back",
        "quiet",
        "alert",
    ]
    assert (stream.decision.n_alerts, stream.decision.n_held_back) == (2, 1)


def test_repeats_are_counted_into_the_incident() -> None:
    stream = Stream(share=0.5)
    stream.burn_in()
    assert stream.feed("a", 5.0) == "alert"
    for score, verdict in ((None, "quiet"), (1.0, "quiet"), (5.0, "held_back")):
        assert stream.feed("a", score) == verdict
    (incident,) = stream.decision.most_repeated()
    assert (incident.line.number, incident.n_repeats, stream.decision.n_repeats) == (21, 3, 3)


def test_an_incident_ends_when_its_template_stays_away() -> None:
    stream = Stream(share=0.5, incident_lines=50)
    stream.burn_in()
    assert stream.feed("a", 5.0) == "alert"
    for _ in range(49):
        stream.feed("usual", 1.0)
    assert stream.feed("a", 5.0) == "held_back"  # the 50th line after it
    for _ in range(50):
        stream.feed("usual", 1.0)
    assert stream.feed("a", 5.0) == "alert"  # the 51st
    assert [(i.id, i.n_repeats) for i in stream.decision.most_repeated()] == [(1, 1), (2, 0)]


def test_lines_that_are_not_scored_count_as_nothing_new() -> None:
    stream = Stream(share=0.9)
    for _ in range(100):
        stream.feed("usual", None)
    assert stream.decision.threshold == STEP
    assert stream.feed("new", 0.5) == "alert"


def test_only_the_ten_most_repeated_incidents_are_kept() -> None:
    stream = Stream(share=0.5, incident_lines=1)
    stream.burn_in()
    for i in range(30):
        assert stream.feed(f"a{i}", 5.0) == "alert"
        for _ in range(i):
            stream.feed(f"a{i}", None)
        stream.feed("usual", None)
        stream.feed("usual", None)
    assert [i.n_repeats for i in stream.decision.most_repeated()] == list(range(29, 19, -1))


@pytest.mark.parametrize("threshold", ["q1", "q0", "0.99", "q", "qx", "qnan", "q-0.5", "", 0.99])
def test_a_threshold_that_is_none(threshold: str) -> None:
    with pytest.raises(ConfigError, match=r"ReplayConfig\.threshold"):
        ReplayConfig(threshold=threshold)


def test_a_threshold() -> None:
    assert ReplayConfig(threshold="q0.995").quantile == 0.995
