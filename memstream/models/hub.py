"""Decides within seconds whether a hub id can be read: from the local cache, or over the network.

``huggingface_hub`` retries a host it cannot reach for more than 20 s, and a name lookup alone may hang that long: so
one request of our own goes first, in a thread, and is given up after a few seconds.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from memstream.errors import ModelNotFoundError
from memstream.models.catalog import DEFAULT_MODEL, suggestion

_log = logging.getLogger(__name__)

REACH_TIMEOUT_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_id(name: str) -> None:
    """Raises ModelNotFoundError unless ``name`` has the form of a hub id, ``NAME`` or ``OWNER/NAME``."""
    if not _ID.fullmatch(name):
        raise ModelNotFoundError(f"there is no file or folder {name!r}, and it is not a hub id{suggestion(name)}")


def cached_commit(name: str, revision: str) -> str | None:
    """Returns the commit of this model whose configuration the hub's local cache holds; None when it holds none."""
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def require_network(name: str) -> None:
    """Returns when the hub answers.

    Raises:
        ModelNotFoundError: it does not answer within ``REACH_TIMEOUT_S``, or ``HF_HUB_OFFLINE`` is set; the message
            says what would work.
    """
    remedy = (
        f"the built-in {DEFAULT_MODEL!r} works without a network, as do local folders and .gguf files{suggestion(name)}"
    )
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{name!r} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it; {remedy}"
        )
    reason = _unreachable(constants.ENDPOINT)
    if reason is not None:
        raise ModelNotFoundError(
            f"{name!r} is not here, and the hub {constants.ENDPOINT} cannot be reached ({reason}); {remedy}"
        )


def _unreachable(url: str) -> str | None:
    """Returns why ``url`` does not answer within ``REACH_TIMEOUT_S``; None when it answers, whatever it says."""
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REACH_TIMEOUT_S):
                outcome.append(None)
        except urllib.error.HTTPError as error:
            error.close()
            outcome.append(None)
        except urllib.error.URLError as error:
            # Certificates are the hub library's business: it may know others than the standard library does.
            outcome.append(None if isinstance(error.reason, ssl.SSLError) else str(error.reason))
        except (OSError, ValueError) as error:
            outcome.append(str(error))

    thread = threading.Thread(target=ask, name="memstream-reach-hub", daemon=True)
    thread.start()
    thread.join(REACH_TIMEOUT_S)
    return outcome[0] if outcome else f"no answer within {REACH_TIMEOUT_S:.0f} s"
