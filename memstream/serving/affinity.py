"""Requests of one conversation go to one replica: a request router for Ray Serve.

Ray sends this module by value to the proxies, where memstream need not be installed: it imports Ray and the standard
library only. A conversation that comes to another replica all the same, because its own was lost or there are more of
them now, is given up by the one that has it; only its cache is built again.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

HEADER = b"x-conversation-id"
_PATH = "/v1/conversations/"


def ranked(conversation: str, replicas: Iterable[str]) -> list[str]:
    """Rendezvous hashing: the replicas in a conversation's order of preference, the same on every proxy.

    Where one goes, only the conversations that preferred it move, each to its next one; a new one takes its share.
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{conversation}\0{replica}".encode(), digest_size=8).digest()

    return sorted(replicas, key=weight, reverse=True)


def conversation_of(scope: Mapping[str, Any]) -> str | None:
    """The conversation that a request's header or path names; None where neither does.

    Args:
        scope: of ASGI. A request's body is not read before it is routed.
    """
    named = dict(scope["headers"]).get(HEADER)
    if named:
        return str(named.decode("latin-1"))
    return scope["path"].partition(_PATH)[2].split("/")[0] or None


class ConversationRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed for us
    """Ranks the replicas for a conversation; what names none goes to the less busy one of two."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas to be tried one after the other."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between rounds, while there is none to be had
        sent = pending_request.args[0] if pending_request.args else None
        conversation = conversation_of(pickle.loads(sent).asgi_scope) if isinstance(sent, bytes) else None
        if conversation is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[replicas[name]] for name in ranked(conversation, replicas)]
