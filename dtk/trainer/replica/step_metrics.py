"""A step's metrics, moving statistics and logged numbers over all replicas.

* Metric state is summed over ranks before any result is computed, so a step logs the results of the
  global batch.
* Non-trainable state that a step assigns (moving statistics) is averaged, weighted by share. In a
  script's own loop it is when an optimizer is applied.
* A replica without rows computes with a padding row, which its metrics forget.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from dtk.compat import keras_models, tf_replicas
from dtk.nests import Function, Tree
from dtk.patches import temporarily
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica.whole_batch import sum_over_replicas, sum_with_gradient
from dtk.trainer.strategy import Strategy, tell
from dtk.trainer.tracing import traced_step


def _sum_state(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sum state beside the gradients' collectives: it is ready earlier."""
    strategy = tf.distribute.get_strategy()
    with tf_replicas.counted_if(None), strategy.concurrent("state"):
        return sum_over_replicas(values)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the state variables of every metric of a model, the loss tracker among them."""
    variables = [v for metric in keras_models.metrics_of(model) for v in metric.variables]
    return list({id(v): v for v in variables}.values())


class WorldState:
    """A step's state over all replicas: metrics summed, moving statistics averaged.

    One reduction serves all results that a step asks for, unless it assigns variables between them.
    """

    def __init__(self, step: traced_step.Step):
        self._step = step
        self._before = {id(v): tf.identity(v) for v in metric_variables(step.model)}
        self._reduced_at = -1
        self._averaged: dict[int, int] = {}
        self._totals: list[tuple[keras.Variable, tf.Tensor]] = []
        self._inside = False

    def forget_padding(self) -> None:
        """Restore the metrics of a replica that has no rows."""

        def restore() -> bool:
            for variable in metric_variables(self._step.model):
                if id(variable) not in self._step.counted_once:
                    variable.assign(self._before_of(variable))
            return True

        tf.cond(self._step.present, lambda: False, restore)

    def _before_of(self, variable: keras.Variable) -> tf.Tensor:
        before = self._before.get(id(variable))
        return tf.zeros_like(variable) if before is None else before

    def result_of(self, original: Callable[[], Tree]) -> Tree:
        """Compute a metric's `result` from the state of all replicas."""
        if self._inside:
            return original()
        if self._reduced_at != self._step.assignments:
            self._reduce([v for v in metric_variables(self._step.model) if v.aggregation == "sum"])
        totals = keras.StatelessScope(state_mapping=self._totals)
        with temporarily(self, _inside=True), totals:
            return keras.tree.map_structure(_value_of, original())

    def average(self) -> None:
        """Average the moving statistics that were assigned since the last reduction."""
        if self._unaveraged():
            self._reduce([])

    def _unaveraged(self) -> list[keras.Variable]:
        return [
            v
            for v in _moving_statistics(self._step)
            if self._averaged.get(id(v)) != self._step.assigned_at[id(v)]
        ]

    def _reduce(self, summed: list[keras.Variable]) -> None:
        step, averaged = self._step, self._unaveraged()
        counts = [
            value if id(v) in step.counted_once else tf.where(step.present, value, before)
            for v in summed
            for value, before in [(tf.convert_to_tensor(v), self._before_of(v))]
        ]
        reduced = _sum_state([*counts, *(step.weighed(v) for v in averaged)])
        self._totals = list(zip(summed, reduced, strict=False))
        for variable, mean in zip(averaged, reduced[len(summed) :], strict=True):
            variable.assign(mean)
            self._averaged[id(variable)] = step.assigned_at[id(variable)]
        self._reduced_at = step.assignments if summed else -1


def _value_of(result: tf.Tensor | keras.Variable) -> tf.Tensor:
    return tf.convert_to_tensor(result) if isinstance(result, keras.Variable) else result


def result_of(metric: keras.Metric, original: Callable[[], Tree]) -> Tree:
    """Compute a metric's result from the state of all replicas, in place of `Metric.result`."""
    step = traced_step.current()
    if step is None:
        return original()
    result = original() if step.result_of is None else step.result_of(original)
    # Some metrics return a variable, which outside `result_of` holds this replica's value.
    result = keras.tree.map_structure(_value_of, result)
    for path, value in keras.tree.flatten_with_path(result):
        if isinstance(value, tf.Tensor):
            step.results.setdefault(value.ref(), (metric, path))
    return result


# Moving statistics.


def _moving_statistics(step: traced_step.Step) -> list[keras.Variable]:
    """Return the non-trainable floats a step assigned, without synchronized layers' statistics."""
    exact = {
        id(v)
        for layer in keras_models.layers_of(step.model)
        if getattr(layer, "synchronized", False)
        for v in layer.non_trainable_variables
    }
    return [
        v
        for v in step.model.non_trainable_variables
        if id(v) in step.assigned and id(v) not in exact and keras.backend.is_float_dtype(v.dtype)
    ]


