"""Tools that whoever asks runs: calls are handed over, results come with the next turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memstream import Agent, ToolCall
from memstream.errors import InputError
from memstream.tools import render_calls, schemas
from tests.integration import tiny
from tests.integration.scripted import CALL, RESULT, failed, order_status, says_call, seen

Make = Callable[..., tuple[Agent, tiny.Script]]


def test_calls_of_schemas_are_handed_over_and_their_results_come_next(scripted: Make, tmp_path: Path) -> None:
    agent, script = scripted(f"One moment. {CALL}\n{says_call(number='1')}", tools=())
    with agent.session(user="a", tools=schemas([order_status])) as chat:
        pieces = list(chat.stream("Where are they?"))
        asked = chat.last
        assert asked is not None
        assert "".join(pieces) == asked.text == "One moment. "
        assert asked.finish_reason == "tool_calls"
        assert asked.tool_calls == (
            ToolCall(name="order_status", arguments={"number": "48213"}),
            ToolCall(name="order_status", arguments={"number": "1"}),
        )
        results = [
            ToolCall(name="order_status", arguments={}, result='{"status": "shipped on Monday"}'),
            ToolCall(name="order_status", arguments={}, error="no order 1"),
        ]
        script.say("One was shipped.")
        reply = chat.chat(results)
        assert (reply.text, reply.finish_reason, reply.tool_calls) == ("One was shipped.", "stop", ())
        lived = list(chat._conversation.resident.window_ids)
        chat._conversation.drop()
        script.say("Bye.")
        chat.chat("Bye")
        assert list(chat._conversation.resident.window_ids)[: len(lived)] == lived
    stored = tiny.stored(tmp_path / "store.db")
    assert [row[0] for row in stored] == ["user", "call", "tool", "assistant", "user", "assistant"]
    assert stored[2][1] == f"{RESULT}\n{failed('no order 1')}"


def test_results_nobody_waits_for_are_refused(scripted: Make, tmp_path: Path) -> None:
    result = ToolCall(name="order_status", arguments={}, result="shipped")
    agent, script = scripted("Hello.", tools=schemas([order_status]))
    with agent.session() as chat:
        for wrong in ([result], [], ["shipped"], (result, 7), 7):
            with pytest.raises(InputError):
                chat.chat(wrong)  # type: ignore[arg-type]
        assert tiny.stored(tmp_path / "store.db") == []
        chat.chat("hello")
        with pytest.raises(InputError, match="no call waits"):
            chat.chat([result])
        script.say(CALL, "Never mind.")
        assert chat.chat("Where is 48213?").finish_reason == "tool_calls"
        assert chat.chat("Forget it").text == "Never mind.", "the results may also never come"
        with pytest.raises(InputError, match="no call waits"):
            chat.chat([result])


def test_a_damaged_call_of_a_schema_is_shown_to_the_model(scripted: Make) -> None:
    agent, _ = scripted("<tool_call>{oops", CALL, tools=schemas([order_status]))
    reply = agent.chat("Where is 48213?")
    assert reply.finish_reason == "tool_calls"
    assert [(call.name, call.error is None) for call in reply.tool_calls] == [("", False), ("order_status", True)]


def test_tools_may_change_between_turns(scripted: Make) -> None:
    agent, script = scripted(CALL, "It was shipped.")
    with agent.session(user="a") as chat:
        chat.chat("Where is 48213?")
    with agent.session(user="a", tools=()) as chat:
        script.say("You are welcome.")
        chat.chat("Thank you")
        assert "You can call functions" not in seen(chat)
        assert f"{RESULT}<|im_end|>" in seen(chat)
    with agent.session(user="a") as chat:
        script.say(CALL, "Still shipped.")
        assert chat.chat("And now?").text == "Still shipped."
        assert seen(chat).count("You can call functions") == 1


def test_exchanges_with_tools_from_elsewhere_are_taken_in(scripted: Make, tmp_path: Path) -> None:
    agent, script = scripted(tools=schemas([order_status]))
    with agent.session(user="a") as chat:
        chat.add("Where is 48213?", render_calls([ToolCall(name="order_status", arguments={"number": "48213"})]))
        chat.add(
            [ToolCall(name="order_status", arguments={}, result='{"status": "shipped on Monday"}')], "It was shipped."
        )
        with pytest.raises(InputError, match="no call waits"):
            chat.add([ToolCall(name="order_status", arguments={}, result="x")], "y")
        script.say("You are welcome.")
        chat.chat("Thank you")
    assert [row[:2] for row in tiny.stored(tmp_path / "store.db")][:4] == [
        ("user", "Where is 48213?"),
        ("call", CALL),
        ("tool", RESULT),
        ("assistant", "It was shipped."),
    ]
