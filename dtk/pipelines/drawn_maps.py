"""Split the function of a map in two: one makes its draws, the other is pure.

A function that draws random numbers, or reads a variable, gives other results for the same row. Its
graph is split where the draws end:

    row  ->  decode, draw, flip                          a rank decodes every row
    row  ->  row, draw  ->  own rows  ->  decode, flip   a rank draws for every row

The draws are made for all rows in their order, by the same operations with the same seeds, so they
are the draws of one process. What a draw needs must not depend on the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

ConcreteFunction: TypeAlias = "tf.types.experimental.ConcreteFunction"
_Node: TypeAlias = "tf.compat.v1.NodeDef"

# Ops registered as stateful only because a function they call may be; and Assert, which only fails.
_CALLS = frozenset({"Assert", "Case", "If", "StatefulPartitionedCall", "While"})
# A Python function that a script declares stateless; dtk does not rely on that.
_PYTHON = "PyFuncStateless"
# Numbers that a row may carry from one half to the other: noise for an image, not an embedding.
_MOST_NUMBERS = 2**18


class Halves(NamedTuple):
    """A function in two halves, for the graph that is being traced."""

    draw: Callable[[], tuple[tf.Tensor, ...]]  # makes the draws for one row
    rest: Callable[[Sequence[tf.Tensor], tuple[tf.Tensor, ...]], list[tf.Tensor]]


def impure_nodes(
    function: ConcreteFunction, is_stateful: Callable[[str], bool | None]
) -> dict[str, str]:
    """Return the operations of a function that may give other results for the same row, and why."""
    graph = function.graph.as_graph_def()
    bodies = {one.signature.name: one.node_def for one in graph.library.function}
    names = [tensor.op.name for tensor in function.graph.inputs]
    held = dict(zip(reversed(names), reversed(function.captured_inputs), strict=False))

    def why(node: _Node) -> str | None:
        inputs = [held[name] for name in map(_name, node.input) if name in held]
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in inputs):
            return "holds a variable, a table or another resource"
        return why_op(node)

    def why_op(node: _Node) -> str | None:
        stateful = is_stateful(node.op)
        if stateful is None or node.op == _PYTHON or (stateful and node.op not in _CALLS):
            return f"calls {node.op}, which may return another result each time"
        called = [value.func.name for value in node.attr.values() if value.HasField("func")]
        called += [func.name for value in node.attr.values() for func in value.list.func]
        if not bodies.keys() >= set(called):
            return "calls a function that dtk cannot inspect"
        return next(filter(None, (why_op(one) for name in called for one in bodies[name])), None)

    of_inputs = {
        name: "holds a tensor of a graph"
        for name, tensor in held.items()
        if tensor.dtype not in (tf.resource, tf.variant) and tf.get_static_value(tensor) is None
    }
    of_nodes = {node.name: why(node) for node in graph.node if node.op != "Placeholder"}
    return of_inputs | {name: reason for name, reason in of_nodes.items() if reason is not None}


def split(function: ConcreteFunction, impure: Mapping[str, str]) -> Halves | str:
    """Split a function with the given impure operations; or return why it cannot be split."""
    graph = function.graph.as_graph_def()
    nodes = {node.name: node for node in graph.node}
    inputs = [tensor.op.name for tensor in function.graph.inputs]
    rows = inputs[: len(inputs) - len(function.captured_inputs)]
    outputs = [tensor.name for tensor in function.graph.outputs]
    why = next(iter(impure.values()))
    if not impure.keys().isdisjoint(inputs):
        return why
    needed = _ancestors(nodes, impure, stop=())
    if not needed.isdisjoint(rows):
        return f"{why}, and depends on the row, or stands in a branch, a loop or a tf.function"
    drawn = set(impure)
    for node in graph.node:  # in the order in which they were made
        if node.name in needed and any(_name(one) in drawn for one in _data(node)):
            drawn.add(node.name)
    ends = [node.name for node in graph.node if node.op in _CALLS and node.name not in needed]
    rest = _ancestors(nodes, [*map(_name, outputs), *ends], stop=drawn) - drawn
    used = [*outputs, *(one for name in rest for one in _data(nodes[name]))]
    draws = sorted({_tensor(one) for one in used if _name(one) in drawn})
    specs = [function.graph.get_tensor_by_name(name) for name in draws]
    if not all(spec.shape.is_fully_defined() for spec in specs) or any(
        spec.dtype in (tf.resource, tf.variant) for spec in specs
    ):
        return f"{why}, and a number of results that is not known beforehand"
    if sum(spec.shape.num_elements() for spec in specs) > _MOST_NUMBERS:
        return f"{why}, and more than {_MOST_NUMBERS} numbers for a row"
    first, second = _part(graph, needed, inputs), _part(graph, rest, inputs)
    held = dict(zip(inputs[len(rows) :], function.captured_inputs, strict=True))

    def draw() -> tuple[tf.Tensor, ...]:
        return tuple(_imported(first, _captured(held), draws))

    def pure(row: Sequence[tf.Tensor], drawn: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
        row_inputs = {_tensor(name): tensor for name, tensor in zip(rows, row, strict=True)}
        return _imported(
            second,
            {**_captured(held), **row_inputs, **dict(zip(draws, drawn, strict=True))},
            outputs,
        )

    return Halves(draw, pure)


def _name(tensor: str) -> str:
    return tensor.lstrip("^").split(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _data(node: _Node) -> list[str]:
    return [one for one in node.input if not one.startswith("^")]


def _ancestors(nodes: Mapping[str, _Node], ends: Iterable[str], stop: Iterable[str]) -> set[str]:
    """Return operations and all whose results they need; none are looked for behind `stop`."""
    ancestors: set[str] = set()
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name not in ancestors:
            ancestors.add(name)
            waiting += [] if name in stop else map(_name, _data(nodes[name]))
    return ancestors


def _part(
    graph: tf.compat.v1.GraphDef, names: set[str], inputs: Iterable[str]
) -> tf.compat.v1.GraphDef:
    """Return the graph of some operations; its inputs are what they need of others."""
    names = names.difference(inputs)
    part = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    for node in graph.node:
        if node.name in names:
            own = part.node.add()
            own.CopyFrom(node)
            own.attr.pop("_class", None)  # it may name an operation of the other part
            del own.input[:]
            own.input.extend(
                one for one in node.input if not one.startswith("^") or _name(one) in names
            )
    return part


def _captured(held: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    graph = tf.compat.v1.get_default_graph()
    return {_tensor(name): graph.capture(tensor) for name, tensor in held.items()}


def _imported(
    part: tf.compat.v1.GraphDef, inputs: Mapping[str, tf.Tensor], wanted: Sequence[str]
) -> list[tf.Tensor]:
    """Add operations to the graph that is being traced, and return some of their results."""
    used = {_tensor(one) for node in part.node for one in _data(node)}
    makes = [name for name in wanted if name not in inputs]
    made = tf.graph_util.import_graph_def(
        part, {name: value for name, value in inputs.items() if name in used}, makes
    )
    known = {**inputs, **dict(zip(makes, made, strict=True))}
    return [known[name] for name in wanted]