def moments_in_loop(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    *,
    original: Function[tuple[tf.Tensor, tf.Tensor]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute mean and variance: zeros, not 0 / 0, for a replica that a loop gave no rows."""
    moments = original(layer, inputs, mask)
    if inputs.shape[0] or layer.synchronized or not traced_step.is_in_loop():
        return moments
    mean, variance = moments
    has_rows = tf.cast(tf.size(inputs) > 0, mean.dtype)
    return tf.math.multiply_no_nan(mean, has_rows), tf.math.multiply_no_nan(variance, has_rows)


@contextlib.contextmanager
def averaged_in_loop(statistics: dict[int, keras.Variable]) -> Iterator[None]:
    """Average moving statistics when a script's own loop applies an optimizer, in this context.

    A loop's end of an epoch is not known, and it may save at any time. `statistics` are those of
    earlier steps: a `tf.function` that was traced then runs without Python.
    """
    if not traced_step.is_in_loop():
        yield
        return
    statistics |= tf_replicas.running.assigned_in_loop
    if statistics:
        rows = tf.distribute.get_strategy().extended.given_rows()
        _average(list(statistics.values()), rows)
    try:
        yield
    finally:
        tf_replicas.running.assigned_in_loop.clear()  # by the optimizer


def _average(statistics: Sequence[keras.Variable], rows: tf.Tensor) -> None:
    """Average variables over the replicas, weighted by their rows."""
    # In 16 bits a value times its rows would overflow.
    wide = [v.dtype if v.dtype == "float64" else "float32" for v in statistics]
    values = [tf.cast(v, dtype) for v, dtype in zip(statistics, wide, strict=True)]
    weighed = [tf.math.multiply_no_nan(v, tf.cast(rows, v.dtype)) for v in values]
    *sums, all_rows = _sum_state([*weighed, tf.cast(rows, tf.float32)])
    for variable, value, total in zip(statistics, values, sums, strict=True):
        mean = tf.where(all_rows > 0, total / tf.cast(all_rows, total.dtype), value)
        variable.assign(tf.cast(mean, variable.dtype))


def average_after_block(step: traced_step.Step) -> bool:
    """Average moving statistics in a step that closes a block; False without local steps.

    Other steps send nothing: their logs are this replica's, and metric state is summed when the
    epoch's logs are made.
    """
    blocks = shared_optimizer.blocks_of(step.model)
    averaged = _moving_statistics(step) if blocks else []
    if averaged:
        weight = blocks[0].weight.read_value()
        values = [tf.convert_to_tensor(v) for v in averaged]
        parts = [tf.math.multiply_no_nan(v, tf.cast(weight, v.dtype)) for v in values]
        closed = tf.reduce_all([block.is_closed() for block in blocks])
        with tf_replicas.counted_if(None):
            means = tf.cond(closed, lambda: sum_over_replicas(parts), lambda: values)
        for variable, mean in zip(averaged, means, strict=True):
            variable.assign(mean)
    return bool(blocks)


# Logs.


class Number(NamedTuple):
    """A number in a step's logs that is not a metric's result."""

    name: str
    value: tf.Tensor  # a mean over this replica's rows; of integers in float64
    dtype: tf.DType  # as it was logged

    def logged(self, total: tf.Tensor) -> tf.Tensor:
        """Return the number of all replicas as it is logged."""
        return tf.cast(tf.round(total), self.dtype) if self.dtype.is_integer else total


def numbers_of(step: traced_step.Step, logs: Tree) -> list[Number]:
    """Find the numbers in a step's logs that are not metric results."""
    numbers = []
    for name, value in _unreduced(step, logs):
        if _is_number(value):
            exact = tf.cast(value, tf.float64) if value.dtype.is_integer else value
            mean = step.terms.to_mean(f"log {name!r}", exact)
            numbers.append(Number(name, mean, value.dtype))
    return numbers


def others_of(step: traced_step.Step, logs: Tree) -> dict[str, tf.Tensor]:
    """Find the tensors in a step's logs that are neither metric results nor numbers."""
    return {name: value for name, value in _unreduced(step, logs) if not _is_number(value)}


def _unreduced(step: traced_step.Step, logs: Tree) -> list[tuple[str, tf.Tensor]]:
    flat = keras.tree.flatten_with_path(logs) if isinstance(logs, dict) else []
    return [
        (_name_of(path), value)
        for path, value in flat
        if isinstance(value, tf.Tensor) and value.ref() not in step.results
    ]


def _is_number(value: tf.Tensor) -> bool:
    return value.shape.rank == 0 and (value.dtype.is_floating or value.dtype.is_integer)


def results_in(
    step: traced_step.Step, logs: Tree
) -> list[tuple[traced_step.Path, keras.Metric, traced_step.Path]]:
    """Find the metric results in a step's logs."""
    flat = keras.tree.flatten_with_path(logs) if isinstance(logs, dict) else []
    return [
        (path, *step.results[value.ref()])
        for path, value in flat
        if isinstance(value, tf.Tensor) and value.ref() in step.results
    ]


def _name_of(path: traced_step.Path) -> str:
    return "/".join(map(str, path))


def with_numbers(logs: Tree, numbers: Mapping[str, tf.Tensor]) -> Tree:
    """Replace numbers in a step's logs, by name."""
    paths = [_name_of(path) for path, _ in keras.tree.flatten_with_path(logs)]
    values = [numbers.get(p, v) for p, v in zip(paths, keras.tree.flatten(logs), strict=True)]
    return keras.tree.pack_sequence_as(logs, values)


def of_all_replicas(step: traced_step.Step, logs: Tree) -> Tree:
    """Sum over replicas the numbers that a step logs besides metric results."""
    numbers = numbers_of(step, logs)
    if not numbers:
        return logs
    sums = _sum_state([step.weighed(number.value) for number in numbers])
    return with_numbers(
        logs, {one.name: one.logged(total) for one, total in zip(numbers, sums, strict=True)}
    )


# Moments: mean and variance over the rows of all replicas, by one message in each direction.
#
# For a synchronized normalization Keras sums three tensors over the replicas: the inputs, their
# squares and their number; in the backward pass TensorFlow sums three gradients. Each sum is a
# message that the next computation waits for. Here the three are one vector:
#
#     forward     [mean | sum (x - mean)^2 | count] of each replica   all-reduce   mean, variance
#     backward    their gradients                                     all-reduce
#
# In a script's own train_step, each replica differentiates a mean over its own rows; its gradients
# are weighed by its share of the rows after the tape, when the optimizer gets them. The gradients
# that other replicas send back through the moments must be weighed by their shares, not by its own.


def moments_of_all_replicas(
    x: tf.Tensor,
    axes: int | Sequence[int],
    keepdims: bool = False,
    kept: tf.Tensor | None = None,
    *,
    original: Function[tuple[tf.Tensor, tf.Tensor]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute mean and variance over these axes and all replicas.

    A mask, in the shape of `x`, says which numbers count.
    """
    axes = [axes] if isinstance(axes, int) else axes
    replica = tf.distribute.get_replica_context()
    own_loop = traced_step.current() is None
    if replica is None or (own_loop and replica.num_replicas_in_sync == 1):
        return original(x, axes, keepdims)

    def summed(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    sums = summed(x if kept is None else tf.where(kept, x, 0.0))
    shape = sums.shape
    if not shape.is_fully_defined():
        return original(x, axes, keepdims)
    length = math.prod(shape)
    if kept is None:
        count = tf.cast(tf.size(x, tf.int64) // length, x.dtype)
    else:  # one for each channel, as a mask of time steps beside channels has it
        count = summed(tf.cast(kept, x.dtype))
    mean = tf.math.divide_no_nan(sums, count)
    apart = x - mean if kept is None else tf.where(kept, x - mean, 0.0)
    own = [tf.reshape(part, [-1]) for part in (mean, summed(tf.square(apart)), count)]
    # Each replica's moments in a row of its own: a sum of squares of `x` would lose the variance of
    # what is far from zero. As PyTorch's SyncBatchNorm does.
    replicas = replica.num_replicas_in_sync  # 1 in a trial of the whole step, on any rank
    index = tf_replicas.replica_index() % replicas
    row = tf.concat(own, 0)[None]
    rows = sum_with_gradient(tf.pad(row, [[index, replicas - 1 - index], [0, 0]]))
    means, squares, counts = tf.split(rows, [length, length, own[2].shape[0]], axis=1)
    total = tf.reduce_sum(counts, 0)
    shares = tf.math.divide_no_nan(counts, total)
    mean = tf.reduce_sum(shares * means, 0)
    within = tf.math.divide_no_nan(tf.reduce_sum(squares, 0), total)
    variance = within + tf.reduce_sum(shares * tf.square(means - mean), 0)
    gone = set() if keepdims else {axis % x.shape.rank for axis in axes}
    left = [n for axis, n in enumerate(shape) if axis not in gone]
    return tf.reshape(mean, left), tf.reshape(variance, left)


def warn_unsynchronized_norms(step: traced_step.Step, strategy: Strategy) -> None:
    """Print once which layers normalize over the rows of each replica alone."""
    layers = [
        layer.name
        for layer in keras_models.layers_of(step.model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not layer.synchronized
        and id(layer.moving_mean) in step.assigned  # not if frozen or in inference mode
    ]
    replicas = strategy.num_replicas_in_sync
    if replicas > 1 and layers and strategy.local_index() == 0:
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        tell(
            strategy,
            f"model {step.model.name!r}: batch normalization in {', '.join(layers[:3])}{more} "
            f"is over the rows of each of {replicas} replicas alone, so weights differ from those "
            "of one process with the whole batch. BatchNormalization(synchronized=True), or model "
            "= dtk.layers.convert_sync_batchnorm(model) before fit, is over all rows",
            once=True,
        )
