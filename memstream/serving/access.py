"""Who may ask a server for what."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from memstream.errors import ConfigError
from memstream.memory import Scope

LEAST_KEY = 16  # characters: shorter ones can be guessed


class Keys:
    """Which key opens which namespace; only digests are held.

    Args:
        keys: ``KEY`` or ``NAMESPACE=KEY`` each; without a namespace, ``default``'s.
        metrics_key: opens the metrics of all namespaces, and nothing else.
        default: the namespace of keys that name none, and of everybody where there are no keys.

    Raises:
        ConfigError: a key is too short, given twice, or its namespace is no name.
    """

    def __init__(self, keys: Iterable[str] = (), *, metrics_key: str | None = None, default: str = "default") -> None:
        self._default = default
        self._namespaces: dict[bytes, str] = {}
        for given in keys:
            namespace, _, key = given.rpartition("=")
            self._add(key, Scope(namespace or default).namespace)
        self._metrics = None if metrics_key is None else self._checked(metrics_key)
        if self._metrics in self._namespaces:
            raise ConfigError("the metrics key is also the key of a namespace; give it one of its own")

    def _add(self, key: str, namespace: str) -> None:
        digest = self._checked(key)
        if digest in self._namespaces:
            raise ConfigError("the same API key was given twice")
        self._namespaces[digest] = namespace

    @staticmethod
    def _checked(key: str) -> bytes:
        if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key must have at least {LEAST_KEY} printable ASCII characters and no blanks; make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return hashlib.sha256(key.encode()).digest()

    def __bool__(self) -> bool:
        return bool(self._namespaces)

    def namespace(self, headers: Mapping[str, str]) -> str | None:
        """The namespace that a request's ``Authorization: Bearer KEY`` opens; None where it opens none."""
        if not self._namespaces:
            return self._default
        sent = self._sent(headers)
        opened = [space for digest, space in self._namespaces.items() if hmac.compare_digest(digest, sent)]
        return opened[0] if opened else None

    def opens_metrics(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may read the metrics of all namespaces."""
        if self._metrics is None:
            return not self._namespaces
        return hmac.compare_digest(self._metrics, self._sent(headers))

    @staticmethod
    def _sent(headers: Mapping[str, str]) -> bytes:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return hashlib.sha256(key.strip().encode() if scheme.lower() == "bearer" else b"").digest()


def check_exposed(host: str, keys: Keys) -> None:
    """Refuses to listen beyond this machine without a key.

    Raises:
        ConfigError: the host is no loopback address and there are no keys.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not keys:
        raise ConfigError(
            f"listening on {host} lets others in, so it needs a key: --api-key KEY, or NAMESPACE=KEY, or "
            "MEMSTREAM_API_KEY; or listen on 127.0.0.1"
        )


def _allowed(request: Request) -> str:
    keys: Keys = request.app.state.keys
    namespace = keys.namespace(request.headers)
    if namespace is None:
        raise HTTPException(
            401, "no valid API key; send it as Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        )
    return namespace


Namespace = Annotated[str, Depends(_allowed)]  # the one that the request's key opens; 401 where it opens none
