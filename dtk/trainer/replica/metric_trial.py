"""Test whether a script's own metrics add up over replicas, on more rows than a step's trial has.

The counts of replicas are summed, so a metric must add sums over rows to its variables. A few rows
of an untrained model may not show whether it does: true positives are 0 however they are counted.
So the rows of a trial, each repeated four times, are counted as a whole and in two parts: with the
model's predictions, with these in another order, with the targets as predictions, and with a
mixture of both. Then the rows of the first part are counted again: what is added may depend on what
was counted before, and a last batch may leave a worker no rows.

Behind parameter servers each step counts from zero, and its counts are added to what a reset has
set. Where a step has all rows of a batch, only the counts of batches must add up: there the parts
are two batches, and the whole is one after the other.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_steps
from dtk.nests import Args, Array, Function, Kwargs, Tree
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.loss_terms import RATIO

_TIMES = 4
_ROWS = (
    "its update_state must add to variables what is a sum over rows: "
    "self.total.assign_add(ops.sum(values)), where values has one number for each row"
)


class Call(NamedTuple):
    """How a step called a metric's `update_state`: its arguments, by position and by name."""

    metric: keras.Metric
    args: Args
    kwargs: Kwargs


class Doubt(NamedTuple):
    """A metric that a trial could not show to add up over workers."""

    metric: keras.Metric
    why: str  # what the trial showed
    advice: str = _ROWS  # what the metric must do

    @property
    def is_curable(self) -> bool:
        """Whether the result is right if one replica counts all rows and the others none."""
        return all(v.aggregation == "sum" for v in self.metric.variables)

    def told(self, cured: bool, counts: str = "one worker") -> str:
        """Return the message for the user; it says who counts the rows of all."""
        if cured:
            return (
                f"{self.why}: the rows of all workers are gathered in each step, and {counts} "
                f"counts them, as one process does. To avoid this cost, {self.advice}"
            )
        return (
            f"{self.why}, so the logged value may differ from one process's; weights are not "
            f"affected. To fix this, {self.advice}; or compute the metric from model.predict(x), "
            "which returns the rows of all workers"
        )


