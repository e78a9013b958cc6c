"""What a script's own loop does, where it shows that the replicas' gradients sum wrongly.

Gradients are summed over the replicas. So each replica must add its part of the global batch's
loss: a sum over its rows by the rows of all, as `tf.nn.compute_average_loss` makes it. The graph of
a tape's target shows three others:

    mean(of own rows)          as many times too large as there are replicas
    sum(...) / sum(own mask)   a mean over rows that count; 0 / 0, which is refused, where none does
    penalty without rows       counted by every replica

And that of what it applies a fourth: gradients that are clipped before they are summed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk.compat import keras_steps, tf_replicas
from dtk.errors import at_rank, is_of_library, script_line
from dtk.nests import Gradients, Tree
from dtk.trainer.strategy import Strategy, tell
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.loss_terms import computed_from, depends_on_data, factored_terms
from dtk.trainer.tracing.row_dependence import EQUAL, RowDependence

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


def watched(strategy: Strategy) -> AbstractContextManager[None]:
    """Return a context in which a replica's tapes are looked at, where it is traced."""

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
            for mistake in filter(None, map(_mistake_in, tf.nest.flatten(target))):
                line = _line_of(tf.nest.flatten(target)[0])
                if tf_replicas.replica_index() == 0:
                    _warn(strategy, line, f"differentiates {mistake.said}")
                if mistake.divisor is not None:
                    checks.append(_refuse_zero(mistake.divisor, line, strategy))
        with tf.control_dependencies(checks):
            gradients = gradient(target, sources, output_gradients)
            if not checks:
                return gradients
            return tf.nest.map_structure(lambda g: None if g is None else tf.identity(g), gradients)

    return keras_steps.patch_tapes(differentiate)


def _line_of(target: tf.Tensor) -> str:
    """Return the line of the script that has computed a tensor; autograph runs a copy of it."""
    places = [(frame.filename, frame.lineno) for frame in target.op.traceback]
    own = [place for place in places if not is_of_library(place[0])]
    return "{}:{}".format(*own[-1]) if own else script_line()


def warn_of_applied(gradients: Gradients, strategy: Strategy) -> None:
    """Warn where the gradients that a loop applies do not sum to those of one process."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    in_graph = [v for v in values if v is not None and tf.is_symbolic_tensor(v)]
    _warn_of_clipped(in_graph, strategy)


def _warn_of_clipped(gradients: list[tf.Tensor], strategy: Strategy) -> None:
    """Warn where a loop hands over gradients that it has clipped: parts of those to be clipped."""
    clipped = [gradient for gradient in gradients if _is_clipped(gradient)]
    summed = any(one.op.type.startswith(_MAY_SUM) for one in computed_from(clipped))
    if clipped and not summed and tf_replicas.replica_index() == 0:
        _warn(
            strategy,
            _line_of(clipped[0]),
            "clips or normalizes the gradients of a replica's own rows. Let the optimizer clip "
            "their sums: clipnorm=, global_clipnorm= or clipvalue=",
        )


def _is_clipped(gradient: tf.Tensor) -> bool:
    """Return whether a gradient is limited, or multiplied by what is computed from itself."""
    factors: list[tf.Tensor] = []
    while gradient.op.type in ("Identity", "Cast", "Mul", "RealDiv", "DivNoNan", *_LIMITS):
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
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
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
        values = map(tf.get_static_value, map(tf.convert_to_tensor, factors))
        if any(value is None or np.isclose(value * replicas, 1.0) for value in values):
            continue  # it may be divided by the number of replicas
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
    constants = [one for one in computed_from([denominator]) if one.op.type == "Const"]
    values = [tf.get_static_value(one) for one in constants if one.shape.rank == 0]
    return not any(value == replicas for value in values)
