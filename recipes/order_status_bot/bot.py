"""A bot that tells customers where their order is, and knows them when they come back."""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ORDERS = tomllib.loads((HERE / "orders.toml").read_text())


def answer(chat, text):
    """The status of the order that the customer names now or told us earlier; otherwise what the model says."""
    if not re.search(r"\border\b", text, re.IGNORECASE):
        return chat.chat(text).text
    told = [text, *(memory.text for memory in chat.search(text) if memory.role == "user")]
    numbers = re.findall(r"\b\d{5}\b", " ".join(told))
    status = [f"Order {number} {ORDERS.get(number, 'is not known to us')}." for number in numbers[:1]]
    said = "".join(status) or "What is your order number?"
    chat.add(text, said)
    return said


def talk(store, customer, said):
    from memstream import Agent

    leaving = contextlib.suppress(EOFError, KeyboardInterrupt)
    with Agent.from_toml(HERE / "config.toml", store=store) as agent, agent.session(user=customer) as chat, leaving:
        for text in said or iter(lambda: input(f"{customer}> "), ""):
            print(answer(chat, text), flush=True)


def script():
    """Plays three visits, each in a process of its own, and checks what the customer reads."""
    with tempfile.TemporaryDirectory() as folder:
        visit = [sys.executable, __file__, "--store", f"{folder}/bot.db", "--customer"]
        for customer, text, expected in (
            ("anna", "Hello, my order number is 48213.", "Order 48213 was shipped on Monday"),
            ("anna", "Hi, it is me again. Where is my order?", "Order 48213 was shipped on Monday"),
            ("bela", "Hello. Where is my order?", "What is your order number?"),
        ):
            out = subprocess.run([*visit, customer, text], text=True, stdout=subprocess.PIPE, check=True).stdout
            print(f"{customer}> {text}\n{out}", end="")
            assert expected in out, f"expected {expected!r}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="where conversations are kept; default: memstream's own store")
    parser.add_argument("--customer", default="guest", help="whose memory is used")
    parser.add_argument("--script", action="store_true", help="play the scripted visits")
    parser.add_argument("said", nargs="*", help="say this instead of asking at the prompt")
    options = parser.parse_args()
    script() if options.script else talk(options.store, options.customer, options.said)
