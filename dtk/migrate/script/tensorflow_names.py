"""Names of `tf.distribute` in a script."""

from __future__ import annotations

import re

import libcst as cst

from dtk.migrate.replaced_names import OWN, REPLACED
from dtk.migrate.script.source import Source

_SECTION = "from-tfdistribute"
# Without arguments dtk's own names; arguments are for dtk.migrate.tf_distribute to take or refuse.
_STRATEGIES = {
    "MirroredStrategy": "dtk.auto_strategy",
    "MultiWorkerMirroredStrategy": "dtk.strategies.AllReduceStrategy",
}
# TensorFlow's recipe for workers and servers, and nothing else.
_SERVING = re.compile(
    r"if [\w.]*task_type in [(\[](.)(worker\1, \1ps|ps\1, \1worker)\1[)\]]:\s+"
    r"(\w+) = [\w.]+\.Server\((?:[^()]|\([^()]*\))*\)\s+\3\.join\(\)"
)


def rewrite(source: Source) -> None:
    """Replace strategies and resolvers; mark names that dtk has nothing for."""
    for block in source.find(cst.If):
        if _SERVING.fullmatch(source.code(block)):
            source.delete(block)
            source.note("workers and servers serve in the constructor of ParameterServerStrategy")
    for call in source.calls:
        name = _in_tensorflow(source.imported(call.func)).removeprefix("experimental.")
        if name in _STRATEGIES and not call.args:
            source.write(call.func, _STRATEGIES[name])
        elif name in OWN:
            source.write(call.func, f"dtk.migrate.tf_distribute.{name}")
    for node in [*source.find(cst.Attribute), *source.find(cst.Name)]:
        parent = next(source.parents(node), node)
        name = _in_tensorflow(source.imported(node))
        if isinstance(parent, cst.Attribute) or source.is_edited(node):
            continue
        if name in REPLACED:
            source.mark(node, f"tf.distribute.{name}: {REPLACED[name]}", _SECTION)
        elif name == "get_strategy" and isinstance(next(source.parents(parent)), cst.Assign):
            source.mark(node, "this trains on one process; dtk.auto_strategy() does not", _SECTION)
    for text in source.find(cst.SimpleString):
        if text.evaluated_value == "TF_CONFIG":
            message = "launchers tell ranks, by TF_CONFIG or not: use strategy.size and rank"
            source.mark(text, message, _SECTION)


def _in_tensorflow(name: str) -> str:
    """Return the name within `tf.distribute` of a full name; empty if it is not of it."""
    match = re.match(r"tensorflow\.(compat\.v2\.)?distribute\.(.+)", name)
    return match[2] if match else ""
