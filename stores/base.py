"""What every store and vector index agrees on: scopes, storable text, and the index protocol."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from memstream.errors import ConfigError, DimensionMismatchError, StoreError

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_MAX_NAME = 512


def storable_text(text: str) -> str:
    """Replaces what no database can hold as text, NUL and lone surrogates, by U+FFFD; all else stays as it is."""
    return _UNSTORABLE.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose memory is read or written: fixed for the life of every handle.

    With a user, recall sees all conversations of (namespace, user); without one, only ``conversation``. Both see the
    documents of the namespace's shared knowledge, which is a scope of its own: ``Scope(namespace, knowledge=True)``.

    Raises:
        ConfigError: a part is empty, too long, or holds NUL or a lone surrogate; knowledge of a user or conversation.
    """

    namespace: str = "default"
    user: str | None = None
    conversation: str | None = None
    knowledge: bool = False

    def __post_init__(self) -> None:
        for field in ("namespace", "user", "conversation"):
            value = getattr(self, field)
            if value is None and field != "namespace":
                continue
            if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or _UNSTORABLE.search(value):
                raise ConfigError(
                    f"Scope.{field} is {value!r}; it must be a text of 1 to {_MAX_NAME} characters "
                    "without NUL or lone surrogates"
                )
        if self.knowledge and (self.user is not None or self.conversation is not None):
            raise ConfigError("Scope.knowledge is shared: it is of the whole namespace, not of a user or conversation")

    @property
    def owner(self) -> tuple[str, str]:
        """Namespace and user key of the owner's row; see ``schema.Owner``."""
        return ("", self.namespace) if self.knowledge else (self.namespace, self.user or "")

    def __str__(self) -> str:
        if self.knowledge:
            return f"the shared knowledge of namespace {self.namespace!r}"
        who = f"user {self.user!r}" if self.user is not None else f"conversation {self.conversation!r}"
        return f"{who} in namespace {self.namespace!r}"


class VectorIndex(Protocol):
    """A cache of the vectors in SQL, searched by inner product, one scope at a time.

    A scope is a number, see ``vectors.SCOPE``. Not thread safe: its owner excludes writers.

    Attributes:
        backend: what the index file says it was written by.
        dimension: of every vector.
        precision: how far a number of a vector that is given back may be from the stored one.
    """

    backend: str
    dimension: int
    precision: float

    def upsert(self, ids: Ids, vectors: Vectors, scopes: Ids) -> None:
        """Adds vectors [n, d] of ``scopes`` [n] under ids [n], replacing those that are there."""

    def delete(self, ids: Ids) -> int:
        """Removes ids; unknown ones are ignored. Returns how many were removed."""

    def search(self, query: Vectors, scope: int, k: int, *, without: Collection[int] = ()) -> tuple[Ids, Vectors]:
        """Finds the at most k best of a scope for ``query`` [d]: ids and scores, best first, ties by id.

        Args:
            query: of length 1.
            scope: nothing of any other is found.
            k: how many.
            without: ids that are not to be found.
        """

    def get(self, ids: Ids) -> tuple[Ids, Vectors]:
        """Those of the ids that are held [m], and their vectors [m, d]."""

    def scopes_of(self, ids: Ids) -> Ids:
        """The scope [n] of each id; 0 for those that are not held."""

    def count(self) -> int:
        """Number of vectors held."""

    def ids(self) -> Ids:
        """All ids, ascending."""

    def dump(self, file: BinaryIO) -> None:
        """Writes everything to a file opened for writing."""

    def load(self, file: BinaryIO, count: int) -> None:
        """Replaces everything by ``count`` vectors that ``dump`` wrote."""


def check_vectors(ids: Ids, vectors: Vectors, dimension: int, scopes: Ids) -> None:
    """Refuses what would poison an index.

    Raises:
        DimensionMismatchError: wrong shape.
        StoreError: wrong dtype, NaN or infinity, ids that are not unique, or no scope.
    """
    if vectors.ndim != 2 or vectors.shape != (len(ids), dimension):
        raise DimensionMismatchError(
            f"vectors have shape {list(vectors.shape)}; {len(ids)} ids need [{len(ids)}, {dimension}]"
        )
    if scopes.shape != (len(ids),) or (scopes == 0).any():
        raise StoreError(f"{len(ids)} vectors need as many scopes, none of them 0")
    if vectors.dtype != np.float32:
        raise StoreError(f"vectors are {vectors.dtype}; they must be float32")
    if not np.isfinite(vectors).all():
        raise StoreError("vectors hold NaN or infinity; the embedder is broken")
    if len(np.unique(np.asarray(ids))) != len(ids):
        raise StoreError("the same id was given twice in one batch of vectors")
