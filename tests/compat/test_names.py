"""Every private name dtk uses of TensorFlow and Keras: what an upgrade removed is said plainly."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import dtk.compat
from dtk import version
from dtk.compat import names
from dtk.errors import VersionError
from dtk.strategies import start

from later import MULTI_OPTIMIZER

ROOM = Path(dtk.compat.__file__).parent
LISTED = [
    (where, name)
    for places in names.NEEDED.values()
    for where, listed in places.items()
    for name in listed.split()
]
# From some version on; what uses them looks first.
LATER = {"_weight_decay_by_var_key", "_var_to_optimizer_idx", "_epoch"}
# Keras's own, whatever has replaced it since.
FIT = inspect.unwrap(keras.Model.fit)


@pytest.mark.parametrize(("where", "name"), LISTED)
def test_is_still_there(where, name):
    lost = {missing for missing, _ in names.missing()}
    assert f"{where}.{name}" not in lost, f"{where} has lost {name}: see dtk/compat"


@pytest.mark.parametrize("file", sorted(ROOM.glob("*.py")), ids=lambda file: file.name)
def test_what_a_file_uses_is_listed(file):
    """Else its loss would end in a traceback, somewhere in the middle of training."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {
        str(arg.value)
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"getattr", "setattr", "hasattr", "delattr"}
        for arg in node.args[1:2]
        if isinstance(arg, ast.Constant)
    }
    used -= own | LATER
    private = {name for name in used if name[0] == "_" and not name.startswith(("__", "_dtk"))}
    listed = {part for _, name in LISTED for part in name.split(".")}
    assert not private - listed, "not in dtk.compat.names.NEEDED"
    places = {where for where, _ in LISTED} | {f"{where}.{name}" for where, name in LISTED}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("keras.src", "tensorflow.")
        ):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                assert any(f"{place}.".startswith(f"{full}.") for place in places), full


@pytest.mark.parametrize("file", sorted(ROOM.glob("*.py")), ids=lambda file: file.name)
def test_what_a_file_takes_of_private_modules_is_listed(file):
    """Also names without an underscore, and those that are replaced by their names in a table."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = dict(module for node in nodes for module in private_modules(node))
    used = {taken for node in nodes for taken in taken_of(node, modules)}
    listed = [f"{where}.{name}." for where, name in LISTED]
    assert not [one for one in used if not any(name.startswith(f"{one}.") for name in listed)]


def private_modules(node):
    """Names in a file, and the modules of TensorFlow and Keras that an import gives them."""
    path = getattr(node, "module", None) or ""
    if isinstance(node, ast.ImportFrom) and path.startswith(("keras.src", "tensorflow.")):
        for alias in node.names:
            if f"{path}.{alias.name}" in sys.modules:
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
    if module in modules and not name.startswith("__"):
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


@pytest.mark.parametrize("file", ["/work/keras.py", None])
def test_a_file_in_place_of_keras_is_named(monkeypatch, file):
    """It was "keras of this version", with advice to install another."""
    shadow = types.ModuleType("keras")
    shadow.__file__, shadow.__path__ = file, ["/work/keras"]
    monkeypatch.setitem(sys.modules, "keras", shadow)
    told = str(names.gone("keras.Layer.call", "a test"))
    assert told == (
        f"{file or '/work/keras'} is imported in place of keras, as it stands beside the script or "
        "in PYTHONPATH; rename it"
    )


@pytest.mark.parametrize(
    "where", ["no_such_package.part", "keras.src.no_such.part", "keras.NoSuchClass", "keras.src.*"]
)
def test_where_there_is_no_such_place_a_name_is_missing(monkeypatch, where):
    monkeypatch.setattr(names, "NEEDED", {"a test": {where: "no_such"}})
    assert names.missing() == [(f"{where}.no_such", "a test")]


def test_attributes_that_objects_are_given_are_found_without_making_any():
    class Base:
        def __init__(self):
            self._given = 1

    class Derived(Base):
        @property
        def seen(self):
            return self._looked_at

    found = set(names._mentioned(Derived))
    assert {"_given", "_looked_at"} <= found and "_other" not in found


def test_versions_that_were_not_tested_are_told_once(monkeypatch, capsys):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    start.tell_untested_versions.cache_clear()
    start.tell_untested_versions()
    start.tell_untested_versions()
    said = capsys.readouterr().err
    assert said.count("dtk: was not tested with keras 3.99.0: pip install 'keras>=") == 1
    assert "tensorflow" not in said


def test_the_take_that_embedding_layers_call():
    """Breaks when a lookup goes another way, so that workers would fetch whole tables."""
    assert "ops.take(self.embeddings" in inspect.getsource(keras.layers.Embedding.call)


def test_optimizer_attributes():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable([1.0])])
    for name in (
        "_distribution_strategy",
        "_accumulated_gradients",
        "_learning_rate",
        "_trainable_variables",
        "_trainable_variables_indices",
    ):
        assert hasattr(optimizer, name), f"keras.optimizers.Optimizer has lost {name}"


def test_muon_tells_what_it_updates_as_adamw_does():
    muon = keras.optimizers.Muon()
    assert muon._should_use_adamw(keras.Variable([1.0]))
    assert not muon._should_use_adamw(keras.Variable([[1.0]], name="kernel"))


@MULTI_OPTIMIZER
def test_multi_optimizer_attributes():
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD())
    optimizer.build([keras.Variable([1.0])])
    name = "_var_to_optimizer_idx"
    assert hasattr(optimizer, name), f"keras.optimizers.MultiOptimizer has lost {name}"


def test_variable_value():
    assert isinstance(keras.Variable([1.0])._value, tf.Variable)


def test_variable_path():
    variable = keras.Variable([1.0])
    variable._path = "layer/kernel"
    assert variable.path == "layer/kernel", "keras.Variable has lost _path"


def test_distributed_values_hold_their_components():
    from tensorflow.python.distribute.values import PerReplica

    assert PerReplica((tf.constant(1), tf.constant(2))).values[1] == 2


def test_replica_context_id():
    replica = tf.distribute.get_replica_context()
    assert hasattr(replica, "_replica_id_in_sync_group")


def test_the_early_return_dtk_relies_on():
    """Breaks when Keras asks `make_train_function` for something else than `train_function`."""
    assert "self.make_train_function()" in inspect.getsource(FIT)
    assert "self.train_function(iterator)" in inspect.getsource(FIT)


def test_where_fit_asks_what_an_epochs_steps_said():
    """Breaks when a run resumed in its validation would no longer be answered there."""
    before, _, after = inspect.getsource(FIT).partition("self.evaluate(")
    assert "self._get_metrics_result_or_logs(logs)" in before
    assert "_get_metrics_result_or_logs" not in after
