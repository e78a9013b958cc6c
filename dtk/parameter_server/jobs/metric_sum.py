"""Metrics that workers count and the chief adds up."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_variables
from dtk.input import slicing
from dtk.nests import Array, Nest
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.trainer.replica import step_metrics
from dtk.trainer.tracing.traced_step import Path

# Results of metrics by name, maybe in groups, as Keras's step returns them.
_Results: TypeAlias = "dict[str | int, _Results | tf.Tensor]"


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
        self.logs: dict[str, Nest] = {}
        self._logged: list[tuple[Path, keras.Metric, Path]] = []
        self._add: tf.types.experimental.PolymorphicFunction | None = None

    def count(self, traced: FunctionalStep, data: Nest) -> Counted:
        """Collect what a step adds to the metrics, the other numbers it returned, and its rows."""
        self._logged = step_metrics.results_in(traced.step, traced.logs)
        return {
            "metrics": [
                traced.scope.get_current_value(v)
                for v in step_metrics.metric_variables(self._model)
            ],
            "logs": {
                name: tf.convert_to_tensor(traced.step.weighed(value))
                for name, value in step_metrics.numbers_of(traced.step, traced.logs)
            },
            "rows": slicing.count_rows(data),
        }

    def add(self, counted: Sequence[Counted]) -> None:
        """Add the counts of a batch's slices to the chief's metrics; update the logs."""
        deltas = []
        for variable, *column in zip(
            step_metrics.metric_variables(self._model),
            *(c["metrics"] for c in counted),
            strict=True,
        ):
            deltas.append(tf.cast(np.sum(column, axis=0), keras_variables.stored(variable).dtype))
        if self._add is None:
            self._add = tf.function(self._adder(), autograph=False)
        self.logs.update(self._add(deltas))
        for name in counted[0]["logs"]:
            self.logs[name] = sum(c["logs"][name] for c in counted)

    def _adder(self) -> Callable[[list[tf.Tensor]], _Results]:
        model = self._model

        def add(deltas: list[tf.Tensor]) -> _Results:
            for variable, delta in zip(step_metrics.metric_variables(model), deltas, strict=True):
                keras_variables.stored(variable).assign_add(delta)
            logs: _Results = {}
            for path, metric, part in self._logged:
                _put(logs, path, functools.reduce(operator.getitem, part, metric.result()))
            return logs

        return add


def _put(logs: _Results, path: Path, value: tf.Tensor) -> None:
    """Put a value, as a tensor, into a dictionary of dictionaries."""
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
    logs[path[-1]] = tf.convert_to_tensor(value)
