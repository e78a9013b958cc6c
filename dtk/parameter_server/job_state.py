"""What the chief keeps between the steps that workers compute: random states, and metrics."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeAlias, TypedDict, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_steps, keras_variables
from dtk.compat.random_draws import spread_seed
from dtk.input import slicing
from dtk.nests import Array, Function, Leaf, Tree
from dtk.parameter_server.functional_step import FunctionalStep, State
from dtk.parameter_server.scheduler import Schedule, StepSlice
from dtk.trainer.replica import step_metrics
from dtk.trainer.replica.metric_trial import Call
from dtk.trainer.tracing.traced_step import Path

# Distance between the random states of steps that compute at the same time.
RNG_STRIDE = 1 << 10


class _Begun(NamedTuple):
    """States of random layers, uint32 of shape (layers, 2), and the step that they belong to."""

    states: Array
    first: int

    def at(self, step: int) -> Array:
        """Return the states of an asynchronous step."""
        states = self.states.copy()
        states[:, 1] += np.uint32((step - self.first) * RNG_STRIDE % 2**32)
        return states


class RngStates:
    """States of a model's random layers; every slice of every step derives its own from them.

    The chief keeps the states from the first step until all steps are applied, and then gives them
    back to the model. A serial step goes on where the step before has stopped. Steps that compute
    at the same time each have a separate state, whichever is computed first.
    """

    def __init__(self, variables: Callable[[], list[keras.Variable]]):
        self._variables = variables
        self._draws = False
        self._begun: _Begun | None = None

    def begin(self, schedule: Schedule) -> tf.TensorSpec:
        """Read the model's random states, unless steps are under way; return their spec."""
        if self._begun is None:
            states = [v.numpy() for v in self._variables()]
            self._begun = _Begun(np.array(states, "uint32").reshape(-1, 2), schedule.offered)
        return tf.TensorSpec(self._begun.states.shape, tf.uint32)

    def of(self, piece: StepSlice, schedule: Schedule) -> Array:
        """Return the random states of a slice: the same on every worker, at any time."""
        assert self._begun is not None
        states = self._begun.at(piece.step) if schedule.tau else self._begun.states
        folded = [(spread_seed(int(seed), piece.slice), drawn) for seed, drawn in states]
        return np.array(folded, "uint32").reshape(-1, 2)

    def values(self, rng_states: tf.Tensor) -> State:
        """Return the state variables with their values in a traced step."""
        variables = self._variables()
        return list(zip(variables, tf.unstack(rng_states, num=len(variables)), strict=True))

    def left_by(self, traced: FunctionalStep) -> list[tf.Tensor]:
        """Return the states that a traced step leaves."""
        return [traced.value(variable) for variable in self._variables()]

    def note_draws(self, traced: FunctionalStep) -> None:
        """Note whether a traced step draws random numbers."""
        before = {id(variable): value for variable, value in traced.state}
        self._draws |= any(traced.value(v) is not before[id(v)] for v in self._variables())

    def go_on_from(self, states: Sequence[Array]) -> None:
        """Let the next step go on where a serial step has stopped."""
        assert self._begun is not None
        self._begun = self._begun._replace(states=np.array(states, "uint32"))

    def write_back(self, schedule: Schedule) -> None:
        """Give the states back to the model; all steps must be applied."""
        if self._begun is not None and self._draws:
            states = self._begun.at(schedule.offered) if schedule.tau else self._begun.states
            for variable, state in zip(self._variables(), states, strict=True):
                variable.assign(state)
        self.forget()

    def forget(self) -> None:
        """Forget the states of steps that are over, or that an exception left."""
        self._begun = None


# Metrics that workers count and the chief adds up.

# A structure of numbers: tensors while a step is traced, arrays when it has run.
ReportT = TypeVar("ReportT")

# Results of metrics by name, maybe in groups, as Keras's step returns them.
_Results: TypeAlias = "dict[str | int, _Results | tf.Tensor]"


class PackedReport(Generic[ReportT]):
    """A step's report, its numbers as one tensor: each tensor fetched from a worker is a message.

    Rows, of which there may be any number, are tensors of their own.
    """

    def __init__(self, report: ReportT):
        self._structure = report
        leaves = tf.nest.flatten(report)
        flat = [leaf for leaf in leaves if _is_packed(leaf)]
        self._kinds = [(tuple(t.shape), t.dtype.as_numpy_dtype) for t in flat]
        parts = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat]
        packed = tf.concat([*parts, tf.zeros([0], tf.float64)], 0)
        rows = [leaf for leaf in leaves if tf.is_tensor(leaf) and not _is_packed(leaf)]
        self.tensors = [packed, *rows]

    def read(self, numbers: Array, rows: Sequence[Leaf]) -> ReportT:
        """Return the report of a step that has run."""
        ends = np.cumsum([math.prod(shape) for shape, _ in self._kinds], dtype=int)
        parts = zip(np.split(numbers, ends), self._kinds, strict=False)  # none behind the last end
        packed = iter([part.reshape(shape).astype(dtype) for part, (shape, dtype) in parts])
        others = iter(rows)
        results = [
            leaf if not tf.is_tensor(leaf) else next(packed if _is_packed(leaf) else others)
            for leaf in tf.nest.flatten(self._structure)
        ]
        return tf.nest.pack_sequence_as(self._structure, results)


