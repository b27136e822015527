"""What is installed: a wheel built from the tree holds the linked folders, and imports without the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memstream

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "triton", "faiss", "sqlalchemy", "sentence_transformers", "numpy")


@pytest.mark.parametrize("name", ["kernels", "stores"])
def test_the_links_resolve(name: str) -> None:
    link = ROOT / "memstream" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    assert any(link.rglob("*.py"))


@pytest.mark.parametrize("name", ["kernels", "stores", "recipes"])
def test_top_level_folders_are_no_packages(name: str) -> None:
    """With an __init__.py, transformers would import ours in place of the PyPI package ``kernels``."""
    assert not (ROOT / name / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what is committed; setuptools leaves its build folder there."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("memstream", "kernels", "stores"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (built,) = (folder / "out").glob("*.whl")
    return built


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    rooms = [path.name for path in (ROOT / "memstream").iterdir() if path.is_dir() and path.name != "__pycache__"]
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "memstream").glob("*.py")}
    for room in rooms:
        folder = (ROOT / "memstream" / room).resolve()
        expected |= {f"memstream/{room}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
    assert packed == expected
    assert "memstream/kernels/segment_attention/reference.py" in packed
    assert "memstream/stores/sql.py" in packed


def test_the_wheel_imports_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import memstream.stores.base, memstream.kernels.ring_write, memstream.models, memstream.cli\n"
        "print(memstream.stores.base.__file__, memstream.kernels.ring_write.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in done.stdout.split())


def test_importing_memstream_and_its_help_are_light() -> None:
    code = (
        "import contextlib, io, sys, memstream, memstream.cli\n"
        "memstream.CacheConfig, memstream.MemstreamError, memstream.Reply\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    memstream.cli.run(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    assert memstream.__all__ == sorted(memstream.__all__)
    assert len(set(memstream.__all__)) == len(memstream.__all__)
    for name in memstream.__all__:
        assert getattr(memstream, name) is not None
    assert dir(memstream) == memstream.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = memstream.nonsense  # type: ignore[attr-defined]


def test_every_error_is_public() -> None:
    from memstream import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(memstream.__all__)
