"""What a script's own loop does, where it shows that the replicas' gradients sum wrongly.

Gradients are summed over the replicas. So each replica must add its part of the global batch's
loss: a sum over its rows by the rows of all, as `tf.nn.compute_average_loss` makes it. The graph of
a tape's target shows three others:

    mean(of own rows)          as many times too large as there are replicas
    sum(...) / sum(own mask)   a mean over rows that count; 0 / 0, which is refused, where none does
    penalty without rows       counted by every replica

Whether replicas that have unequal rows divide by the rows of each, they compare in each step. And
the graph of what a loop applies shows two more: gradients that are clipped before they are summed,
and what every replica adds to them, such as a decay of weights.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk.compat import keras_steps, tf_replicas
from dtk.compat.tf_replicas import running
from dtk.errors import at_rank, is_of_library, script_line
from dtk.exchange.contract import Gradient, Update, run_if
from dtk.nests import Function, Gradients, Tree
from dtk.patches import temporarily
from dtk.trainer.strategy import Strategy, tell
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.loss_terms import (
    Coefficient,
    computed_from,
    depends_on_data,
    factored_terms,
    linear_terms,
)
from dtk.trainer.tracing.row_dependence import EQUAL, OF_ROWS, RowDependence

# Ops by which a replica may have the sums of others.
_MAY_SUM = ("Collective", "PyFunc", "EagerPyFunc", "Horovod", "Nccl")
# Functions of one number that do not add up.
_CURVED = ("Log", "Log1p", "Sqrt", "Rsqrt", "Exp", "Square", "Pow", "Maximum", "Minimum")
# Ops that cut off a gradient.
_LIMITS = ("ClipByValue", "Minimum", "Maximum", "Sign")
_AVERAGE = "tf.nn.compute_average_loss(one loss for each row, global_batch_size=...)"


class Mistake(NamedTuple):
    """What a replica counts as if there were no other."""

    said: str
    divisor: tf.Tensor | None = None  # by which no number is to be divided where it is 0


@contextlib.contextmanager
def watched(strategy: Strategy) -> Iterator[None]:
    """Return a context in which a replica's losses, and its tapes, are looked at."""

    def differentiate(
        gradient: keras_steps.Gradient,
        values: keras_steps.Values,
        target: Tree,
        sources: Tree,
        output_gradients: Tree,
    ) -> Tree:
        del values
        of_weights = any(hasattr(source, "assign") for source in tf.nest.flatten(sources))
        checks = []
        if of_weights and output_gradients is None and not tf.executing_eagerly():
            line = _line_of(tf.nest.flatten(target)[0])
            _note_factors(target, line)
            for mistake in filter(None, map(_mistake_in, tf.nest.flatten(target))):
                if tf_replicas.replica_index() == 0:
                    _warn(strategy, line, f"differentiates {mistake.said}")
                if mistake.divisor is not None:
                    checks.append(_refuse_zero(mistake.divisor, line, strategy))
        with tf.control_dependencies(checks):
            gradients = gradient(target, sources, output_gradients)
            if checks:
                gradients = tf.nest.map_structure(
                    lambda g: None if g is None else tf.identity(g), gradients
                )
        running.tape_gradients += _symbolic(tf.nest.flatten(gradients))
        return gradients

    with (
        keras_steps.patch_tapes(differentiate),
        keras_steps.patch_losses(_as_keras, _as_keras, _note_mean),
        keras_steps.patch_tf_functions(lambda: not tf.executing_eagerly(), compiled=False),
        temporarily(running, loss_factors=[], tape_gradients=[]),
    ):
        yield


def _as_keras(value: tf.Tensor, original: Function[tf.Tensor]) -> tf.Tensor:
    return original(value)


