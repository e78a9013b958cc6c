"""Where tests stand; .importlinter, ruff.toml and compat/test_names.py hold dtk's own rooms."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_every_test_module_has_a_name_of_its_own():
    """Those outside packages: with two of one name pytest collects neither, in a whole run only."""
    files = [
        f for f in (ROOT / "tests").rglob("test_*.py") if not (f.parent / "__init__.py").exists()
    ]
    names = [file.stem for file in files]
    assert sorted(names) == sorted(set(names))
