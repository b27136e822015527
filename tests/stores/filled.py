"""A store with something of every kind, for what has to carry all of it over."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from memstream.memory import Memory, Scope
from tests.stores.tiny import say, summarise

MONDAY = Scope("acme", "c42", "monday")
ODD = 'line\u2028sep "quoted" \\ \t\x01\x7f 订单 \U0001f600\r\n'


def fill(memory: Memory) -> None:
    """Two namespaces, users and none; undone, forgotten, cut and open turns; summaries, facts, texts of all kinds."""
    with memory.open_conversation(MONDAY) as handle:
        first = say(handle, "My order number is 48213.", "Noted: 48213.")
        _, undone = say(handle, "amber basil cedar", "delta")
        gone, _ = say(handle, "forget this zanzibarium", "ember")
        say(handle, ODD, "")
        handle.supersede([undone])
        memory.forget(MONDAY, f"turn:{gone}")
        for _ in range(2):
            summarise(memory, handle, first, "My order number is 48213. Noted: 48213.")
        cut = handle.begin_turn("assistant", "", 0)
        handle.finish_turn(cut, "half a", 2, "cut")
    with memory.open_conversation(Scope("acme", "c42", "friday")) as handle:
        for i in range(7):
            say(handle, f"amber question{i}", f"basil answer{i}")
        handle.begin_turn("user", "still waiting", 2)
        handle.begin_turn("assistant", "", 0)
    with memory.open_conversation(Scope("acme", None, "visitor")) as handle:
        handle.begin_turn("user", "said long ago", 3, datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC))
        say(handle, "grove heron", "ivory")
    with memory.open_conversation(Scope("other", "c42", "monday")) as handle:
        say(handle, "another tenant's amber", "jolly")
    memory.open_conversation(Scope("other", "c43", "empty")).close()
    memory.remember(Scope("acme", "c42"), "Prefers e-mail")
    memory.remember(Scope("acme", "c42"), "Lives in Łódź")
    memory.remember(Scope("acme", None, "visitor"), "Came from the fair")
    with memory.store.write() as connection:
        connection.exec_driver_sql("DELETE FROM pins WHERE fact_id = 2")
    memory.flush()


def tables(path: Path) -> dict[str, list[str]]:
    """Every row of every table of a store's file, shadow tables too."""
    connection = sqlite3.connect(path)
    try:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(map(repr, connection.execute(f"SELECT * FROM {name}"))) for name in names}
    finally:
        connection.close()