def _note_factors(target: Tree, line: str) -> None:
    """Note by what a tape's target multiplies sums over rows: alike on all replicas, if rightly."""
    scalars = [value for value in _symbolic(tf.nest.flatten(target)) if value.shape.rank == 0]
    for factor, term in (one for scalar in scalars for one in linear_terms(scalar, set())):
        divisor: Coefficient = 1.0
        if term.op.type == "Mean":
            divisor = tf.size(term.op.inputs[0])
        elif term.op.type in ("RealDiv", "DivNoNan"):
            divisor = term.op.inputs[1]
        running.loss_factors.append((_quotient(factor, divisor), line))


def _quotient(one: Coefficient, other: Coefficient) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.cast(one, tf.float32), tf.cast(other, tf.float32))


def _note_mean(
    values: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: tf.DType = None,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    """Note by what a loss of Keras's is divided, where no graph shows it."""
    loss = original(values, sample_weight, mask, reduction, dtype)
    seen = mask is None and not tf.executing_eagerly()
    if not seen and reduction not in (None, "none", "sum") and traced_step.is_in_loop():
        counted = [tf.ones_like(values) if mask is None else mask]
        counted += [sample_weight] if "weight" in reduction and sample_weight is not None else []
        line = script_line() if tf.executing_eagerly() else _line_of(loss)
        sums = [tf.reduce_sum(tf.cast(one, tf.float32)) for one in counted]
        running.loss_factors += [(_quotient(1.0, one), line) for one in sums]
    return loss


def comparing_losses(
    update: Callable[[list[Gradient]], Update],
    gradients: list[Gradient],
    strategy: Strategy,
    beside: bool,
) -> Update:
    """Sum gradients; in a loop, warn where the replicas' losses were divided by unequal numbers.

    `beside`: the update sums other tensors as well, in the messages of gradients.
    """
    if strategy.num_replicas_in_sync == 1 or not traced_step.is_in_loop():
        return update(gradients)
    graph = tf.compat.v1.get_default_graph()  # no tensor leaves the function that has made it
    noted = [one for one in running.loss_factors if getattr(one[0], "graph", graph) is graph]
    running.loss_factors.clear()
    factor = tf.add_n([factor for factor, _ in noted] or [tf.zeros([])])
    # Numbers are equal if their mean, and that of their squares, are those of one of them.
    mine = tf.stack([factor, factor * factor])
    if beside:
        (*gradients, total), applied = update([*gradients, mine])
    else:
        gradients, applied = update(gradients)
        (total,) = strategy.extended.reduce_over_replicas([mine])
    if tf_replicas.replica_index() == 0:
        line = noted[0][1] if noted else script_line()
        apart = tf.abs(total / strategy.num_replicas_in_sync - mine)
        said = "divides by a replica's own rows, and replicas had unequal numbers of them. Write "
        warn = functools.partial(_warn, strategy, line, said + _AVERAGE)
        run_if(tf.reduce_any(apart > 1e-5 * mine), lambda: tf.py_function(warn, [], []))
    return gradients, applied


def _symbolic(tensors: Iterable[Tree]) -> list[tf.Tensor]:
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in tensors]
    return [v for v in values if v is not None and tf.is_symbolic_tensor(v)]


def _line_of(target: tf.Tensor) -> str:
    """Return the line of the script that has computed a tensor; autograph runs a copy of it."""
    places = [(frame.filename, frame.lineno) for frame in target.op.traceback]
    own = [place for place in places if not is_of_library(place[0])]
    return "{}:{}".format(*own[-1]) if own else script_line()


def warn_of_applied(gradients: Gradients, strategy: Strategy) -> None:
    """Warn where the gradients that a loop applies do not sum to those of one process."""
    in_graph = _symbolic(gradients)
    _warn_of_clipped(in_graph, strategy)
    _warn_of_added(in_graph, strategy)


