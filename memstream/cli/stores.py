"""What the commands that look into a store share: their options, and opening it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from memstream.config import RecallConfig, memstream_home
from memstream.errors import DimensionMismatchError, ModelNotFoundError, StoreError
from memstream.memory import Memory, SentenceTransformerEmbedder, SqlStore

_Command = TypeVar("_Command", bound=Callable[..., Any])

STORE = click.option(
    "--store",
    default=None,
    metavar="STORE",
    help="A file, or postgresql://USER@HOST/DATABASE.  [default: $MEMSTREAM_HOME/memstream.db]",
)
USER = click.option(
    "--user", default=None, help="Whose memory; without it: shared documents, and conversations without a user."
)
NAMESPACE = click.option("--namespace", default="default", show_default=True, help="The tenant.")
JSON = click.option("--json", "as_json_", is_flag=True, help="Print JSON.")


def options(function: _Command) -> _Command:
    """The options of every subcommand that looks at one user's memory."""
    return STORE(USER(NAMESPACE(JSON(function))))


@contextmanager
def opened(store: str | None, *, vectors: bool = False, create: bool = False) -> Iterator[Memory]:
    """The store's memory; with vectors only where the default embedder is the one that made them."""
    if create and store is None:
        try:
            memstream_home().mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot create {memstream_home()}: {error.strerror}; give --store FILE") from error
    there = SqlStore.open(place(store), create=create)
    memory = None
    if vectors:
        try:
            memory = Memory(there, SentenceTransformerEmbedder(), RecallConfig())
        except (ModelNotFoundError, DimensionMismatchError) as error:
            click.echo(f"words only, no vectors: {error}", err=True)
    if memory is None:
        memory = Memory(there, None, RecallConfig(enabled=False))  # so that no vectors are read but those needed
    try:
        yield memory
    finally:
        memory.close()


def place(store: str | None) -> str | Path:
    """The store that is meant."""
    return memstream_home() / "memstream.db" if store is None else store
