"""Tools over OpenAI's API: the client's own, which it runs itself, and the server's, which it never sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from memstream import RecallConfig
from tests.integration import tiny
from tests.integration.scripted import CALL, RESULT, WIDE, says_call
from tests.integration.serving import MODEL, served

OFF = RecallConfig(enabled=False)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "order_status",
        "description": "Tells where an order is.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}
QUESTION: Any = {"role": "user", "content": "Where is 48213?"}
ANSWER = "It was shipped on Monday."
STATUS = '{"status": "shipped on Monday"}'


def ask(client: openai.OpenAI, messages: Any, conversation: str | None = "c", **asked: Any) -> Any:
    headers = {} if conversation is None else {"X-Conversation-Id": conversation}
    asked = {"tools": [TOOL], **asked}
    return client.chat.completions.create(model=MODEL, messages=messages, extra_headers=headers, **asked)


def resent(message: Any) -> Any:
    """A reply as a client sends it again."""
    return message.model_dump(exclude_none=True)


@pytest.mark.parametrize("conversation", ["c", None])
def test_the_client_runs_its_own_tool(scripted: Any, tmp_path: Path, conversation: str | None) -> None:
    agent, _ = scripted(CALL, ANSWER, "You are welcome.", tools=[])
    with served(agent) as server:
        client = server.client()
        first = ask(client, [QUESTION], conversation).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        (call,) = first.message.tool_calls
        assert (call.type, call.function.name) == ("function", "order_status")
        assert json.loads(call.function.arguments) == {"number": "48213"}
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": STATUS}
        messages = [QUESTION, resent(first.message), result]
        second = ask(client, messages, conversation).choices[0]
        assert (second.message.content, second.finish_reason) == (ANSWER, "stop")
        messages += [resent(second.message), {"role": "user", "content": "Thanks"}]
        third = ask(client, messages, conversation).choices[0]
        assert third.message.content == "You are welcome."
    stored = (
        []
        if conversation is None
        else [
            ("user", "Where is 48213?", "complete"),
            ("call", CALL, "complete"),
            ("tool", RESULT, "complete"),
            ("assistant", ANSWER, "complete"),
            ("user", "Thanks", "complete"),
            ("assistant", "You are welcome.", "complete"),
        ]
    )
    assert tiny.stored(tmp_path / "store.db") == stored


def test_calls_are_streamed(scripted: Any) -> None:
    two = says_call(number="1") + "\n" + says_call(number="2")
    agent, _ = scripted("Let me look. " + two, tools=[])
    with served(agent) as server:
        chunks = list(ask(server.client(), [QUESTION], stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert said.strip() == "Let me look."
        assert [(call.index, json.loads(call.function.arguments)["number"]) for call in calls] == [(0, "1"), (1, "2")]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_servers_tools_are_run_by_it(scripted: Any) -> None:
    agent, _ = scripted(CALL, ANSWER)
    with served(agent) as server:
        answer = ask(server.client(), [QUESTION], tools=openai.NOT_GIVEN)
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].message.tool_calls is None
        (made,) = answer.memstream["tool_calls"]
        assert (made["name"], made["arguments"], made["result"]) == ("order_status", {"number": "48213"}, STATUS)


def test_none_are_told_where_none_may_be_called(scripted: Any) -> None:
    agent, _ = scripted(CALL, tools=[])
    with served(agent) as server:
        answer = ask(server.client(), [QUESTION], tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a result of no call": (
        {"messages": [QUESTION, {"role": "tool", "tool_call_id": "x", "content": "1"}]},
        "must answer",
    ),
    "arguments that are no JSON": (
        {
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                },
                {"role": "tool", "tool_call_id": "x", "content": "1"},
            ]
        },
        "no JSON object",
    ),
    "a choice that cannot be forced": ({"tool_choice": "required"}, "tool_choice"),
    "a tool of another kind": ({"tools": [{"type": "web_search"}]}, "tools"),
    "the same name twice": ({"tools": [TOOL, {**TOOL, "function": {**TOOL["function"]}}]}, "two tools"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_tools_is_told(make: Any, name: str) -> None:
    asked, message = WRONG[name]
    with served(make(recall=OFF, cache=WIDE)) as server, pytest.raises(openai.BadRequestError, match=message):
        ask(server.client(), **{"messages": [QUESTION], **asked})