def _warn_of_added(gradients: list[tf.Tensor], strategy: Strategy) -> None:
    """Warn where a loop adds to gradients what all replicas add alike, such as decayed weights."""
    tapes, known = {one.ref() for one in running.tape_gradients}, RowDependence(None)
    left: list[tuple[tf.Tensor, list[Coefficient]]] = [(one, []) for one in gradients]
    while left and tf_replicas.replica_index() == 0:
        one, factors = left.pop()
        if one.ref() in tapes:
            continue
        if one.op.type in ("AddV2", "AddN", "Sub"):
            left += [(term, factors) for term in one.op.inputs]
        elif one.op.type in ("Identity", "Cast", "Neg", "Mul", "RealDiv"):
            term, *others = sorted(one.op.inputs, key=_size_of, reverse=True)
            divides = one.op.type == "RealDiv"
            left.append((term, [*factors, *(1.0 / f if divides else f for f in others)]))
        elif known.is_equal(one) and not _may_be_divided(factors, strategy):
            if tf.get_static_value(one) is not None:
                continue
            said = "adds to gradients, once for each replica, what does not depend on rows. Let "
            _warn(strategy, _line_of(one), said + "the optimizer decay weights: weight_decay=")
            return


def _warn_of_clipped(gradients: list[tf.Tensor], strategy: Strategy) -> None:
    """Warn where a loop hands over gradients that it has clipped: parts of those to be clipped."""
    tapes = {one.ref() for one in running.tape_gradients}
    clipped = [gradient for gradient in gradients if _is_clipped(gradient, tapes)]
    summed = any(one.op.type.startswith(_MAY_SUM) for one in computed_from(clipped))
    if clipped and not summed and tf_replicas.replica_index() == 0:
        _warn(
            strategy,
            _line_of(clipped[0]),
            "clips or normalizes the gradients of a replica's own rows. Let the optimizer clip "
            "their sums: clipnorm=, global_clipnorm= or clipvalue=",
        )


def _is_clipped(gradient: tf.Tensor, tapes: Collection[Hashable]) -> bool:
    """Return whether a loop limits a gradient of a tape, or multiplies it by its own norm."""
    factors: list[tf.Tensor] = []
    products = ("Identity", "Cast", "Mul", "RealDiv", "DivNoNan", *_LIMITS)
    while gradient.ref() not in tapes and gradient.op.type in products:
        if gradient.op.type in _LIMITS:
            return True
        gradient, *others = sorted(gradient.op.inputs, key=_size_of, reverse=True)
        factors += others
    return gradient.ref() in {one.ref() for one in computed_from(factors)}


def _size_of(tensor: tf.Tensor) -> float:
    return tensor.shape.num_elements() or math.inf


def _warn(strategy: Strategy, line: str, mistake: str) -> None:
    replicas = strategy.num_replicas_in_sync
    tell(
        strategy,
        f"warning: {line} {mistake}. Gradients are summed over {replicas} replicas, "
        "so this differs from one process",
        once=True,
    )


def _refuse_zero(divisor: tf.Tensor, line: str, strategy: Strategy) -> tf.Operation:
    """Return an operation that fails where a divisor is 0, as for masked rows."""
    message = (
        f"{line} divides by a sum over this replica's own rows that is 0, as where a mask leaves "
        "none of them: 0 / 0 is not a number, where one process would divide by the sum of all "
        "rows. Divide by the sum of all replicas: strategy.reduce, or "
        "tf.distribute.get_replica_context().all_reduce; the step was not applied"
    )
    return tf.debugging.assert_none_equal(
        divisor, tf.zeros([], divisor.dtype), message=at_rank(strategy.rank, message)
    )


