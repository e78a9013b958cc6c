"""Imports only point down, never in a circle, and private names stay in their two files."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator, Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# from the top down; names on one line may not import each other
LAYERS = (
    {"cli"},
    {"tuning", "launch"},
    {"callbacks", "data"},
    {"strategies"},
    {"exchange"},
    {"communicators"},
    {"cluster", "optimizers", "schedules"},
    {"cache", "compat", "errors", "garbage", "importing", "quiet", "version"},
)
# launch starts processes: it needs to know where, and nothing of what they will do; optimizers and
# schedules are Keras's, and work without a strategy
ONLY = {
    "launch": {"cluster", "errors", "quiet", "version"},
    "optimizers": {"errors"},
    "schedules": {"errors"},
}

# who may use what is private: package -> (its private parts, the one file)
SEAMS = {
    "tensorflow": ("python", "dtk.strategies.extended"),
    "keras": ("src", "dtk.strategies.adopt"),
}
# and the room that both are to move to
ROOM = "dtk.compat."
PUBLIC_DUNDERS = {"__version__", "__enter__"}
# what of its own a method uses; how an attribute is used by its name
OWN = {"self", "cls", "super()"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def modules(root: pathlib.Path = ROOT) -> dict[str, str]:
    """Every module under dtk/, as name -> source."""
    found = {}
    for file in sorted((root / "dtk").rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = file.read_text()
    return found


def imports(name: str, source: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import, also those inside functions."""
    packages = {module.rpartition(".")[0] for module in known}
    own_package = name if name in packages else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = own_package.split(".")[: len(own_package.split(".")) - node.level + 1]
                base = ".".join([*up, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in known or not base.startswith("dtk")
                yield node.lineno, full if is_module else base


def layer(module: str) -> str:
    """The name below dtk that a module belongs to; "" for dtk itself."""
    return (module.split(".") + [""])[1]


def height(name: str) -> int:
    """How far above the bottom; dtk itself is on top."""
    if not name:
        return len(LAYERS)
    for depth, names in enumerate(LAYERS):
        if name in names:
            return len(LAYERS) - 1 - depth
    raise AssertionError(f"dtk.{name} has no place in LAYERS: give it one, here and in the design")


def upward(name: str, source: str, known: Mapping[str, str]) -> list[str]:
    """Imports of one module that do not point down."""
    own, wrong = layer(name), []
    for line, target in imports(name, source, known):
        if target.split(".")[0] != "dtk":
            continue
        to = layer(target)
        inside = to == own
        below = to in ONLY[own] if own in ONLY else height(to) < height(own)
        if not inside and not below:
            wrong.append(f"{name}:{line} imports {target}: dtk.{own} may not import dtk.{to}")
    return wrong


def circle(known: Mapping[str, str]) -> list[str]:
    """One circle of imports, as the modules along it; [] when there is none."""
    graph = {
        name: sorted({to for _, to in imports(name, source, known) if to in known})
        for name, source in known.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for to in graph[name]:
            if found := visit(to, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in graph)), [])


def path_of(node: ast.AST) -> str:
    """`tf.function(step).name` -> "tf.function.name": what is called with is no part of it."""
    if isinstance(node, ast.Attribute):
        return f"{path_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return path_of(node.func)
    if isinstance(node, ast.Subscript):
        return path_of(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(name: str, source: str, known: Mapping[str, str]) -> list[str]:
    """Uses of TensorFlow's and Keras's private names outside the file that may."""
    wrong = []

    def look(line: int, dotted: str) -> None:
        package, *rest = dotted.split(".")
        if package not in SEAMS:
            return
        private, seam = SEAMS[package]
        hidden = rest[:1] == [private] or any(
            part.startswith("_") and part not in PUBLIC_DUNDERS for part in rest
        )
        if hidden and name != seam and not name.startswith(ROOM):
            wrong.append(f"{name}:{line} uses {dotted}; only {seam} may")

    aliases = {"tf": "tensorflow", "tensorflow": "tensorflow", "keras": "keras"}
    for line, target in imports(name, source, known):
        look(line, target)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            dotted = path_of(node)
            root = dotted.partition(".")[0]
            if root in aliases:
                look(node.lineno, aliases[root] + dotted[len(root) :])
    return wrong


def private_attributes(source: str) -> dict[str, int]:
    """Private attributes of other objects that a module uses, name -> line; dtk's marks left out.

    What a method uses of `self` is taken to be its own.
    """
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
            found[node.attr] = node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            # getattr(model, "_name")
            found |= {a.value: a.lineno for a in node.args[1:2] if isinstance(a, ast.Constant)}
    return {
        name: line
        for name, line in found.items()
        if str(name).startswith("_") and not name.startswith(("__", "_dtk_"))
    }


def attributes_of_keras(name: str, source: str, known: Mapping[str, str]) -> list[str]:
    """Uses of the private attributes of Keras's objects outside the file that may."""
    seam = SEAMS["keras"][1]
    if name in {seam for _, seam in SEAMS.values()} or name.startswith(ROOM):
        return []
    used = private_attributes(source)
    hidden = set(private_attributes(known[seam])) & set(used)
    return [
        f"{name}:{used[attribute]} uses {attribute}; only {seam} may"
        for attribute in sorted(hidden)
    ]


KNOWN = modules()


@pytest.mark.parametrize("name", KNOWN)
def test_imports_point_down(name):
    assert not upward(name, KNOWN[name], KNOWN)


def test_no_circle():
    assert not circle(KNOWN), " -> ".join(circle(KNOWN))


@pytest.mark.parametrize("name", KNOWN)
def test_private_names_stay_in_the_seams(name):
    assert not private_uses(name, KNOWN[name], KNOWN)
    assert not attributes_of_keras(name, KNOWN[name], KNOWN)


def test_the_seam_with_keras_lists_what_it_uses():
    source = KNOWN[SEAMS["keras"][1]]
    listed = set(re.findall(r"\w+", ast.get_docstring(ast.parse(source))))
    assert set(private_attributes(source)) <= listed


@pytest.mark.parametrize(
    "source",
    [
        "import dtk.strategies",
        "from dtk.strategies import allreduce",
        "from dtk import strategies",
        "def late():\n    from dtk.strategies.allreduce import AllReduceStrategy",
        "from ..strategies import allreduce",
    ],
)
def test_the_checker_catches_an_upward_import(source):
    known = {"dtk.strategies": "", "dtk.strategies.allreduce": "", "dtk.cluster.mpi": source}
    assert len(upward("dtk.cluster.mpi", source, known)) == 1
    assert not upward("dtk.cli.run", source.replace("..s", "dtk.s"), known)


def test_the_checker_keeps_launch_to_cluster():
    source = "from dtk import cluster, errors\nimport dtk.communicators"
    known = {"dtk.cluster": "", "dtk.errors": "", "dtk.communicators": ""}
    assert [text.split(" imports ")[0] for text in upward("dtk.launch.plan", source, known)] == [
        "dtk.launch.plan:2"
    ]


def test_the_checker_keeps_optimizers_and_schedules_to_keras():
    known = {"dtk.errors": "", "dtk.quiet": "", "dtk.schedules": "", "dtk.optimizers": ""}
    for own in ("optimizers", "schedules"):
        source = "from dtk import errors\nfrom dtk import quiet, schedules, optimizers"
        assert len(upward(f"dtk.{own}.a", source, known)) == 2
    source = "from dtk import schedules, optimizers"
    assert not upward("dtk.callbacks.a", source, known)


def test_the_checker_keeps_siblings_apart():
    assert upward("dtk.callbacks.a", "import dtk.data", {"dtk.data": ""})
    assert not upward("dtk.callbacks.a", "import dtk.callbacks.b", {"dtk.callbacks.b": ""})


def test_the_checker_catches_a_circle():
    known = {
        "dtk.data": "",
        "dtk.data.a": "from dtk.data import b",
        "dtk.data.b": "from dtk.data.c import thing",
        "dtk.data.c": "def late():\n    from . import a",
    }
    assert circle(known) == ["dtk.data.a", "dtk.data.b", "dtk.data.c", "dtk.data.a"]
    assert not circle({**known, "dtk.data.c": ""})


@pytest.mark.parametrize(
    "source",
    [
        "from tensorflow.python.distribute import values",
        "from tensorflow import python",
        "import tensorflow as tf\ntf.__internal__.tracking",
        "import keras.src.trainers",
        "from keras import src",
        "import keras\nkeras.src.backend",
        "import keras\nkeras.Sequential(layers)._layers",
    ],
)
def test_the_checker_catches_private_names(source):
    assert private_uses("dtk.data.shard", source, {})


def test_the_checker_knows_the_seams():
    assert not private_uses("dtk.strategies.extended", "import tensorflow.python.eager", {})
    assert not private_uses("dtk.strategies.adopt", "import keras.src", {})
    assert private_uses("dtk.strategies.adopt", "import tensorflow.python.eager", {})
    assert not private_uses("dtk.data.shard", "import tensorflow as tf\ntf.__version__", {})
    own = "import tensorflow as tf\ntf.function(self._step).get_concrete_function()"
    assert not private_uses("dtk.data.shard", own, {})


@pytest.mark.parametrize(
    "source", ["model._compile_loss", "iterator._steps_seen = 3", "getattr(model, '_compile_loss')"]
)
def test_the_checker_catches_private_attributes(source):
    assert attributes_of_keras("dtk.data.shard", source, KNOWN)
    assert not attributes_of_keras("dtk.strategies.adopt", source, KNOWN)
    assert not attributes_of_keras("dtk.data.shard", "self._compile_loss, model._dtk_mark", KNOWN)


def test_every_test_module_has_a_name_of_its_own():
    """Those outside packages: with two of one name pytest collects neither, in a whole run only."""
    files = [
        f for f in (ROOT / "tests").rglob("test_*.py") if not (f.parent / "__init__.py").exists()
    ]
    names = [file.stem for file in files]
    assert sorted(names) == sorted(set(names))
