"""An import may only point down: reads every import of the package, those inside functions too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Room -> rooms it may import. Every other room may import config, report and errors.
PLAIN = {"config", "report", "errors"}
BELOW_AGENT = {
    "batching", "counts", "engine", "machine", "memory", "models", "queues", "speculation", "stores", "streaming",
}  # fmt: skip
AGENT = {
    "agent", "conversation", "exchange", "model_summarizer", "privacy", "residents", "rounds", "session", "swap",
    "template", "tools", "watch",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "report": {"errors"},
    "privacy": set(),
    "kernels": set(),
    "stores": set(),
    "models": {"kernels"},
    "streaming": {"kernels", "models"},
    "engine": {"counts", "machine", "streaming", "kernels", "models"},
    "batching": {"engine", "streaming"},
    "counts": set(),
    "machine": set(),
    "queues": set(),
    "speculation": {"batching", "streaming"},
    "memory": {"stores", "models"},
    # The agent and its parts.
    "swap": {"machine", "memory", "streaming"},
    "tools": {"streaming"},
    "template": {"models", "tools"},
    "exchange": BELOW_AGENT | {"privacy"},
    "model_summarizer": BELOW_AGENT | {"template"},
    "conversation": BELOW_AGENT | {"exchange", "swap", "template", "tools"},
    "residents": BELOW_AGENT | {"swap", "template", "tools", "conversation"},
    "session": BELOW_AGENT | {"exchange", "tools", "conversation", "agent"},  # a session is a handle on its agent
    "rounds": BELOW_AGENT | {"exchange", "privacy", "tools", "conversation", "session"},
    "watch": BELOW_AGENT | {"swap", "residents"},
    "agent": BELOW_AGENT | AGENT,
    # The front doors.
    "replay": BELOW_AGENT | AGENT,
    "demo": BELOW_AGENT | AGENT,
    "bots": {"agent", "session"},
    "serving": BELOW_AGENT | AGENT | {"bots", "replay"},
    "cli": BELOW_AGENT | AGENT | {"bots", "replay", "demo", "serving"},
    "__init__": {"agent", "session", "tools", "replay"},
}
STANDARD_ONLY = (
    "memstream/config.py", "memstream/errors.py", "memstream/report.py", "memstream/queues.py",
    "memstream/streaming/draft.py", "memstream/streaming/layout.py",
)  # fmt: skip
# Room -> outside packages it must not import.
FORBIDDEN = {
    "stores": {"torch", "transformers", "sentence_transformers", "safetensors"},
    "kernels": {"sqlalchemy", "transformers", "sentence_transformers", "faiss"},
    "streaming": {"sqlalchemy", "faiss", "sentence_transformers"},
    "engine": {"sqlalchemy", "faiss", "sentence_transformers"},
    "models": {"sqlalchemy", "faiss", "sentence_transformers"},
}


def sources() -> list[Path]:
    """Every source file, under the name it is imported by."""
    folders = [ROOT / "memstream", ROOT / "memstream" / "kernels", ROOT / "memstream" / "stores"]
    found = {path for folder in folders for path in folder.rglob("*.py")}
    return sorted(found)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module a file imports, wherever the statement stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            yield node.lineno, base
            if base == "memstream" or base.endswith((".kernels", ".stores")):
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(path: Path) -> list[str]:
    room = room_of(module_of(path))
    where = path.relative_to(ROOT)
    if room not in ALLOWED:
        return [f"{where}: the room {room!r} has no place in the layers; give it one in this test"]
    found = []
    for line, name in imported(path):
        top = name.split(".")[0]
        if top == "memstream":
            target = room_of(name)
            fine = target == room or target in ALLOWED[room] or (target in PLAIN and room not in PLAIN)
            if not fine and target != "__init__" and target != "__version__":
                found.append(f"{where}:{line} imports {name}: {room} may not know {target}")
        elif top in {"kernels", "stores", "recipes"}:
            found.append(f"{where}:{line} imports {name}: the name is memstream.{name}")
        elif top in FORBIDDEN.get(room, set()):
            found.append(f"{where}:{line} imports {name}, which {room} must not need")
        elif where.as_posix() in STANDARD_ONLY and top not in sys.stdlib_module_names:
            found.append(f"{where}:{line} imports {name}: only the standard library may be used here")
    return found


def test_imports_point_down() -> None:
    found = [problem for path in sources() for problem in violations(path)]
    assert not found, "\n".join(found)


def test_every_room_is_read() -> None:
    rooms = {room_of(module_of(path)) for path in sources()}
    assert {"streaming", "models", "cli", "kernels", "stores", "config", "errors", "report"} <= rooms


def test_standard_library_only_files_exist() -> None:
    assert [name for name in STANDARD_ONLY if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("memstream/stores/x.py", "def f():\n    import torch"),
        ("memstream/kernels/x/reference.py", "from memstream.stores.base import Scope"),
        ("memstream/memory/x.py", "from memstream.streaming.layout import Layout"),
        ("memstream/streaming/x.py", "from ..memory import Memory"),
        ("memstream/engine.py", "import memstream.agent"),
        ("memstream/models/x.py", "from memstream import agent"),
        ("memstream/report.py", "import numpy"),
        ("memstream/streaming/layout.py", "import torch"),
        ("memstream/errors.py", "from memstream.config import CacheConfig"),
        ("memstream/agent.py", "import kernels.rebase"),
        ("memstream/telepathy/x.py", ""),
    ],
)
def test_a_wrong_import_is_found(file: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(violations(path)) == 1
