"""The folder a conversion is kept in: whole or not at all. The conversion itself is a stand-in here."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from memstream.errors import ModelError, ModelNotFoundError
from memstream.models import convert
from memstream.models.wheels import GgufSource

WEIGHTS = b"weights" * 1000


@pytest.fixture
def source(tmp_path: Path) -> GgufSource:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF tiny")
    return GgufSource(name="tiny", parts=(file,), sha256=hashlib.sha256(b"GGUF tiny").hexdigest(), n_bytes=9)


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Counts conversions; each writes two files."""
    monkeypatch.setenv("MEMSTREAM_HOME", str(tmp_path / "home"))
    done: list[Path] = []

    def run(source: GgufSource, file: Path, built: Path) -> None:
        done.append(file)
        (built / "model.safetensors").write_bytes(WEIGHTS)
        (built / "config.json").write_text("{}")

    monkeypatch.setattr(convert, "_run_conversion", run)
    return done


def test_a_model_is_converted_once(source: GgufSource, conversions: list[Path]) -> None:
    folder = convert.ensure_converted(source)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert convert.ensure_converted(source) == folder
    assert len(conversions) == 1
    assert convert.check_folder(folder, full=True) == []
    assert [p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")] == [folder.name]


def test_the_manifest_lists_every_file(source: GgufSource, conversions: list[Path]) -> None:
    folder = convert.ensure_converted(source)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files.keys() == {"model.safetensors", "config.json"}
    assert files["model.safetensors"]["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert files["model.safetensors"]["bytes"] == 7000


def damage_short(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])


def damage_one_byte(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"X" + WEIGHTS[1:])


def damage_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "fi')


def damage_old_format(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 0, "files": {}}')


@pytest.mark.parametrize("damage", [damage_short, damage_one_byte, damage_missing, damage_manifest, damage_old_format])
def test_a_damaged_conversion_is_built_again(
    damage: object, source: GgufSource, conversions: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = convert.ensure_converted(source)
    assert callable(damage)
    damage(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert convert.check_folder(folder) != []
    assert convert.ensure_converted(source) == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert convert.check_folder(folder, full=True) == []
    assert "converting it again" in caplog.text


def test_only_a_full_check_reads_bytes_whose_time_and_size_are_kept(
    source: GgufSource, conversions: list[Path]
) -> None:
    folder = convert.ensure_converted(source)
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    damage_one_byte(folder)
    os.utime(weights, ns=(before, before))
    assert convert.check_folder(folder) == []
    assert convert.check_folder(folder, full=True) == [f"{weights} has another checksum than when it was written"]


def test_new_times_on_whole_files_are_read_once(source: GgufSource, conversions: list[Path]) -> None:
    folder = convert.ensure_converted(source)
    later = time.time_ns() + 10**9
    os.utime(folder / "model.safetensors", ns=(later, later))
    assert convert.ensure_converted(source) == folder
    assert len(conversions) == 1
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files["model.safetensors"]["mtime_ns"] == later


def test_what_a_killed_process_left_is_cleared(source: GgufSource, conversions: list[Path]) -> None:
    folder = convert.converted_folder(source)
    stale = folder.parent / f".{folder.name}.tmp-abc"
    (stale / "built").mkdir(parents=True)
    (stale / "built" / "model.safetensors").write_bytes(b"half")
    convert.ensure_converted(source)
    assert not stale.exists()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_failed_conversion_leaves_nothing(
    source: GgufSource, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: GgufSource, file: Path, built: Path) -> None:
        (built / "model.safetensors").write_bytes(b"half")
        raise ModelNotFoundError("damaged")

    monkeypatch.setattr(convert, "_run_conversion", fail)
    with pytest.raises(ModelNotFoundError):
        convert.ensure_converted(source)
    folder = convert.converted_folder(source)
    assert [p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")] == []


def test_a_source_changed_since_it_was_installed_is_refused(source: GgufSource, conversions: list[Path]) -> None:
    source.parts[0].write_bytes(b"GGUF tinx")
    with pytest.raises(ModelNotFoundError, match="'tiny' is damaged"):
        convert.ensure_converted(source)
    assert conversions == []


def test_a_full_disk_is_told(source: GgufSource, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: GgufSource, file: Path, built: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "_run_conversion", fail)
    with pytest.raises(ModelError, match=r"No space left on device; free some space there, or set MEMSTREAM_HOME"):
        convert.ensure_converted(source)


def test_a_home_that_is_a_file_is_told(
    source: GgufSource, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMSTREAM_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set MEMSTREAM_HOME to another folder"):
        convert.ensure_converted(source)
