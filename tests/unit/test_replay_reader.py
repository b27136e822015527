"""The reader: every line once, whatever the bytes are, and in constant memory."""

from __future__ import annotations

import gzip
import io
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream.errors import ReplayError
from memstream.replay.reader import RawLine, check_readable, clean, open_stream, read_lines

CAP = 100


class Pieces:
    """A stream that returns its bytes in pieces of given sizes, as a pipe may."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, n: int, /) -> bytes:
        return next(self._pieces, b"")


def lines_of(data: bytes, cap: int = CAP) -> list[RawLine]:
    return [line for line in read_lines(io.BytesIO(data), "x", max_line_bytes=cap) if line is not None]


def data_of(data: bytes, cap: int = CAP) -> list[bytes]:
    return [line.data for line in lines_of(data, cap)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\n\r\nb\r\n", [b"a", b"", b"b"]),
        (b"a\rb\n", [b"a\rb"]),
        (b"a\x00\x00b\n\x00\x00\x00c\n\x00\x00", [b"ab", b"c"]),
        (b"\xef\xbb\xbfa\nb", [b"a", b"b"]),
        (b"\xef\xbb", [b"\xef\xbb"]),
        ("\ufeffgrün\r\nb".encode("utf-16-le"), ["grün".encode(), b"b"]),
        ("\ufeffgrün\nb\n".encode("utf-16-be"), ["grün".encode(), b"b"]),
        (gzip.compress(b"a\nb\n", mtime=0) + gzip.compress(b"c\n", mtime=0), [b"a", b"b", b"c"]),
        (gzip.compress("\ufeffa\nb\n".encode("utf-16-le"), mtime=0), [b"a", b"b"]),
        (gzip.compress(b"", mtime=0), []),
    ],
)
def test_lines(data: bytes, expected: list[bytes]) -> None:
    assert data_of(data) == expected


def test_numbers_count_every_line() -> None:
    assert [line.number for line in lines_of(b"a\n\n\x00\nb")] == [1, 2, 3, 4]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_only_a_line_beyond_the_cap_is_truncated(end: bytes) -> None:
    fits, longer = lines_of(b"a" * CAP + end)[0], lines_of(b"a" * (CAP + 1) + end)[0]
    assert (fits.data, fits.truncated) == (b"a" * CAP, False)
    assert (longer.data, longer.truncated) == (b"a" * CAP, True)


def test_the_line_after_a_truncated_one_is_whole() -> None:
    assert data_of(b"a" * 1000 + b"\r\nb\n") == [b"a" * CAP, b"b"]


@given(
    lines=st.lists(st.binary(max_size=2 * CAP).map(lambda b: b.replace(b"\n", b"").replace(b"\0", b"")), max_size=8),
    cuts=st.lists(st.integers(1, 50), min_size=1),
)
def test_short_reads_split_no_line(lines: list[bytes], cuts: list[int]) -> None:
    data = b"x\n" + b"".join(line + b"\n" for line in lines)  # the x keeps a byte order mark from being one

    def pieces() -> Iterator[bytes]:
        at = 0
        while at < len(data):
            for cut in cuts:
                if data[at : at + cut]:
                    yield data[at : at + cut]
                at += cut

    read = list(read_lines(Pieces(pieces()), "x", max_line_bytes=CAP))
    assert [line.data for line in read if line] == [b"x", *(line.rstrip(b"\r")[:CAP] for line in lines)]


def test_a_line_of_a_gibibyte_takes_little_memory() -> None:
    block = b"a" * (1 << 16)

    def pieces() -> Iterator[bytes]:
        yield from (block for _ in range(1 << 14))
        yield b"\nnext\n"

    tracemalloc.start()
    try:
        read = [line for line in read_lines(Pieces(pieces()), "x", max_line_bytes=102_400) if line]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(len(line.data), line.truncated) for line in read] == [(102_400, True), (4, False)]
    assert peak_bytes < 2 << 20


def test_a_hole_of_nul_takes_little_memory() -> None:
    hole = bytes(1 << 16)
    tracemalloc.start()
    try:
        pieces = iter([b"a\n", *([hole] * 4096), b"b\n"])
        read = [line.data for line in read_lines(Pieces(pieces), "x", max_line_bytes=CAP) if line]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read == [b"a", b"b"]
    assert peak_bytes < 2 << 20


def test_a_gzip_bomb_takes_little_memory() -> None:
    packed = gzip.compress(bytes(64 << 20).replace(b"\0", b"a") + b"\nb\n")
    tracemalloc.start()
    try:
        read = [line for line in read_lines(io.BytesIO(packed), "x", max_line_bytes=CAP) if line]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(line.data, line.truncated) for line in read] == [(b"a" * CAP, True), (b"b", False)]
    assert peak_bytes < 2 << 20


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_gzip_file_says_so_after_its_lines(damage: str) -> None:
    noise = b"".join(b"%d\n" % (i * 7919 % 100_003) for i in range(50_000))
    packed = bytearray(gzip.compress(noise, mtime=0))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[-6] ^= 0xFF  # in the checksum
    read = []
    with pytest.raises(ReplayError, match="damaged or cut gzip"):
        read.extend(line.data for line in read_lines(io.BytesIO(bytes(packed)), "x", max_line_bytes=CAP) if line)
    assert len(read) > 1000
    assert read == noise.split(b"\n")[: len(read)]


@pytest.mark.parametrize(
    ("data", "text", "n_bad"),
    [
        (b"plain", "plain", 0),
        ("grün 日本".encode(), "grün 日本", 0),
        (b"a\xffb\xfe", "a\\xffb\\xfe", 2),
        (b"\x1b[31mred\x1b[0m", "red", 0),
        (b"\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link", "xlink", 0),
        (b"\x1b]0;an end that never comes", "0;an end that never comes", 0),
        (b"a\tb\x0bc", "a b c", 0),
        (b"bell\x07 back\x08 del\x7f", "bell back del", 0),
        ("c1 \x9b31mx \x85y".encode(), "c1 x  y", 0),
        ("re\u202everse\u2069 zero\ufeff".encode(), "reverse zero", 0),
        (b"over\rwrite", "overwrite", 0),
        (b"\x1b", "", 0),
    ],
)
def test_clean(data: bytes, text: str, n_bad: int) -> None:
    assert clean(data) == (text, n_bad)


@given(st.binary(max_size=60))
def test_nothing_a_terminal_obeys_survives(data: bytes) -> None:
    text, _ = clean(data)
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or 0xD800 <= ord(char) < 0xE000 for char in text)


def test_a_character_cut_by_the_cap_is_no_error() -> None:
    assert clean("aü".encode()[:2], truncated=True) == ("a", 0)
    assert clean("aü".encode()[:2]) == ("a\\xc3", 1)


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.StringIO("x")):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(ReplayError, match="no standard input"), open_stream("-"):
            pass


@pytest.mark.parametrize("make", ["folder", "missing", "forbidden"])
def test_a_source_that_cannot_be_read(make: str, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    if make == "folder":
        path.mkdir()
    if make == "forbidden":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        path.write_text("x")
        path.chmod(0)
    with pytest.raises(ReplayError, match=r"x\.log"):
        check_readable(path)


def test_a_silent_pipe_says_that_nothing_is_there(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    go_on = threading.Event()

    def write() -> None:
        with fifo.open("wb", buffering=0) as file:
            file.write(b"one\n")
            assert go_on.wait(10)
            file.write(b"two\n")

    writer = threading.Thread(target=write)
    writer.start()
    check_readable(fifo)  # does not wait for a writer
    seen: list[bytes | None] = []
    with open_stream(fifo) as stream:
        for line in read_lines(stream, "fifo", max_line_bytes=CAP):
            seen.append(line and line.data)
            if line is None:
                go_on.set()
    writer.join()
    assert seen[:2] == [b"one", None]
    assert [data for data in seen if data is not None] == [b"one", b"two"]
