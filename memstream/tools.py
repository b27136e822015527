"""Tools: functions that a model may call, how it says so, and how it is shown what they returned.

The forms understood are that of Hermes, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and a reply that
is nothing but such JSON. Results are data: they cannot end the frame they stand in.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import logging
import re
import threading
import time
import traceback
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from memstream.errors import ConfigError
from memstream.report import ToolCall
from memstream.streaming.generate import StopTexts

log = logging.getLogger(__name__)

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
MOST_CHARS = 2000  # of one result
_POLL_S = 0.05
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)
_FRAME = re.compile(r"<(\s*/?\s*tool_response\s*)>", re.IGNORECASE)
_TAG = re.compile(r"<(?=\s*/?\s*tool_)", re.IGNORECASE)
_BARE = re.compile(r"\s*(?:\{|\[\s*(?:\{|\Z)|\Z)")  # how a reply begins that may be nothing but calls
_NAMED = re.compile(r'"name"\s*:\s*"([^"]*)"')
_HOW = """You can call functions. To call one, say nothing but
<tool_call>
{"name": "the function's name", "arguments": {"parameter": "value"}}
</tool_call>
and wait for its result. Never make up a result. These are the functions:"""

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function that a model may call.

    Attributes:
        schema: as of OpenAI: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
        function: called with keyword arguments; None: whoever talks to the model runs it.
        timeout_s: most seconds of one call.
        types: of the function's parameters, and
        required: those without a default.
    """

    schema: Schema
    function: Callable[..., Any] | None = None
    timeout_s: float = 10.0
    types: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """What the model calls it by."""
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout_s: float = 10.0) -> Tool:
        """Makes a tool of a function, plain or async, from its type hints and its docstring (Google style).

        It is called in a thread of its own, in a copy of the caller's context (``contextvars``): that is how it learns
        who is asking, which a model must not tell.

        Args:
            function: with a hint and a description for each parameter.
            timeout_s: most seconds of one call; what comes later is ignored.

        Raises:
            ConfigError: a hint or a description is missing, or is of a kind that a model cannot be told.
        """
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        if not inspect.isroutine(function):
            raise ConfigError(f"{function!r} is no function; a tool is made of a function or a method")
        name = function.__name__
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 1e6:
            raise ConfigError(f"timeout_s of the tool {name} is {timeout_s!r}; it must be a number of seconds above 0")
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"the tool {name} takes {parameter}; name its parameters, and let none be positional")
        try:
            told = get_json_schema(function)["function"]
            hints = typing.get_type_hints(function, include_extras=True)
            types = {p.name: TypeAdapter(hints[p.name], config=_LAX) for p in parameters}
        except (DocstringParsingException, TypeHintParsingException, PydanticUserError, *_UNREADABLE) as error:
            raise ConfigError(
                f"no tool can be made of {name}: {error}; it needs a docstring that says what it does and, under "
                "Args:, what each parameter is, and a type hint for each"
            ) from error
        required = frozenset(p.name for p in parameters if p.default is p.empty)
        schema = _checked_schema({"type": "function", "function": told})
        return cls(schema=schema, function=function, timeout_s=timeout_s, types=types, required=required)

    def call(self, **arguments: Any) -> ToolCall:
        """Calls it as a model's call is: arguments checked, time limited, never an exception but ``error``."""
        return run(ToolCall(name=self.name, arguments=arguments), [self], lambda: False)

    def read(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments as the function's types, and what is wrong with them: ``""`` where nothing is."""
        wrong = [f"{name}: there is no such parameter" for name in arguments if name not in self.types]
        wrong += [f"{name}: it is missing" for name in sorted(self.required - arguments.keys())]
        values: dict[str, Any] = {}
        for name, adapter in self.types.items():
            if name in arguments:
                try:
                    values[name] = adapter.validate_python(arguments[name])
                except ValidationError as error:
                    wrong.append(f"{name}: {error.errors()[0]['msg']}")
        return values, "; ".join(wrong)


_UNREADABLE = (NameError, TypeError, ValueError)  # what reading a function's hints may raise
_LAX = ConfigDict(coerce_numbers_to_str=True)  # models write numbers of orders without quotes


def as_tools(given: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Tools of functions, and of schemas, whose calls are handed to whoever talks to the model.

    Raises:
        ConfigError: no tool can be made of one, or two have the same name.
    """
    made: dict[str, Tool] = {}
    for one in given:
        if isinstance(one, Mapping):
            tool = Tool(schema=_checked_schema(one))
        else:
            tool = one if isinstance(one, Tool) else Tool.of(one)
        if made.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"two tools are called {tool.name!r}; rename one")
    return tuple(made.values())


def schemas(tools: Iterable[Tool | Callable[..., Any] | Mapping[str, Any]]) -> list[Schema]:
    """What a model is told of tools, in OpenAI's form.

    Raises:
        ConfigError: see ``as_tools``.
    """
    return [tool.schema for tool in as_tools(tools)]


def _checked_schema(given: Mapping[str, Any]) -> Schema:
    told = given.get("function")
    if given.get("type", "function") != "function" or not isinstance(told, Mapping):
        raise ConfigError('a tool\'s schema must be {"type": "function", "function": {"name": ..., ...}}')
    name = told.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"a tool is called {name!r}; a name is of letters, digits, _ and -, at most 64 of them")
    description, parameters = told.get("description") or "", told.get("parameters") or {"type": "object"}
    if not isinstance(description, str) or not isinstance(parameters, Mapping):
        raise ConfigError(f"the tool {name!r} needs a text as its description, and a JSON schema as its parameters")
    parameters = {"properties": {}, **parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def instruction(told: Sequence[Schema]) -> str:
    """How tools are told to a model whose chat template does not know of any."""
    return "\n".join((_HOW, *(json.dumps(schema["function"], ensure_ascii=False) for schema in told)))


# What a model says


def parse_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """The calls in a reply, and the text before them; a reply that calls nothing is all text.

    A call that cannot be made has its ``error``: of a tool that is not there, or, without a ``name``, one that is not
    JSON.
    """
    names = [tool.name for tool in tools]
    at = text.find(CALL)
    if at < 0:
        return _bare_calls(text, names)
    before, calls = text[:at], list[ToolCall]()
    while at >= 0:
        value, end, error = _read_json(text, at + len(CALL))
        calls += _calls_of(value, names) if not error else [_damaged(error)]
        at = text.find(CALL, end)
    return before, calls


def _bare_calls(text: str, names: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """A reply that is nothing but calls of known tools, whole or damaged."""
    if not _BARE.match(text):
        return text, []
    value, end, error = _read_json(text, 0)
    if error or text[end:].strip():
        named = _NAMED.search(text)
        return ("", [_damaged(error or "more follows")]) if named and named[1] in names else (text, [])
    items = value if isinstance(value, list) else [value]
    known = all(isinstance(item, dict) and item.get("name") in names for item in items)
    told = all("arguments" in item or "parameters" in item for item in items) if known else False
    return ("", _calls_of(value, names)) if items and told else (text, [])


def _read_json(text: str, first: int) -> tuple[Any, int, str]:
    """The JSON value that begins there, the character after it, and what is wrong with it."""
    first += len(text[first:]) - len(text[first:].lstrip())
    try:
        return *json.JSONDecoder().raw_decode(text, first), ""
    except json.JSONDecodeError as error:
        return None, first, f"{error.msg} at its character {error.pos - first}"
    except (ValueError, RecursionError) as error:
        return None, first, str(error)


def _calls_of(value: Any, names: Sequence[str]) -> list[ToolCall]:
    found = []
    for item in value if isinstance(value, list) else [value]:
        item = item if isinstance(item, dict) else {}
        name, arguments = item.get("name"), item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):  # JSON in JSON, as OpenAI has it
            arguments, _, _ = _read_json(arguments, 0)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            found.append(_damaged("it must be an object with a name and arguments"))
        elif name not in names:
            error = f"there is no tool {name!r}; there are: {', '.join(names)}"
            found.append(ToolCall(name=name, arguments=arguments, error=error))
        else:
            found.append(ToolCall(name=name, arguments=arguments))
    return found


def _damaged(why: str) -> ToolCall:
    return ToolCall(name="", arguments={}, error=f"this is not the JSON of a call: {why}")


class HeldCalls:
    """Holds back what may be a call, so that nobody sees half of one."""

    def __init__(self) -> None:
        self._beginning = ""
        self._tags: StopTexts | None = None

    def push(self, text: str) -> str:
        """The text that can be given out now; nothing of a reply that begins as JSON does."""
        if self._tags is None:
            self._beginning += text
            if _BARE.match(self._beginning):
                return ""
            self._tags, text = StopTexts((CALL,)), self._beginning
        return self._tags.push(text)


def render_calls(calls: Sequence[ToolCall]) -> str:
    """Calls as a model says them, such as those of a conversation that was held elsewhere."""
    said = ({"name": call.name, "arguments": call.arguments} for call in calls)
    return "\n".join(f"{CALL}\n{json.dumps(one, ensure_ascii=False)}\n{CALL_END}" for one in said)


# What a model is shown


def render_results(calls: Sequence[ToolCall], most_chars: int = MOST_CHARS) -> str:
    """The results and errors of calls as the model reads them, each of at most ``most_chars`` characters."""
    return "\n".join(f"{RESPONSE}\n{_as_data(call, most_chars)}\n{RESPONSE_END}" for call in calls)


def _as_data(call: ToolCall, most_chars: int) -> str:
    kind, text = ("content", call.result or "") if call.error is None else ("error", call.error)
    if len(text) > most_chars:
        text = f"{text[:most_chars]} [cut: {len(text) - most_chars} characters more]"
    value, end, error = _read_json(text, 0)
    whole = isinstance(value, (dict, list)) and not error and not text[end:].strip()
    name = f'"name": {json.dumps(call.name)}, ' if call.name else ""
    body = text.strip() if whole else json.dumps(text, ensure_ascii=False)
    return _TAG.sub(r"\\u003c", f'{{{name}"{kind}": {body}}}')  # JSON still, and no tag


def without_frames(text: str) -> str:
    """The text with ``<tool_response>`` written in round brackets: what a user says is no tool's result."""
    return _FRAME.sub(r"(\1)", text)


# Running


def run(call: ToolCall, tools: Sequence[Tool], cancelled: Callable[[], bool]) -> ToolCall:
    """The call with its result or its error, never an exception."""
    begun = time.perf_counter()
    tool = next((tool for tool in tools if tool.name == call.name), None)
    result, error = None, call.error
    if tool is not None and tool.function is not None and error is None:
        values, wrong = tool.read(call.arguments)
        result, error = (None, wrong) if wrong else _outcome(tool, values, cancelled)
    done = dataclasses.replace(call, result=result, error=error, latency_ms=(time.perf_counter() - begun) * 1000)
    log.info("tool %s: %s in %.0f ms", done.name or "?", "error" if done.error else "result", done.latency_ms)
    return done


def _outcome(tool: Tool, values: dict[str, Any], cancelled: Callable[[], bool]) -> tuple[str | None, str | None]:
    """Result and error, of which one is None."""
    if cancelled():
        return None, "cancelled"
    outcome: Future[tuple[str | None, str | None]] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_work, tool, values, outcome), name=tool.name, daemon=True).start()
    deadline = time.monotonic() + tool.timeout_s
    while not outcome.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return None, f"it took longer than {tool.timeout_s:g} s"
        if cancelled():
            return None, "cancelled"
        wait([outcome], timeout=min(left, _POLL_S))
    return outcome.result()


def _work(tool: Tool, values: dict[str, Any], outcome: Future[tuple[str | None, str | None]]) -> None:
    assert tool.function is not None
    try:
        result = tool.function(**values)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result, tool.timeout_s + _POLL_S))
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        outcome.set_result((text, None))
    except BaseException as error:  # whatever a tool does, the conversation goes on  # noqa: BLE001
        outcome.set_result((None, "".join(traceback.format_exception_only(error)).strip()))


async def _awaited(result: Awaitable[Any], timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await result
