"""The page at ``/``: talk on the left; on the right the cache as it is, what was recalled and why, and three curves.

``add`` puts it into the server. ``host.py`` is where NiceGUI meets the application, ``rooms.py`` what browsers share
of a conversation, ``view.py`` one browser tab: read it first.
"""

from __future__ import annotations

from importlib.util import find_spec

from fastapi import FastAPI

from memstream.errors import MissingExtraError

PATHS = "/_nicegui"  # where everything lies that the page at / loads and talks to


def is_there() -> bool:
    """Whether NiceGUI is installed."""
    return find_spec("nicegui") is not None


def add(app: FastAPI, *, model: str) -> None:
    """Adds the page to a server; it lives through the same turns as the API, and in its process.

    Args:
        app: of ``create_app``, before it has started; other routes go first.
        model: its name, for people.

    Raises:
        MissingExtraError: NiceGUI is not installed.
    """
    if not is_there():
        raise MissingExtraError("the page needs nicegui: pip install 'memstream[serve]', or leave it out (--no-page)")
    from memstream.serving.page import host

    host.mount(app, model=model)
