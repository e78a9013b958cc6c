"""Every private name dtk uses of TensorFlow and Keras: what an upgrade removed is said plainly."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import keras
import pytest

import dtk.compat
from dtk import version
from dtk.compat import names
from dtk.errors import VersionError
from dtk.strategies import start

ROOMS = [Path(dtk.compat.__file__).parents[1] / one for one in ("compat", "kernels", "pipelines")]
FILES = sorted(file for room in ROOMS for file in room.glob("*.py"))
LISTED = [
    (where, name)
    for places in names.NEEDED.values()
    for where, listed in places.items()
    for name in listed.split()
]
# From some version on; what uses them looks first.
LATER = {"_weight_decay_by_var_key", "_var_to_optimizer_idx", "_epoch"}


def test_every_name_is_still_there():
    assert names.missing() == [], "see dtk/compat"


def test_keras_on_another_backend_is_refused(monkeypatch):
    """Breaks as an error in the middle of the first step."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(VersionError, match="with torch.* Next: set KERAS_BACKEND=tensorflow"):
        names.check()


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_what_a_file_uses_is_listed(file):
    """Else its loss would end in a traceback, somewhere in the middle of training."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = set()
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                own.add(name)
            case ast.Attribute(_, name):
                used.add(name)
            case ast.Call(ast.Name("getattr" | "setattr" | "hasattr"), [_, ast.Constant(name), *_]):
                used.add(str(name))
    private = {name for name in used if name[0] == "_" and not name.startswith(("__", "_dtk"))}
    private -= {"_replace"}  # of named tuples
    assert not private - own - LATER - {part for _, name in LISTED for part in name.split(".")}
    # Of private modules, also names without an underscore, and those in a table of patches.
    modules = dict(module for node in nodes for module in private_modules(node))
    taken = {*modules.values(), *(one for node in nodes for one in taken_of(node, modules))}
    listed = [f"{where}.{name}." for where, name in LISTED]
    assert not [one for one in taken if not any(name.startswith(f"{one}.") for name in listed)]


def test_what_other_rooms_use_is_listed_too():
    """Few names: Keras has no public ones for an optimizer of one's own."""
    own, used = set(), set()
    for file in ROOMS[0].parent.rglob("*.py"):
        is_other = file.parent not in ROOMS
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name) | ast.Name(name, ast.Store()):
                    own.add(name)
                case ast.Attribute(_, name, ast.Store()):
                    own.add(name)
                case ast.Attribute(_, name) if is_other and name[0] == "_" != name[1]:
                    used.add(name)
    of_others = {"_asdict", "_field_defaults", "_current_frames", "_HANDLER", "_params"}
    assert not used - own - of_others - {p for _, name in LISTED for p in name.split(".")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_the_top_of_a_file_lists_its_patches(file):
    tree = ast.parse(file.read_text())
    listed = set((ast.get_docstring(tree) or "").replace(",", " ").split())
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not {name for name in made if name.startswith("patch_")} - listed


def private_modules(node):
    """Names in a file, and what of TensorFlow and Keras an import gives them."""
    path = getattr(node, "module", None) or ""
    if isinstance(node, ast.ImportFrom) and path.startswith(("keras.src", "tensorflow.")):
        for alias in node.names:
            yield alias.asname or alias.name, f"{path}.{alias.name}"


def taken_of(node, modules):
    """What is read of a module, as `module.name` or by a pair `(module, "name")`."""
    match node:
        case ast.Attribute(ast.Name(module), name):
            pass
        case ast.Tuple([ast.Name(module), ast.Constant(name)]):
            pass
        case _:
            return
    if modules.get(module) in sys.modules and not name.startswith("__"):
        yield f"{modules[module]}.{name}"


def test_a_name_that_is_gone_is_named_in_one_line(monkeypatch):
    monkeypatch.setitem(names.NEEDED, "a test", {"keras.src.losses.loss": "apply_mask no_such"})
    with pytest.raises(VersionError) as caught:
        names.check()
    assert str(caught.value) == (
        f"keras {keras.__version__} has no keras.src.losses.loss.no_such, which dtk needs for a "
        f"test; it was tested with keras {version.TESTED['keras'][0]} to below "
        f"{version.TESTED['keras'][1]}. Next: pip install '{version.requirement('keras')}'"
    )


@pytest.mark.parametrize("file", ["/work/keras.py", "/work/keras/__init__.py", None])
def test_a_file_in_place_of_keras_is_named(monkeypatch, file):
    """It was "keras of this version", with advice to install another."""
    shadow = types.ModuleType("keras")
    shadow.__file__, shadow.__path__ = file, ["/work/keras"]
    monkeypatch.setitem(sys.modules, "keras", shadow)
    at = "/work/keras.py" if file == "/work/keras.py" else "/work/keras"
    with pytest.raises(VersionError) as caught:
        names.check()
    for told in (caught.value, names.gone("keras.Layer.call", "a test")):
        assert str(told) == (
            f"{at} is imported in place of keras, as it stands beside the script or in "
            "PYTHONPATH; rename it"
        )


@pytest.mark.parametrize(
    "where", ["no_such_package.part", "keras.src.no_such.part", "keras.NoSuchClass", "keras.src.*"]
)
def test_where_there_is_no_such_place_a_name_is_missing(monkeypatch, where):
    monkeypatch.setattr(names, "NEEDED", {"a test": {where: "no_such"}})
    assert names.missing() == [(f"{where}.no_such", "a test")]


def test_versions_that_were_not_tested_are_told_once(monkeypatch, capsys):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    start.tell_untested_versions.cache_clear()
    start.tell_untested_versions()
    start.tell_untested_versions()
    said = capsys.readouterr().err
    assert said.count("dtk: was not tested with keras 3.99.0: pip install 'keras>=") == 1
    assert "tensorflow" not in said
