"""The room for private names lists what it uses; .importlinter and ruff.toml hold the rest.

`make check` runs those: which room may import which, no circle, no private name elsewhere.
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
OWN = {"self", "cls", "super()"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
COMPAT = sorted((ROOT / "dtk/compat").glob("*.py"))


def private_attributes(source: str) -> set[str]:
    """Private attributes of other objects that a module uses; dtk's marks and its own left out."""
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            found |= {str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)}
    return {name for name in found if name.startswith("_") and not name.startswith(("__", "_dtk_"))}


@pytest.mark.parametrize("file", COMPAT, ids=lambda file: file.stem)
def test_a_file_of_private_names_lists_those_it_uses(file):
    """Breaks where an upgrade of Keras or TensorFlow is a search instead of a list."""
    listed = set(re.findall(r"\w+", ast.get_docstring(ast.parse(file.read_text()))))
    assert private_attributes(file.read_text()) <= listed


def test_the_list_is_looked_for():
    assert private_attributes("getattr(model, '_a'), iterator._b, self._c, model._dtk_d") == {
        "_a",
        "_b",
    }


def test_every_test_module_has_a_name_of_its_own():
    """Those outside packages: with two of one name pytest collects neither, in a whole run only."""
    files = [
        f for f in (ROOT / "tests").rglob("test_*.py") if not (f.parent / "__init__.py").exists()
    ]
    names = [file.stem for file in files]
    assert sorted(names) == sorted(set(names))