class Calls:
    """The first call of a step to `update_state` of each metric."""

    def __init__(self, metrics: list[keras.Metric]):
        self._metrics = metrics
        self._seen: dict[int, Call] = {}
        self._graph: tf.Graph | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Return a context in which a step is traced and its calls are noted."""
        self._seen.clear()
        self._graph = tf.compat.v1.get_default_graph()
        with keras_steps.patch_metrics(self._metrics, "update_state", self._note):
            yield

    def _note(
        self, metric: keras.Metric, original: Function[object], *args: object, **kwargs: object
    ) -> object:
        # Tensors of a branch or loop cannot leave it.
        if tf.compat.v1.get_default_graph() is self._graph:
            self._seen.setdefault(id(metric), Call(metric, args, kwargs))
        return original(*args, **kwargs)

    def tensors(self) -> list[Tree]:
        """Return the arguments that are tensors, for `arrays`."""
        calls = self._seen.values()
        return [[leaf for leaf in _leaves(call) if tf.is_tensor(leaf)] for call in calls]

    def arrays(self, values: list[list[Array]]) -> list[Call]:
        """Return the calls with arrays in the place of tensors."""
        calls = self._seen.values()
        return [_with(call, iter(arrays)) for call, arrays in zip(calls, values, strict=True)]


def _leaves(call: Call) -> list[object]:
    return tf.nest.flatten((call.args, call.kwargs))


def _mapped(call: Call, function: Function[object]) -> Call:
    """Apply a function to the arrays of a call."""

    def mapped(leaf: object) -> object:
        return function(leaf) if isinstance(leaf, np.ndarray) else leaf

    return Call(call.metric, *tf.nest.map_structure(mapped, (call.args, call.kwargs)))


def _with(call: Call, arrays: Iterator[Array]) -> Call:
    leaves = [next(arrays) if tf.is_tensor(leaf) else leaf for leaf in _leaves(call)]
    return Call(call.metric, *tf.nest.pack_sequence_as((call.args, call.kwargs), leaves))


class Counting(NamedTuple):
    """How the counts of a metric come together."""

    model: keras.Model
    kinds: Mapping[str, str]  # of the step's terms
    tolerance: float
    served: bool = False  # behind servers: steps count from zero
    by_batch: bool = False  # whether the parts are whole batches


class _Piece(NamedTuple):
    """What one replica, or step, counts."""

    calls: list[tuple[Call, float]]  # in order, each with its share of the rows
    begins: bool = False  # whether it counts from what a reset sets


def doubts_of(calls: list[Call], rows: int, counting: Counting) -> list[Doubt]:
    """Return the metrics whose counts do not add up, or perhaps do not."""
    doubts = []
    with traced_step.weighing_by_rows():
        for call in calls:
            known = [k for term, k in counting.kinds.items() if repr(call.metric.name) in term]
            of_rows = all(_is_of_rows(leaf, rows) for leaf in _leaves(call))
            if of_rows and RATIO not in known:
                doubts.append(_doubt_of(call, [*_variants(call)], rows * _TIMES, counting))
            elif counting.by_batch:
                doubts.append(_doubt_of(call, [call], 0, counting))
    return [doubt for doubt in doubts if doubt is not None]


def _is_of_rows(leaf: object, rows: int) -> bool:
    return not isinstance(leaf, np.ndarray) or leaf.ndim > 0 and len(leaf) == rows


def _doubt_of(
    call: Call, variants: list[Call], rows: int, counting: Counting
) -> Doubt | None:
    """Count variants of a call as a whole and in parts; without rows, the parts are the call."""
    name, moved = repr(call.metric.name), False
    for more in variants:
        try:
            untouched = _result(call.metric, [], counting)
            whole, parts = (
                _result(call.metric, pieces, counting) for pieces in _pieces(more, rows, counting)
            )
        except Exception as why:  # the script's metric may refuse such predictions
            said = f"{type(why).__name__}: {str(why)[:200]}"
            return Doubt(call.metric, f"{name} could not be tried on other rows ({said})")
        for one, other in zip(whole, parts, strict=True):
            if not np.allclose(one, other, counting.tolerance, 1e-6, equal_nan=True):
                return _differing(call, one, other, rows + _first_of(rows), counting)
        # A quotient of sums is 0 / 0 before, and 0 / rows is no more than that.
        pairs = zip(map(np.nan_to_num, whole), map(np.nan_to_num, untouched), strict=True)
        moved = moved or not all(np.array_equal(*pair) for pair in pairs)
    if moved:
        return None
    stays = f"{name} stays {np.ravel(untouched[0])[0]:.5g} on all rows of a trial"
    return Doubt(call.metric, f"{stays}, which shows nothing of what workers would count")


def _pieces(call: Call, rows: int, counting: Counting) -> tuple[list[_Piece], list[_Piece]]:
    """Return what replicas, or steps, count of a call as a whole, and in parts."""
    first, halves = _first_of(rows), [call, call]
    if rows:
        ends = slice(0, first), slice(first, rows)
        halves = [_mapped(call, operator.itemgetter(part)) for part in ends]
    if counting.by_batch:
        whole = _Piece([(half, 1.0) for half in halves], begins=True)
        return [whole], [_Piece([(half, 1.0)]) for half in halves]
    again, share = (halves[0], 1.0), first / rows
    parts = [_Piece([(halves[0], share), again]), _Piece([(halves[1], 1.0 - share)])]
    return [_Piece([(call, 1.0), again], begins=True)], parts


def _first_of(rows: int) -> int:
    """Return the rows of the first of two parts."""
    return rows * 3 // 5


def _differing(
    call: Call, whole: Array, parts: Array, rows: int, counting: Counting
) -> Doubt:
    arrays = [leaf for leaf in _leaves(call) if isinstance(leaf, np.ndarray)]
    must = _ROWS
    if not counting.served and any(v.aggregation != "sum" for v in call.metric.variables):
        must = f'its variables must have aggregation="sum", and {must}'
    if isinstance(call.metric, keras.metrics.MeanMetricWrapper):
        must = "the function must return one number for each row"
    if len({array.ndim for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        must += ", and not for each pair of rows, as y_true == y_pred[:, None] has (here the "
        must += f"arguments have the shapes {shapes})"
    name, one, other = call.metric.name, np.ravel(whole)[0], np.ravel(parts)[0]
    why = f"{name!r} is neither a mean nor a sum over rows ({one:.5g} on {rows} rows, {other:.5g} "
    why += "from two parts of them)"
    if counting.by_batch:
        why = f"{name!r} does not add up over steps ({one:.5g} after two of them, {other:.5g} from "
        why += "the sum of their counts)"
    return Doubt(call.metric, why, must)


def _variants(call: Call) -> Iterator[Call]:
    """Yield the call with its rows repeated, then also with other predictions."""
    call = _mapped(call, lambda leaf: np.concatenate([leaf] * _TIMES))
    yield call
    arrays = [leaf for leaf in call.args[:2] if isinstance(leaf, np.ndarray)]
    if len(arrays) < 2:
        return
    target, predicted = arrays
    predictions = [np.roll(predicted, 1, 0)]
    perfect = _perfect(target, predicted)
    if perfect is not None:
        third = len(target) // 3
        predictions += [perfect, np.concatenate([perfect[:third], predicted[third:]])]
    for predicted in predictions:
        yield call._replace(args=(target, predicted, *call.args[2:]))


def _perfect(target: Array, predicted: Array) -> Array | None:
    """Return the targets in the shape of predictions; None if they do not fit."""
    if target.shape == predicted.shape:
        return target.astype(predicted.dtype)
    classes = predicted.shape[-1]
    if target.size * classes != predicted.size:
        return None
    labels = target.reshape(predicted.shape[:-1])
    if not np.array_equal(labels, np.clip(labels, 0, classes - 1)):
        return None
    return np.eye(classes, dtype=predicted.dtype)[labels.astype(int)]


def _result(metric: keras.Metric, pieces: list[_Piece], counting: Counting) -> list[Array]:
    """Return a metric's result if each replica counts one piece of a batch, starting at zero.

    Behind parameter servers that of all rows starts where a reset does, and others are added to it.
    """
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in metric.variables]
    reset = _after_reset(metric) if counting.served else zeros
    states = []
    for calls, begins in pieces:
        start = reset if begins else zeros
        with keras.StatelessScope(state_mapping=start) as scope:
            for call, share in calls:
                part, kinds = tf.constant(share, tf.float32), counting.kinds
                step = traced_step.Step(part, counting.model, tf.identity, kinds=kinds)
                call = _mapped(call, tf.convert_to_tensor)
                with traced_step.tracing(step):
                    metric.update_state(*call.args, **call.kwargs)
        states.append([scope.get_current_value(v) for v, _ in start])
    base = zeros if any(piece.begins for piece in pieces) else reset
    totals = [
        (v, tf.add_n([first, *column]))
        if counting.served or v.aggregation == "sum"
        else (v, (column or [first])[0])
        for (v, first), *column in zip(base, *states, strict=True)
    ]
    with keras.StatelessScope(state_mapping=totals):
        return [np.asarray(value, "float64") for value in tf.nest.flatten(metric.result())]


def _after_reset(metric: keras.Metric) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return the variables of a metric with what its `reset_state` sets."""
    now = [(v, tf.convert_to_tensor(v)) for v in metric.variables]
    with keras.StatelessScope(state_mapping=now) as scope:
        metric.reset_state()
    return [(v, scope.get_current_value(v)) for v, _ in now]
