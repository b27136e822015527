"""A bot that tells customers where their order is, and knows them when they come back."""

import re
import sys
import tomllib
from pathlib import Path

from memstream import Agent, Tool
from memstream.cli.bots import run_bot

HERE = Path(__file__).parent
ORDERS = tomllib.loads((HERE / "orders.toml").read_text())
ASK = "What is your order number?"
ONLY = "I can only tell you where an order is."


def order_status(number: str) -> str:
    """Tells where an order is.

    Args:
        number: of the order, five digits.
    """
    return ORDERS.get(number, "is not known to us")


TOOL = Tool.of(order_status, timeout_s=5)


def answer(chat, text, generation=None):
    """Calls the tool with the number that the customer names now or told us earlier; small talk is the model's."""
    about_orders = re.search(r"\border\b", text, re.IGNORECASE)
    if not about_orders and "?" not in text:
        return (yield from chat.stream(text, generation=generation))
    told = [text, *(memory.text for memory in chat.search(text) if memory.role == "user")]
    number = re.search(r"\b\d{5}\b", " ".join(told))
    said = ASK if about_orders else ONLY
    if about_orders and number:
        call = TOOL.call(number=number[0])
        said = f"Order {number[0]} {call.result}." if call.error is None else "I cannot look that up now; try again."
    chat.add(text, said)
    yield said


def open_bot(settings):
    return Agent.from_mapping(settings), answer


MONDAY = [
    ("anna", "Hello, my order number is 48213.", "Order 48213 was shipped on Monday"),
    ("bela", "Hello. Where is my order?", ASK),
    ("bela", "Is the shop open on Sundays?", ONLY),
]
THURSDAY = [
    ("anna", "Hi, it is me again. Where is my order?", "Order 48213 was shipped on Monday"),
    ("bela", "Where is my order?", ASK),
]
if __name__ == "__main__":
    sys.exit(run_bot(HERE / "config.toml", [MONDAY, THURSDAY]))
