"""Metrics that workers count and the chief adds up."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Generic, TypeAlias, TypedDict, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_variables
from dtk.input import slicing
from dtk.nests import Array, Tree
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.trainer.replica import step_metrics
from dtk.trainer.tracing.traced_step import Path

# A structure of numbers: tensors while a step is traced, arrays when it has run.
ReportT = TypeVar("ReportT")

# Results of metrics by name, maybe in groups, as Keras's step returns them.
_Results: TypeAlias = "dict[str | int, _Results | tf.Tensor]"


class PackedReport(Generic[ReportT]):
    """A step's report as one tensor: each tensor fetched from a worker is a message."""

    def __init__(self, report: ReportT):
        flat = [tf.convert_to_tensor(number) for number in tf.nest.flatten(report)]
        self._structure = report
        self._kinds = [(tuple(t.shape), t.dtype.as_numpy_dtype) for t in flat]
        parts = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat]
        self.tensor = tf.concat([*parts, tf.zeros([0], tf.float64)], 0)

    def read(self, numbers: Array) -> ReportT:
        """Return the report of a step that has run."""
        results: list[Array] = []
        first = 0
        for shape, dtype in self._kinds:
            last = first + math.prod(shape)
            results.append(numbers[first:last].reshape(shape).astype(dtype))
            first = last
        return tf.nest.pack_sequence_as(self._structure, results)


class Counted(TypedDict):
    """Counts of a step: tensors while it is traced, arrays when it has run."""

    metrics: list[Array]  # what the step adds to each of the metrics' variables
    # this slice's part of the other numbers that Keras's step returned, by name
    logs: dict[str, Array]
    rows: Array  # rows of the slice


class MetricSum:
    """Sum of workers' counts over slices and steps, as Keras's logs."""

    def __init__(self, model: keras.Model):
        self._model = model
        self.logs: dict[str, Tree] = {}
        self._logged: list[tuple[Path, keras.Metric, Path]] = []
        self._add: tf.types.experimental.PolymorphicFunction | None = None

    def count(self, traced: FunctionalStep) -> Counted:
        """Collect what a step adds to the metrics, the other numbers it returned, and its rows."""
        self._logged = step_metrics.results_in(traced.step, traced.logs)
        return {
            "metrics": [traced.value(v) for v in step_metrics.metric_variables(self._model)],
            "logs": {
                name: tf.convert_to_tensor(traced.step.weighed(value))
                for name, value in step_metrics.numbers_of(traced.step, traced.logs)
            },
            "rows": slicing.count_rows(traced.data),
        }

    def add(self, counted: Sequence[Counted]) -> None:
        """Add the counts of a batch's slices to the chief's metrics; update the logs."""
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
            self.logs[name] = sum(c["logs"][name] for c in counted)

    def _add_deltas(self, deltas: list[tf.Tensor]) -> _Results:
        metrics = step_metrics.metric_variables(self._model)
        for variable, delta in zip(metrics, deltas, strict=True):
            keras_variables.stored(variable).assign_add(delta)
        logs: _Results = {}
        for path, metric, part in self._logged:
            _put(logs, path, functools.reduce(operator.getitem, part, metric.result()))
        return logs


def _put(logs: _Results, path: Path, value: tf.Tensor) -> None:
    """Put a value, as a tensor, into a dictionary of dictionaries."""
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
    logs[path[-1]] = tf.convert_to_tensor(value)
