"""Loads what lies in a clone with its text changed, and nothing of it twice."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

Ported = Callable[[str, str], str]


def install(folder: Path, ported: Ported) -> None:
    """Pass Python files of a folder through `ported(text, path)` when they are imported."""
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _Finder(folder, ported))


def loader(name: str, file: Path, ported: Ported) -> SourceFileLoader:
    """Return what loads a file with its text changed."""
    return _Loader(name, str(file), ported)


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path, ported: Ported) -> None:
        self.folder, self.ported = folder, ported

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for place in sys.path if path is None else path:
            file = Path(place, f"{name.rpartition('.')[2]}.py")
            if self.folder in file.parents and file.exists():
                made = loader(name, file, self.ported)
                return importlib.util.spec_from_file_location(name, file, loader=made)
        return None


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, ported: Ported) -> None:
        super().__init__(name, path)
        self.ported = ported

    def path_stats(self, path: str) -> dict:
        raise OSError("no compiled file is looked for")

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> object:
        return super().source_to_code(self.ported(data.decode(), path), path, _optimize=_optimize)
