"""What the page shows, as data: the bar, the curves, the lines of a talk, words."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream import CacheConfig
from memstream.memory import Scope, Turn
from memstream.report import Evicted, Held, Occupancy, Recalled, Reply, Timings, Usage, Why
from memstream.serving.page import cache, curves, words
from memstream.serving.page.chat import lines
from memstream.serving.page.rooms import Room, Talk, settled

NOON = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


def turn(id: int, role: str, text: str = "x", state: Any = "complete") -> Turn:
    return Turn(id, id, role, text, 1, NOON, state, 1)


def talk(text: str = "x", *, reply: str = "", error: str | None = None, waits: bool = False) -> Talk:
    turn: Any = SimpleNamespace(waits=waits)
    return Talk(text, turn, reply=reply, error=error, number=7)


# The bar


def test_the_bar_is_to_scale() -> None:
    held = Occupancy(
        sink_tokens=10,
        memory_tokens=20,
        memory_room=40,
        window_tokens=100,
        window_room=150,
        exchanges=(Held(turns=("turn:1",), n_tokens=30, text="a"), Held(turns=("turn:3",), n_tokens=50, text="b")),
    )
    drawn = cache.drawing(held)
    assert (drawn.sink, drawn.memory, drawn.memory_room, drawn.other, drawn.free) == (5.0, 10.0, 20.0, 10.0, 25.0)
    assert [(block.key, block.share) for block in drawn.blocks] == [("turn:1", 15.0), ("turn:3", 25.0)]


@given(
    sink=st.integers(0, 500),
    memory=st.integers(0, 500),
    exchanges=st.lists(st.integers(1, 200), max_size=12),
    other=st.integers(0, 100),
    spare=st.integers(0, 500),
)
def test_the_whole_bar_is_the_whole_cache(sink: int, memory: int, exchanges: list[int], other: int, spare: int) -> None:
    window = sum(exchanges) + other
    held = Occupancy(
        sink_tokens=sink,
        memory_tokens=memory // 2,
        memory_room=memory,
        window_tokens=window,
        window_room=window + spare,
        exchanges=tuple(Held(turns=(f"turn:{i}",), n_tokens=n, text="") for i, n in enumerate(exchanges)),
    )
    drawn = cache.drawing(held)
    parts = [drawn.sink, drawn.memory_room, drawn.other, drawn.free, *(block.share for block in drawn.blocks)]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(100.0 if sink + memory + window + spare else 0.0)


def test_an_empty_cache_has_its_rooms() -> None:
    drawn = cache.drawing(cache.empty(CacheConfig(cache_tokens=1000, sink_tokens=50, memory_tokens=200)))
    assert (drawn.sink, drawn.memory, drawn.memory_room, drawn.free) == pytest.approx((5.0, 0.0, 20.0, 75.0))


# The curves


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=curves.N_SAMPLES), st.floats(0, 1e9))
def test_a_curve_stays_in_its_frame_and_ends_at_its_edge(values: list[float], top: float) -> None:
    line = re.findall(r'<polyline points="([^"]*)"', curves.drawn(values, top))[0]
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == len(values)
    assert points[-1][0] == curves.WIDTH
    assert all(0 <= x <= curves.WIDTH and 0 <= y <= curves.HEIGHT for x, y in points)


def test_higher_is_higher_and_equal_is_flat() -> None:
    line = re.findall(r'<polyline points="([^"]*)"', curves.drawn([0, 5, 10, 10], 10))[0]
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights[0] > heights[1] > heights[2] == heights[3]


def test_samples_are_differences_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tokens = 10.0, 100
    agent: Any = SimpleNamespace(state=lambda: SimpleNamespace(tokens=tokens, cache_bytes=4096))
    monkeypatch.setattr(curves.time, "monotonic", lambda: now)
    taken = curves.Curves(agent)
    now, tokens = 12.0, 150
    taken.take()
    assert (taken.samples[-1].tokens_per_s, taken.samples[-1].cache_bytes) == (25.0, 4096)
    assert 0.0 <= taken.samples[-1].processor <= 100.0
    for _ in range(curves.N_SAMPLES + 5):
        now += 1
        taken.take()
    assert len(taken.samples) == curves.N_SAMPLES
    assert taken.samples[0].tokens_per_s == 0.0


# The lines of a talk


def test_what_runs_is_shown_once() -> None:
    said = [turn(1, "user"), turn(2, "assistant"), turn(3, "user"), turn(4, "assistant", "", "open")]
    assert settled(said, []) == tuple(said)
    assert settled(said, [talk()]) == tuple(said[:2])
    assert settled(said[:3], [talk()]) == tuple(said[:2])
    assert settled(said[:2], [talk()]) == tuple(said[:2])
    assert settled(said, [talk(error="no")]) == tuple(said)
    calling = [*said[:3], turn(4, "call"), turn(5, "tool"), turn(6, "assistant", "", "open")]
    assert settled(calling, [talk()]) == tuple(said[:2])
    assert settled(calling, []) == tuple(calling)


def test_what_passes_between_model_and_tools_is_told_apart() -> None:
    said = (turn(1, "user"), turn(2, "call", "f()"), turn(3, "tool", "7"), turn(4, "assistant", "seven"))
    shown = [(line.role, line.text, line.note) for line in lines(Room(Scope("n", "u", "c"), said=said))]
    assert shown == [
        ("user", "x", ""),
        ("tool", "f()", "calls a tool"),
        ("tool", "7", "what the tool answered"),
        ("assistant", "seven", ""),
    ]


def test_a_talk_follows_what_was_said() -> None:
    room = Room(Scope("n", "u", "c"), said=(turn(1, "user", "a"), turn(2, "assistant", "b")))
    assert [(line.role, line.text, line.pending) for line in lines(room)] == [
        ("user", "a", False),
        ("assistant", "b", False),
    ]
    room.talks = [talk("c", reply="d")]
    assert [(line.role, line.text, line.pending) for line in lines(room)][2:] == [
        ("user", "c", False),
        ("assistant", "d", True),
    ]
    room.talks = [talk("c", waits=True)]
    assert lines(room)[-1].note == "waiting for a free place"


def test_a_failure_is_shown_below_what_was_asked_and_that_only_once() -> None:
    room = Room(Scope("n", "u", "c"), said=(turn(1, "user", "a"), turn(2, "assistant", "b")))
    room.talks = [talk("c", error="no room")]
    assert [(line.role, line.text) for line in lines(room)][2:] == [("user", "c"), ("error", "no room")]
    room.said = (*room.said, turn(3, "user", "c"))
    assert [(line.role, line.text) for line in lines(room)][2:] == [("user", "c"), ("error", "no room")]
    room.talks, room.trouble = [], "the store is gone"
    assert lines(room)[-1].text == "the store is gone"


def test_a_cut_reply_says_so_and_the_last_one_tells_its_account() -> None:
    room = Room(Scope("n", "u", "c"), said=(turn(1, "user"), turn(2, "assistant", "b", "cut")))
    assert lines(room)[-1].note == "stopped here"
    room.report = Reply(text="b", finish_reason="cancelled")
    assert lines(room)[-1].note == "stopped here · nothing recalled"


# Words


def test_html_in_a_reply_is_text_and_nothing_is_loaded_for_it() -> None:
    html = words.as_html('<script>x</script> <img src=x onerror="y"> ![pixel](http://evil.example/x.png) **b**')
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html
    assert "<strong>b</strong>" in html


@pytest.mark.parametrize("target", ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "vbscript:x", "data:text/html,x"])
def test_a_link_that_would_run_is_no_link(target: str) -> None:
    assert "<a" not in words.as_html(f"[click]({target})")
    assert "<a" not in words.as_html(f"<{target}>")


@given(st.text(max_size=200))
def test_no_text_becomes_a_tag_that_was_not_markdown(text: str) -> None:
    allowed = "p|br|em|strong|s|code|pre|ul|ol|li|blockquote|h[1-6]|hr|a|table|thead|tbody|tr|th|td"
    for tag in re.findall(r"<\s*/?\s*([^\s>/]*)", words.as_html(text)):
        assert re.fullmatch(allowed, tag)


def test_sizes() -> None:
    assert [words.size(n) for n in (0, 999, 1000, 94_371_840, 3e9)] == [
        "0 bytes",
        "999 bytes",
        "1.0 KB",
        "94.4 MB",
        "3.0 GB",
    ]


def test_reasons_name_words_meaning_and_what_spoke_for_it() -> None:
    why = Why(
        score=1.5, dense=0.618, lexical=2.0, dense_rank=2, lexical_rank=1, terms=("cat", "name"), boosts=("date",)
    )
    assert words.reasons(why) == ["words: cat, name (no. 1)", "meaning 0.62 (no. 2)", "the day asked for"]
    assert words.reasons(Why(score=1.0, pinned=True)) == ["pinned"]
    assert words.reasons(Why(score=1.0, dense=0.5, rerank=0.25)) == ["meaning 0.50", "reranker 0.25"]


def test_a_source_names_another_conversation_only() -> None:
    memory = Recalled(id="turn:1", role="user", text="x", time=NOON, conversation="monday", why=Why(score=1.0))
    assert words.source(memory, "monday") == f"You said · {words.when(NOON)}"
    assert words.source(memory, "friday") == f"You said · {words.when(NOON)} · in monday"


def test_an_account_of_a_turn() -> None:
    memory = Recalled(id="turn:1", role="user", text="x", time=NOON, conversation=None, why=Why(score=1.0))
    reply = Reply(
        text="b",
        finish_reason="stop",
        recalled=(memory, memory),
        evicted=(Evicted(turns=("turn:1",), n_tokens=5, text="x"),),
        usage=Usage(reply_tokens=30),
        timings=Timings(decode_ms=1500.0),
    )
    assert words.account(reply) == "2 recalled · 1 exchange left the window · 30 tokens, 20 a second"
