"""Whether what a function makes of a row depends on that row alone; and a hash of what it holds.

A function of `tf.data` is a graph. It is pure if no op of it, nor of any function that it calls, is
registered as stateful, as TensorFlow's random ops, variables, tables and Python functions are; and
if it holds no resource. Reading a file is no state to TensorFlow, nor here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

# Ops registered as stateful since a function that they call may be; and one that can only fail.
_CALLS = frozenset({"Assert", "Case", "If", "StatefulPartitionedCall", "While"})
# Python's, though a script has said that it has no state.
_PYTHON = "PyFuncStateless"


def why_not_pure(
    function: tf.types.experimental.ConcreteFunction, is_stateful: Callable[[str], bool | None]
) -> str | None:
    """Return why a function may make something else of the same row."""
    held = function.captured_inputs
    if any(one.dtype in (tf.resource, tf.variant) for one in held):
        return "holds a variable, a table or another resource"
    if any(tf.get_static_value(one) is None for one in held):
        return "holds a tensor of a graph"
    graph = function.graph.as_graph_def()
    inner = graph.library.function
    known = {one.signature.name for one in inner}
    for node in [*graph.node, *(node for one in inner for node in one.node_def)]:
        stateful = is_stateful(node.op)
        if stateful is None or node.op == _PYTHON or (stateful and node.op not in _CALLS):
            return f"calls {node.op}, which may give something else each time"
        called = {value.func.name for value in node.attr.values() if value.HasField("func")}
        called.update(func.name for value in node.attr.values() for func in value.list.func)
        if not called <= known:
            return "calls a function that cannot be looked into"
    return None


def salt_of(functions: Sequence[tf.types.experimental.ConcreteFunction]) -> int:
    """Hash the numbers that functions hold, which differ where ranks have read different ones.

    Strings are left out: each rank may have its files in a folder of another name.
    """
    salt = hashlib.blake2b(digest_size=8)
    for function in functions:
        graph = function.graph.as_graph_def()
        # What is called has names that may differ by rank, and comes in the order of its names.
        inner = sorted(_numbers_of(one.node_def) for one in graph.library.function)
        salt.update(b"".join([_numbers_of(graph.node), *inner]))
        for tensor in function.captured_inputs:
            if tensor.dtype != tf.string:
                salt.update(tf.io.serialize_tensor(tensor).numpy())
    return int.from_bytes(salt.digest(), "big", signed=True)


def _numbers_of(nodes: Iterable[tf.compat.v1.NodeDef]) -> bytes:
    """Hash the constants of a graph that are no strings."""
    found = hashlib.blake2b(digest_size=8)
    for node in nodes:
        value = node.attr["value"].tensor
        if node.op == "Const" and value.dtype != tf.string.as_datatype_enum:
            found.update(value.SerializeToString(deterministic=True))
    return found.digest()
