"""Texts of people and models on their way to a terminal."""

from __future__ import annotations

import re

# Everything a terminal could take as an order: control characters but tab and newline, C1, bidirectional overrides.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """The text with what a terminal would obey replaced by U+FFFD, so that no stored word can move the cursor."""
    return _ORDERS.sub("\ufffd", text)
