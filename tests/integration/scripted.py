"""A model whose words are forced, with a tool: what the tests of tools share."""

from __future__ import annotations

import json
from typing import Any

from memstream import CacheConfig, GenerationConfig, RecallConfig, Session

WIDE = CacheConfig(cache_tokens=4096, memory_tokens=256, max_pinned_tokens=2000, evict_tokens=16, chunk_tokens=256)
LONG = GenerationConfig(max_new_tokens=600)
OFF = RecallConfig(enabled=False)
ORDERS = {"48213": "shipped on Monday"}


def order_status(number: str) -> dict[str, str]:
    """Tells where an order is.

    Args:
        number: of the order.
    """
    if number not in ORDERS:
        raise LookupError(f"no order {number}")
    return {"status": ORDERS[number]}


def says_call(name: str = "order_status", **arguments: Any) -> str:
    """What a model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = says_call(number="48213")
RESULT = '<tool_response>\n{"name": "order_status", "content": {"status": "shipped on Monday"}}\n</tool_response>'


def failed(error: str) -> str:
    """What the model is shown of a call that failed."""
    return f'<tool_response>\n{{"name": "order_status", "error": "{error}"}}\n</tool_response>'


def seen(chat: Session) -> str:
    """Everything in the cache, as text."""
    row = chat._conversation.resident
    return str(chat._agent._template.tokenizer.decode([*row.sink_ids, *row.memory_ids, *row.window_ids]))
