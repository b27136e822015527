"""The JSON Schema of everything that ``--json`` and ``--scores`` write; published as docs/replay.schema.json."""

from __future__ import annotations

import dataclasses
import types
from datetime import datetime
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memstream.replay.events import Alert, Answer, Note, Record, Summary

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema() -> dict[str, Any]:
    """One object per line: an alert, a note, a record, a summary or an answer, told apart by ``type``."""
    kinds = (Alert, Note, Record, Summary, Answer)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line that memstream replay writes with --json or --scores",
        "oneOf": [_of_class(kind) for kind in kinds],
    }


def _of_class(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        "type": "object",
        "properties": {name: _of(hints[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _of(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(argument) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0])}
    if hint is type(None):
        return {"type": "null"}
    if hint is datetime:
        return {"type": "string", "format": "date-time"}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _of_class(hint)
    return {"type": _PLAIN[hint]}
