"""``memstream doctor`` tells what is wrong, and exits 1 when something is."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
import transformers

from memstream import cli
from memstream.kernels.native import why_no_native
from memstream.models import list_models


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    status = cli.run(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return status, found


@pytest.fixture
def models_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips reading every byte of the models, which takes seconds."""
    monkeypatch.setattr("memstream.cli.doctor.check_model", lambda alias: [])


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    status, found = doctor(capsys)
    assert (status, found["problems"]) == (0, [])
    packages = found["packages"]
    assert isinstance(packages, dict)
    assert packages["torch"] == torch.__version__
    assert packages["transformers"] == transformers.__version__
    assert packages["sqlite"] == sqlite3.sqlite_version
    assert found["cpu_threads"] == torch.get_num_threads()
    missing = why_no_native()
    assert found["kernels"] == {
        "active": "torch" if missing else "native",
        "why": missing or "compiled for this processor; models with packed weights run on it",
    }
    assert found["home"] == str(home)
    assert found["store"] == {"path": str(home / "memstream.db"), "exists": False, "health": None}


@pytest.mark.usefixtures("models_are_good")
def test_people_get_the_same_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "kernels      native (compiled for this processor" in captured.out or why_no_native()
    assert "smollm2-135m: installed, checksums good" in captured.out
    assert captured.err.endswith("no problems found\n")


@pytest.mark.usefixtures("models_are_good")
@pytest.mark.parametrize(
    ("value", "said"),
    [("triton", "on the CPU Triton runs only in its"), ("fast", "allowed: 'auto', 'torch', 'native', 'triton'")],
)
def test_a_kernel_path_that_is_not_there(
    value: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTREAM_KERNELS", value)
    monkeypatch.setattr("memstream.kernels.dispatch._interpreting", lambda: False)
    status, found = doctor(capsys)
    assert status == 1
    assert found["kernels"] is None
    assert said in str(found["problems"])


def test_a_damaged_conversion(capsys: pytest.CaptureFixture[str], home: Path, smollm2: object) -> None:
    (status,) = (s for s in list_models() if s.alias == "smollm2-135m")
    assert status.folder is not None
    copy = home / "own"
    shutil.copytree(status.folder, copy / Path(status.folder).name, ignore=shutil.ignore_patterns("model.safetensors"))
    (home / "models").unlink()
    copy.rename(home / "models")
    code, found = doctor(capsys)
    assert code == 1
    problems = found["problems"]
    assert isinstance(problems, list)
    (problem,) = problems
    assert "model.safetensors is missing; delete" in problem


@pytest.mark.usefixtures("models_are_good")
def test_a_file_that_is_no_store(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "memstream.db").write_bytes(b"not a database at all" * 100)
    status, found = doctor(capsys)
    assert status == 1
    assert found["store"] == {"path": str(home / "memstream.db"), "exists": True, "health": "damaged"}


@pytest.mark.usefixtures("models_are_good")
def test_a_healthy_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from memstream.stores.sql import SqlStore

    SqlStore.open(tmp_path / "own.db").close()
    status, found = doctor(capsys, "--store", str(tmp_path / "own.db"))
    assert (status, found["problems"]) == (0, [])
    assert found["store"] == {"path": str(tmp_path / "own.db"), "exists": True, "health": "good"}


@pytest.mark.usefixtures("models_are_good")
@pytest.mark.parametrize(
    ("config", "note"),
    [
        (transformers.LlamaConfig(), None),
        (transformers.MistralConfig(sliding_window=300), "every layer sees only the last 300 positions"),
        (transformers.MistralConfig(sliding_window=None), None),
        (transformers.Gemma3TextConfig(num_hidden_layers=6), "5 of 6 layers see only the last 4096 positions"),
    ],
)
def test_a_model_that_can_be_streamed(
    config: transformers.PreTrainedConfig, note: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    status, found = doctor(capsys, "--model", str(tmp_path))
    streaming = found["streaming"]
    assert isinstance(streaming, dict)
    assert (status, streaming["type"], streaming["supported"]) == (0, config.model_type, True)
    assert streaming["note"] is None if note is None else streaming["note"].startswith(note)


@pytest.mark.usefixtures("models_are_good")
def test_a_model_that_cannot_be_streamed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers.GPT2Config().save_pretrained(tmp_path)
    status, found = doctor(capsys, "--model", str(tmp_path))
    assert status == 1
    assert "gpt2 cannot be streamed: it adds a learned position" in str(found["problems"])
