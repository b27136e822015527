"""The shapes of OpenAI's chat completions: what is asked, what is answered."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memstream.config import GenerationConfig
from memstream.errors import InputError
from memstream.report import FinishReason, Reply, ToolCall, as_json
from memstream.serving.history import Said
from memstream.tools import render_calls, render_results

MOST_STOPS = 16
# What would change a reply and is not supported: allowed are the values that change nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_FINISHED: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "timeout": "length",
    "cancelled": "length",
    "tool_calls": "tool_calls",
}

Text = Annotated[str, Field(max_length=4_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=255)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(BaseModel):
    """One part of a message's content; only text is read."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """Name and arguments (JSON as text) of a call."""

    model_config = ConfigDict(strict=True, extra="ignore")
    name: Annotated[str, Field(max_length=64)]
    arguments: Text


class Called(BaseModel):
    """A call that the model made before."""

    model_config = ConfigDict(strict=True, extra="ignore")
    id: Annotated[str, Field(min_length=1, max_length=255)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def made(self, result: str | None = None) -> ToolCall:
        """As the agent has it.

        Raises:
            InputError: its arguments are no JSON object.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InputError(f"messages: the arguments of tool call {self.id!r} are no JSON object")
        return ToolCall(name=self.function.name, arguments=arguments, result=result)


class Message(BaseModel):
    """One message; what OpenAI's clients add to resent replies (``refusal``, ``annotations``) is not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    tool_calls: Annotated[list[Called], Field(min_length=1, max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=255)] | None = None

    @property
    def text(self) -> str:
        """All its text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class ToolFunction(_Strict):
    """What a model is told of a function."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=100_000)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # its schema is told to the model; nothing holds it to it


class ToolParam(_Strict):
    """A function that the client runs."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(_Strict):
    """How a stream is sent."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Strict):
    """``POST /v1/chat/completions``."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=1000)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=MOST_STOPS)
        ]
        | None
    ) = None
    tools: Annotated[list[ToolParam], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    user: Name | None = None
    metadata: dict[str, str] | None = None
    # Without effect on the reply.
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    # Understood, and refused where they would have one.
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        for name, allowed in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value is not None and not any(
                (value == one and type(value) is not bool) or value is one for one in allowed
            ):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return self

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The client's tools; None where it brings none, or wants none called."""
        if not self.tools or self.tool_choice == "none":
            return None
        told = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in self.tools]
        return [{"type": "function", "function": function} for function in told]

    @property
    def session_id(self) -> str | None:
        """The conversation named in the metadata."""
        return (self.metadata or {}).get("session_id")

    def generation(self, default: GenerationConfig, most: int) -> GenerationConfig:
        """How the reply is decoded; what is not asked for is as the server has it, at most ``most`` tokens."""
        asked: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, 1e-6),
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
        }
        n = self.max_completion_tokens or self.max_tokens or default.max_new_tokens
        given = {name: value for name, value in asked.items() if value is not None}
        return dataclasses.replace(default, max_new_tokens=min(n, most), **given)


class Asked:
    """A request's messages, sorted: the system text that leads them, and the turns.

    Raises:
        InputError: they are in an order that no conversation has, or one of them is empty.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        leading = 0
        while leading < len(messages) and messages[leading].role in ("system", "developer"):
            leading += 1
        self.system = "\n\n".join(message.text for message in messages[:leading]) or None
        self.turns: list[Said] = []
        self._calls: dict[str, Called] = {}  # of the reply before
        for message in messages[leading:]:
            self.turns.append(self._read(message))
        if not self.turns or self.turns[0].role != "user" or self.turns[-1].role != "user":
            raise InputError(
                "messages: after the system message, the first and the last must be from the user or a tool"
            )

    def _read(self, message: Message) -> Said:
        before = self.turns[-1] if self.turns else None
        if message.role == "tool":
            called = self._calls.pop(message.tool_call_id or "", None)
            if called is None:
                raise InputError("messages: a tool message must answer one of the tool_calls of the reply before it")
            results = (called.made(message.text),)
            if before is not None and before.results:
                results = (*self.turns.pop().results, *results)
            return Said("user", render_results(results), results=results)
        if message.role == "assistant":
            self._calls = {call.id: call for call in message.tool_calls or ()}
            calls = render_calls([call.made() for call in self._calls.values()])
            return Said("assistant", "\n".join(part for part in (message.text, calls) if part))
        if message.role != "user":
            raise InputError("messages: a system message must come before all others")
        if before is not None and before.results:
            raise InputError("messages: the results of tools must be answered before the user says more")
        if not message.text.strip():
            raise InputError("messages: a message of the user is empty")
        return Said("user", message.text)


class Completion:
    """One answer on its way out, in OpenAI's words.

    Args:
        model: the name it is served under.
        conversation: its name, None where it is not kept.
    """

    def __init__(self, model: str, conversation: str | None) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._conversation = conversation

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if calls := _handed(reply):
            message["tool_calls"] = calls
        else:
            message["content"] = reply.text
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISHED[reply.finish_reason]}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(reply),
            **self._report(reply),
        }

    def first(self) -> dict[str, Any]:
        """The chunk that tells who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with a piece of the reply."""
        return self._chunk({"content": text})

    def calls(self, reply: Reply) -> dict[str, Any] | None:
        """The chunk with the calls that the client is to make."""
        calls = [{"index": i, **call} for i, call in enumerate(_handed(reply))]
        return self._chunk({"tool_calls": calls}) if calls else None

    def last(self, reply: Reply) -> dict[str, Any]:
        """The chunk that tells why it ended, with memstream's report."""
        return {**self._chunk({}, _FINISHED[reply.finish_reason]), **self._report(reply)}

    def usage(self, reply: Reply) -> dict[str, Any]:
        """The chunk without choices that tells the usage."""
        return {**self._chunk({}), "choices": [], "usage": usage(reply)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _report(self, reply: Reply) -> dict[str, Any]:
        """What memstream tells beside OpenAI's fields."""
        told = {"conversation": self._conversation, **as_json(reply)}
        return {"memstream": {name: value for name, value in told.items() if name not in ("text", "summaries")}}


def _handed(reply: Reply) -> list[dict[str, Any]]:
    """The calls that are the client's to make."""
    handed = [call for call in reply.tool_calls if call.result is None and call.error is None]
    if reply.finish_reason != "tool_calls":
        return []
    return [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in handed
    ]


def usage(reply: Reply) -> dict[str, Any]:
    """Tokens in OpenAI's words: the prompt is all that the reply saw, cached what of it was not computed for it."""
    used = reply.usage
    return {
        "prompt_tokens": used.context_tokens,
        "completion_tokens": used.reply_tokens,
        "total_tokens": used.context_tokens + used.reply_tokens,
        "prompt_tokens_details": {"cached_tokens": max(0, used.context_tokens - used.prompt_tokens)},
    }


def error(message: str, *, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
