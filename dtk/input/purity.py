"""Check whether a function's result for a row depends on that row only; hash its constants.

A `tf.data` function is a graph. It is pure if it holds no resource, and if no op in it, or in a
function that it calls, is registered as stateful. TensorFlow's random ops, variables, tables and
Python functions are stateful; reading a file is not, here as in TensorFlow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

# Ops registered as stateful only because a function they call may be; and Assert, which only fails.
_CALLS = frozenset({"Assert", "Case", "If", "StatefulPartitionedCall", "While"})
# A Python function that a script declares stateless; dtk does not rely on that.
_PYTHON = "PyFuncStateless"


def why_not_pure(
    function: tf.types.experimental.ConcreteFunction, is_stateful: Callable[[str], bool | None]
) -> str | None:
    """Return why a function may give different results for the same row; None if it is pure."""
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
            return f"calls {node.op}, which may return another result each time"
        called = {value.func.name for value in node.attr.values() if value.HasField("func")}
        called.update(func.name for value in node.attr.values() for func in value.list.func)
        if not called <= known:
            return "calls a function that dtk cannot inspect"
    return None


def salt_of(functions: Sequence[tf.types.experimental.ConcreteFunction]) -> int:
    """Hash the numbers that functions hold, to find ranks with different numbers.

    Strings are left out: each rank may have its files in another folder.
    """
    salt = hashlib.blake2b(digest_size=8)
    for function in functions:
        graph = function.graph.as_graph_def()
        # Called functions are in the order of their names, which may differ by rank: sort by hash.
        inner = sorted(_numbers_of(one.node_def) for one in graph.library.function)
        salt.update(b"".join([_numbers_of(graph.node), *inner]))
        for tensor in function.captured_inputs:
            if tensor.dtype != tf.string:
                salt.update(tf.io.serialize_tensor(tensor).numpy())
    return int.from_bytes(salt.digest(), "big", signed=True)


def _numbers_of(nodes: Iterable[tf.compat.v1.NodeDef]) -> bytes:
    """Hash the constants of a graph that are not strings."""
    found = hashlib.blake2b(digest_size=8)
    for node in nodes:
        value = node.attr["value"].tensor
        if node.op == "Const" and value.dtype != tf.string.as_datatype_enum:
            found.update(value.SerializeToString(deterministic=True))
    return found.digest()
