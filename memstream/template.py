"""A model's chat template, learned once as pieces around texts, so that a conversation is a stable stream of tokens.

Chat templates render whole message lists, and some rewrite earlier turns. A stream cannot be rewritten, so each role's
prefix and suffix are learned from renders with sentinel texts. Assembling turns from them must equal the template's own
render, or the model is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2

from memstream.errors import ConfigError, InputError, UnsupportedModelError
from memstream.tools import Schema, instruction


class Opening(NamedTuple):
    """What comes before the first user's words: pinned tokens, and the prefix of the first user turn as text."""

    tokens: list[int]
    pinned: bool
    user_prefix: str


class ChatTemplate:
    """Renders turns of one model, text to tokens.

    What a person typed is tokenised alone, with special tokens taken as plain text: it can never become a control
    token.

    Args:
        tokenizer: of the model.
        chat_template: a Jinja template for a model that brings none; None: the tokenizer's own.
        eos_ids: further ids that end a reply (the generation config's).

    Raises:
        ConfigError: there is no template.
        UnsupportedModelError: the template cannot be assembled from pieces.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, eos_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._template = chat_template or tokenizer.chat_template
        if not self._template:
            raise ConfigError(
                "this model has no chat template (a base model?); give one: Agent(..., chat_template=...)"
            )
        self.user_prefix, self.user_suffix, self._lead, self.assistant_suffix = self._learn()
        special = set(tokenizer.all_special_ids)
        end = self.control(self.assistant_suffix)[:1]
        eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self.stop_ids = frozenset((*eos_ids, *eos, *(i for i in end if i in special)))

    # Tokens

    def control(self, text: str) -> list[int]:
        """Tokens of a piece of the template itself; control tokens are recognised."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def plain(self, text: str) -> list[int]:
        """Tokens of what a person or a document said; control tokens in it are plain text.

        Raises:
            InputError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}; decode it with "
                "errors='replace' first"
            ) from error
        if not text:
            return []
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def user(self, text: str, *, prefix: str | None = None) -> list[int]:
        """A user turn, up to where the assistant begins to speak."""
        head = self.user_prefix if prefix is None else prefix
        return [*self.control(head), *self.plain(text), *self.control(self.user_suffix)]

    @cached_property
    def closing(self) -> list[int]:
        """What ends an assistant turn."""
        return self.control(self.assistant_suffix)

    def exchange(self, user: str, assistant: str, *, prefix: str | None = None) -> list[int]:
        """A whole finished exchange."""
        lead = "" if assistant.startswith(self._lead) else self._lead
        return [*self.user(user, prefix=prefix), *self.plain(lead + assistant), *self.closing]

    def opening(self, system: str | None, tools: Sequence[Schema] = ()) -> Opening:
        """What a conversation begins with.

        Args:
            system: the system text, or None.
            tools: schemas of what the model may call, told as its template tells them; a template that knows of none
                has them in the system text.

        Raises:
            ConfigError: the template takes no system text; or a schema holds a control token of the model.
        """
        if tools and not self._tells_tools:
            system, tools = "\n\n".join((*([system] if system else []), instruction(tools))), ()
        self._check_plain(tools)
        if system is None:
            before, _ = self._split([("user", _mark(1))], generate=True, tools=tools)
            if before.endswith(self.user_prefix):
                return Opening(self.control(before.removesuffix(self.user_prefix)), bool(tools), self.user_prefix)
            return Opening(self.control(before), True, "") if tools else Opening([], False, before)
        mark = _mark(0)
        try:
            before, _ = self._split([("system", mark), ("user", _mark(1))], generate=True, tools=tools)
        except jinja2.TemplateError as error:
            raise ConfigError(f"this model's chat template takes no system text: {error}") from error
        if mark not in before:
            raise ConfigError("this model's chat template drops the system text")
        head, tail = before.split(mark)
        inner = tail.removesuffix(self.user_prefix)
        prefix = self.user_prefix if inner != tail else ""  # "": folded into the first user turn
        return Opening([*self.control(head), *self.plain(system), *self.control(inner)], True, prefix)

    @cached_property
    def _tells_tools(self) -> bool:
        """Whether the template itself tells a model of tools, all of them, and leaves the turns as they are."""
        name, parameter = _mark(8), _mark(9)
        told = {"type": "object", "properties": {parameter: {"type": "string", "description": parameter}}}
        tool: Schema = {"type": "function", "function": {"name": name, "description": name, "parameters": told}}
        try:
            before, after = self._split([("user", _mark(1))], generate=True, tools=[tool])
        except jinja2.TemplateError:
            return False
        return name in before and parameter in before and after == self.user_suffix

    def _check_plain(self, tools: Sequence[Schema]) -> None:
        """Schemas become text of the template, where control tokens would be obeyed."""
        told = json.dumps(tools, ensure_ascii=False)
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.special and str(token) in told:
                raise ConfigError(f"a tool's schema holds {str(token)!r}, a control token of this model; take it out")

    # Learning

    def _render(self, turns: Sequence[tuple[str, str]], *, generate: bool, tools: Sequence[Schema] = ()) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generate,
            )
        )

    def _split(
        self, turns: Sequence[tuple[str, str]], *, generate: bool, tools: Sequence[Schema] = ()
    ) -> tuple[str, str]:
        """What a render has before and after the last turn's text."""
        before, found, after = self._render(turns, generate=generate, tools=tools).rpartition(turns[-1][1])
        if not found:
            raise UnsupportedModelError("the chat template drops or rewrites a turn's text")
        return before, after

    def _learn(self) -> tuple[str, str, str, str]:
        """User prefix, user suffix up to where the assistant speaks, what leads its words, assistant suffix."""
        turns = [("user" if i % 2 else "assistant", _mark(i)) for i in range(1, 6)]
        try:
            whole = self._render(turns, generate=True)
            _, assistant_suffix = self._split(turns[:2], generate=False)
            between = [whole.split(_mark(i))[1].split(_mark(i + 1))[0] for i in range(1, 5)]
        except (jinja2.TemplateError, IndexError) as error:
            raise UnsupportedModelError(f"the chat template cannot be taken apart into turns: {error}") from error
        user_suffix, turnover = between[0], between[1]
        if not turnover.startswith(assistant_suffix):
            raise UnsupportedModelError("the chat template ends a reply differently when another turn follows")
        user_prefix = turnover.removeprefix(assistant_suffix)
        assembled = whole.split(_mark(1))[0] + _mark(1)
        for i in range(2, 6):
            assembled += (user_suffix if i % 2 == 0 else assistant_suffix + user_prefix) + _mark(i)
        generation = whole.split(_mark(5))[1]
        lead = user_suffix.removeprefix(generation)  # such as the blank that the model will say by itself
        if assembled + generation != whole or not (generation.startswith(user_suffix) or lead != user_suffix):
            raise UnsupportedModelError("the chat template renders the same turn differently at different places")
        return user_prefix, generation, "" if lead == user_suffix else lead, assistant_suffix


def eos_ids_of(model: Any) -> list[int]:
    """The ids that a model's generation config says end a text."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _mark(i: int) -> str:
    """A sentinel text that no template rewrites."""
    return f"sentinel{i}text"