def _is_packed(leaf: object) -> bool:
    is_number = isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string
    return is_number and tf.convert_to_tensor(leaf).shape.is_fully_defined()


class RowsOfCall(NamedTuple):
    """A slice's call to `update_state` of a metric, for the chief to make."""

    call: Call
    masks: list[tf.Tensor | None]  # of the arguments


class Counted(TypedDict):
    """Counts of a step: tensors while it is traced, arrays when it has run."""

    metrics: list[Array]  # what the step adds to each of the metrics' variables
    calls: list[RowsOfCall]  # of metrics that count whole batches, in order
    # this slice's part of the other numbers that Keras's step returned, by name
    logs: dict[str, Array]
    rows: Array  # rows of the slice


class MetricSum:
    """Sum of workers' counts over slices and steps, as Keras's logs."""

    def __init__(self, model: keras.Model):
        self._model = model
        self.logs: dict[str, Tree] = {}
        self._logged: list[tuple[Path, keras.Metric, Path]] = []
        self._integers: set[str] = set()
        self._calls: list[RowsOfCall] = []
        self._add: tf.types.experimental.PolymorphicFunction | None = None

    def noting(self, metrics: Sequence[keras.Metric]) -> AbstractContextManager[None]:
        """Return a context in which a step is traced that leaves these metrics to the chief."""
        self._calls = []
        graph = tf.compat.v1.get_default_graph()

        def note(
            metric: keras.Metric, original: Function[object], *args: object, **kwargs: object
        ) -> object:
            # Tensors of a branch or loop cannot leave it.
            if tf.compat.v1.get_default_graph() is not graph:
                return original(*args, **kwargs)
            masks = [*map(keras_steps.mask_of, tf.nest.flatten((args, kwargs)))]
            self._calls.append(RowsOfCall(Call(metric, args, kwargs), masks))
            return None

        return keras_steps.patch_metrics(metrics, "update_state", note)

    def count(self, traced: FunctionalStep) -> Counted:
        """Collect what a step adds to the metrics, the other numbers it returned, and its rows."""
        self._logged = step_metrics.results_in(traced.step, traced.logs)
        numbers = step_metrics.numbers_of(traced.step, traced.logs)
        self._integers = {one.name for one in numbers if one.dtype.is_integer}
        return {
            "metrics": [traced.value(v) for v in step_metrics.metric_variables(self._model)],
            "calls": self._calls,
            "logs": {
                one.name: tf.convert_to_tensor(traced.step.weighed(one.value)) for one in numbers
            },
            "rows": slicing.count_rows(traced.data),
        }

    def add(self, counted: Sequence[Counted]) -> None:
        """Add the counts of a batch's slices to the chief's metrics; update the logs."""
        for slices in zip(*(c["calls"] for c in counted), strict=True):
            _count_rows(slices)
        metrics = step_metrics.metric_variables(self._model)
        columns = zip(metrics, *(c["metrics"] for c in counted), strict=True)
        deltas = [
            tf.cast(np.sum(column, axis=0), keras_variables.stored(variable).dtype)
            for variable, *column in columns
        ]
        if self._add is None:
            self._add = tf.function(self._add_deltas, autograph=False)
        self.logs.update(self._add(deltas))
        for name in counted[0]["logs"]:
            total = sum(c["logs"][name] for c in counted)
            self.logs[name] = np.rint(total) if name in self._integers else total

    def _add_deltas(self, deltas: list[tf.Tensor]) -> _Results:
        metrics = step_metrics.metric_variables(self._model)
        for variable, delta in zip(metrics, deltas, strict=True):
            keras_variables.stored(variable).assign_add(delta)
        logs: _Results = {}
        for path, metric, part in self._logged:
            _put(logs, path, functools.reduce(operator.getitem, part, metric.result()))
        return logs


def _count_rows(slices: Sequence[RowsOfCall]) -> None:
    """Make a call with the rows of all slices, as one process would."""
    whole = tf.nest.map_structure(_joined, *slices)
    metric, args, kwargs = whole.call
    leaves = tf.nest.flatten((args, kwargs))
    masked = map(keras_steps.with_mask, leaves, whole.masks)
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), [*masked])
    metric.update_state(*args, **kwargs)


def _joined(*parts: object) -> object:
    tensors = [tf.convert_to_tensor(p) if isinstance(p, np.ndarray) else p for p in parts]
    return slicing.join_rows(*tensors) if tf.is_tensor(tensors[0]) else tensors[0]


def _put(logs: _Results, path: Path, value: tf.Tensor) -> None:
    """Put a value, as a tensor, into a dictionary of dictionaries."""
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
    logs[path[-1]] = tf.convert_to_tensor(value)