def _mistake_in(target: tf.Tensor) -> Mistake | None:
    """Return what in a tape's target each replica counts as if there were no other."""
    in_fit = traced_step.current() is not None
    if in_fit or not tf.is_symbolic_tensor(target) or target.shape.rank != 0:
        return None
    known = RowDependence(None)
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    for factors, scalar in factored_terms(target, set()):
        op = scalar.op
        if op.type in ("RealDiv", "DivNoNan") and _is_of_own_rows(op.inputs[1]):
            said = (
                "a sum over a replica's own rows, divided by another one of them, which is 0 / 0 "
                "where a mask leaves none. Divide by the sum of all replicas: strategy.reduce, or "
                "tf.distribute.get_replica_context().all_reduce"
            )
            return Mistake(said, op.inputs[1] if op.type == "RealDiv" else None)
        if op.type in _CURVED and _is_of_own_rows(scalar):
            return Mistake(
                f"{op.type} of a number of a replica's own rows. Compute it from the sums of all "
                "replicas: tf.distribute.get_replica_context().all_reduce"
            )
        if _is_divided_by_rows(scalar, factors, known):
            return Mistake(f"a sum divided by a replica's own rows. Write {_AVERAGE}")
        if _may_be_divided(factors, strategy):
            continue
        if op.type == "Mean" and set(known.sizes(op.inputs[0]) or [EQUAL]) != {EQUAL}:
            return Mistake(f"a mean over a replica's own rows. Write {_AVERAGE}")
        if op.type in ("RealDiv", "DivNoNan") and _is_own_size(op.inputs[1], replicas):
            return Mistake(f"a sum divided by a replica's own rows. Write {_AVERAGE}")
        if tf.get_static_value(scalar) is None and known.is_equal(scalar):
            return Mistake(
                "a penalty without rows, which every replica adds. Write "
                "tf.nn.scale_regularization_loss(penalty)"
            )
    return None


def _may_be_divided(factors: Sequence[Coefficient], strategy: tf.distribute.Strategy) -> bool:
    """Return whether one of some factors may divide by the number of replicas."""
    replicas = strategy.num_replicas_in_sync
    values = map(tf.get_static_value, map(tf.convert_to_tensor, factors))
    return any(value is None or np.isclose(value * replicas, 1.0) for value in values)


def _value_of(factor: Coefficient) -> float | None:
    """Return the value of a factor, if the graph shows it, as where it is 1 / a static size."""
    tensor = tf.convert_to_tensor(factor)
    if tf.is_symbolic_tensor(tensor) and tensor.op.type in ("RealDiv", "Cast"):
        above, below = (*map(_value_of, tensor.op.inputs), 1.0)[:2]
        return above / below if above is not None and below else None
    if tf.is_symbolic_tensor(tensor) and tensor.op.type == "StridedSlice":
        sizes = tf.get_static_value(tensor.op.inputs[0])
        if tensor.dtype.is_integer and sizes is not None and np.min(sizes, initial=0) >= 0:
            return tf.zeros(tf.reshape(tensor, [-1])[:1]).shape[0]
    value = tf.get_static_value(tensor)
    return None if value is None or np.size(value) != 1 else float(np.ravel(value)[0])


def _is_divided_by_rows(
    scalar: tf.Tensor, factors: Sequence[Coefficient], known: RowDependence
) -> bool:
    """Return whether a sum over rows is divided by a number of rows that is a constant."""
    values = [_value_of(factor) for factor in factors]
    if scalar.op.type == "DivNoNan":
        scalar, below = scalar.op.inputs
        values.append(1.0 / (_value_of(below) or math.inf))
    if scalar.op.type != "Sum" or OF_ROWS not in (known.sizes(scalar.op.inputs[0]) or []):
        return False
    product = math.prod(math.nan if value is None else value for value in values)
    return any(np.isclose(product * rows, 1.0) for rows in known.known_rows(scalar.graph))


def _is_of_own_rows(denominator: tf.Tensor) -> bool:
    """Return whether a denominator is computed from a replica's rows alone."""
    if not depends_on_data(denominator, by_shape=False):
        return False
    return not any(
        one.op.type.startswith(_MAY_SUM) or (one.op.type == "Placeholder" and one.shape.rank == 0)
        for one in computed_from([denominator])
        if one.dtype != tf.resource
    )


def _is_own_size(denominator: tf.Tensor, replicas: int) -> bool:
    """Return whether a denominator is made of sizes of a replica's rows, and of no other number."""
    if depends_on_data(denominator, by_shape=False) or not depends_on_data(denominator):
        return False
    of_sizes = computed_from([denominator], ("Shape", "Size"))  # not what made the rows
    constants = [one for one in of_sizes if one.op.type == "Const"]
    values = [tf.get_static_value(one) for one in constants if one.shape.rank == 0]
    return not any(value == replicas for value in values)
