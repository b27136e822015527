"""The saved vector index: one file, replaced atomically, that says what it holds and proves it."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from memstream.errors import StoreCorruptError, StoreError
from memstream.stores.base import VectorIndex

_MAGIC = b"memstream-index-2\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an index file says about itself: it reflects all events up to ``last_sequence``."""

    backend: str
    space: str
    dimension: int
    last_sequence: int
    count: int


class _Hashing:
    """A file that remembers the checksum of what went through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        data = bytes(data)
        self.digest.update(data)
        return self._file.write(data)


def save(path: Path, index: VectorIndex, header: Header) -> str:
    """Writes the index beside ``path``, makes it durable, then moves it there. Returns its checksum.

    Raises:
        StoreError: the disk refused; the old file is still there, whole.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)  # mode 0600
        with os.fdopen(handle, "wb") as file:
            hashing = _Hashing(file)
            hashing.write(_MAGIC + json.dumps(asdict(header), sort_keys=True).encode() + b"\n")
            index.dump(cast(BinaryIO, hashing))
            checksum = hashing.digest.hexdigest()
            file.write(bytes.fromhex(checksum))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StoreError(f"cannot save the index {path}: {error.strerror}; it is rebuilt from the store") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return checksum


def read_header(path: Path) -> tuple[Header, str]:
    """The header and checksum of a file whose bytes are all as they were written.

    Raises:
        StoreCorruptError: they are not.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(digest_size=16)
            left = size - digest.digest_size
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
            if left != 0 or file.read() != digest.digest():
                raise StoreCorruptError("its checksum is wrong")
            file.seek(0)
            if file.readline() != _MAGIC:
                raise StoreCorruptError("it is of another format")
            return Header(**json.loads(file.readline())), digest.hexdigest()
    except OSError as error:
        raise StoreCorruptError(f"it cannot be read ({error.strerror})") from error


def load(path: Path, index: VectorIndex, header: Header) -> None:
    """Fills the index from a file that ``read_header`` has checked."""
    with path.open("rb") as file:
        file.readline()
        file.readline()
        index.load(file, header.count)


def sweep(path: Path) -> None:
    """Removes what a killed save left behind, vectors of forgotten texts perhaps. Nobody else may be saving."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        leftover.unlink(missing_ok=True)
