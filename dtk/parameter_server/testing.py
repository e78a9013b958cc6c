"""Test and predict with workers behind parameter servers: the loops of `evaluate` and `predict`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_variables, tf_replicas, tf_servers
from dtk.input import slicing
from dtk.parameter_server import gradient_buffers, worker_data
from dtk.parameter_server.consistency_models import Async
from dtk.parameter_server.contract import LoopTrainer
from dtk.parameter_server.dispatch import Batch, Loop, Result, SliceTask, whole_batch
from dtk.parameter_server.functional_step import FunctionalStep, trace_functional_step
from dtk.parameter_server.scheduler import Piece, Schedule
from dtk.trainer.replica import replica_step


class Counting(Loop):
    """Loop whose workers count metrics, which the chief adds up.

    Args:
        trainer: The model's trainer.
        schedule: Makes what decides which slice may start.

    Attributes:
        logs: Loss and metrics of the batches so far, by name.
    """

    def __init__(self, trainer: LoopTrainer, schedule: Callable[[], Schedule]):
        super().__init__(trainer, schedule)
        self.logs: dict[str, Any] = {}
        self._logged: list = []
        self._add_metrics: tf.types.experimental.PolymorphicFunction | None = None

    def _state(
        self, tables: Sequence[keras.Variable]
    ) -> tuple[list[tuple[keras.Variable, tf.Tensor]], int]:
        """Return the values variables have in a worker's step, and the bytes read for that."""
        model = self.model
        metrics = replica_step.metric_variables(model)
        elsewhere = {id(v) for v in [*metrics, *tables, *self.trainer.rng_state_variables()]}
        pulled, read = gradient_buffers.pull(v for v in model.variables if id(v) not in elsewhere)
        counted = [(v, tf.zeros(v.shape, keras_variables.stored(v).dtype)) for v in metrics]
        return [*pulled, *counted], read

    def _count(self, traced: FunctionalStep, data: Any) -> dict:
        """Collect what a step adds to the metrics, other numbers it returned, and its rows."""
        self._logged = replica_step.results_in(traced.step, traced.logs)
        return {
            "metrics": [
                traced.scope.get_current_value(v) for v in replica_step.metric_variables(self.model)
            ],
            "logs": {
                name: traced.step.weighed(value)
                for name, value in replica_step.numbers_of(traced.step, traced.logs)
            },
            "rows": slicing.count_rows(data),
        }

    def _report_of(self, results: dict) -> tf.Tensor:
        self._report = gradient_buffers.Report(results)
        return self._report.tensor

    def _call(self, batch: Batch, piece: Piece, worker: int, *more: Any) -> tuple[dict, float]:
        """Run the traced step on a slice, on the worker whose thread this is.

        Returns:
            What it reported, and the slice's part of the batch's rows.
        """
        share = batch.counts[piece.slice] / batch.rows
        key = gradient_buffers.key_of(batch.spec)
        # Made on the chief, they go along with the call; made on the worker, each is a message.
        with tf.device(tf_servers.CHIEF):
            numbers = [tf.constant(n, tf.float32) for n in (share, batch.holders)]
            numbers += [tf.constant(n) if isinstance(n, np.ndarray) else n for n in more]

        def step(data: Any) -> np.ndarray:
            return self._functions[key](data, *numbers).numpy()

        if batch.pipelines is None:
            found = step(batch.parts[piece.slice])
        else:
            found = batch.pipelines.call(step, worker)
        return self._reports[key].read(found), share

    def _add_up(self, results: list[Result]) -> None:
        """Add what a batch's slices counted to the chief's metrics; renew the logs."""
        model = self.model
        deltas = []
        for variable, *column in zip(
            replica_step.metric_variables(model),
            *(r.outputs["metrics"] for r in results),
            strict=True,
        ):
            deltas.append(tf.cast(np.sum(column, axis=0), keras_variables.stored(variable).dtype))
        if self._add_metrics is None:
            self._add_metrics = tf.function(self._metric_adder(), autograph=False)
        self.logs.update(self._add_metrics(deltas))
        for name in results[0].outputs["logs"]:
            self.logs[name] = sum(r.outputs["logs"][name] for r in results)

    def _metric_adder(self) -> Callable[[list[tf.Tensor]], dict]:
        model = self.model

        def add(deltas: list[tf.Tensor]) -> dict:
            for variable, delta in zip(replica_step.metric_variables(model), deltas, strict=True):
                keras_variables.stored(variable).assign_add(delta)
            logs: dict = {}
            for path, metric, part in self._logged:
                put(logs, path, functools.reduce(operator.getitem, part, metric.result()))
            return logs

        return add


def put(logs: dict, path: tuple, value: Any) -> None:
    """Put a value into a dictionary of dictionaries.

    Args:
        logs: The outermost dictionary.
        path: Keys, from the outermost to the innermost.
        value: The value; it becomes a tensor.
    """
    for name in path[:-1]:
        logs = logs.setdefault(name, {})
    logs[path[-1]] = tf.convert_to_tensor(value)


class Testing(Counting):
    """Loop of `evaluate`'s batches: any order, nothing applied.

    Args:
        trainer: The model's trainer.
    """

    def __init__(self, trainer: LoopTrainer):
        strategy = trainer.strategy
        schedule = functools.partial(Schedule, Async().tau, strategy.slices)
        super().__init__(trainer, schedule)

    @property
    def ahead(self) -> int:
        """Batches that may be under way when `step` returns: workers shall find work waiting."""
        return 2 * self.strategy.workers

    def _batch(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> Batch:
        # Else a fast worker's rows would count more often than a slow one's.
        return super()._batch(batch, spec)._replace(bound=True)

    def _prepare(self, spec: Any) -> None:
        rng_state = self._take_rng_state()
        key = gradient_buffers.key_of(spec)
        if key not in self._functions:
            self._tables = keras_models.tables_of(self.model)
            scalar = tf.TensorSpec([], tf.float32)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec, scalar, scalar, rng_state)
            self._reports[key] = self._report

    def _step(
        self, data: Any, share: tf.Tensor, size: tf.Tensor, rng_state: tf.Tensor
    ) -> tf.Tensor:
        with tf_replicas.in_replica(self.strategy):
            state, _ = self._state(self._tables)
            data = whole_batch(data)
            rng_states = self._rng_states(rng_state)
            traced = trace_functional_step(
                self.model.test_step,
                data,
                self.model,
                share=share,
                size=size,
                world_sum=self.strategy.sum_over_slices,
                state=[*state, *rng_states],
                tables=self._tables,
                kinds=self.trainer.kinds_of("test"),
            )
            self._note_draws(traced, rng_states)
            return self._report_of(self._count(traced, data))

    def _compute(self, work: SliceTask, worker: int) -> Result:
        piece, batch = work
        return Result(*self._call(batch, piece, worker, self._rng_state_of(piece)))

    def _finish(self, step: int, results: list[Result]) -> None:
        self._add_up(results)


class Predicting(Loop):
    """Loop of `predict`'s batches: each cut into a slice per worker, rows put together in order.

    Args:
        trainer: The model's trainer.

    Attributes:
        outputs: The outputs of each batch so far.
    """

    def __init__(self, trainer: LoopTrainer):
        strategy = trainer.strategy
        schedule = functools.partial(Schedule, math.inf, strategy.workers)
        super().__init__(trainer, schedule)
        self.outputs: list = []

    def _prepare(self, spec: Any) -> None:
        rng_state = self._take_rng_state()
        key = gradient_buffers.key_of(spec)
        if key not in self._functions:
            self._tables = keras_models.tables_of(self.model)
            function = tf.function(self._step, autograph=False)
            self._functions[key] = function.get_concrete_function(spec, rng_state)

    def _step(self, data: Any, rng_state: tf.Tensor) -> Any:
        model = self.model
        with tf_replicas.in_replica(self.strategy):
            elsewhere = {id(v) for v in [*self._tables, *self.trainer.rng_state_variables()]}
            elsewhere |= {id(v) for v in replica_step.metric_variables(model)}
            state, _ = gradient_buffers.pull(v for v in model.variables if id(v) not in elsewhere)
            rng_states = self._rng_states(rng_state)
            traced = trace_functional_step(
                model.predict_step,
                replica_step.without_optionals(data),
                model,
                share=tf.constant(1.0),
                size=tf.constant(1.0),
                world_sum=lambda value: value,
                state=[*state, *rng_states],
                tables=self._tables,
            )
            self._note_draws(traced, rng_states)
            return traced.logs

    def _compute(self, work: SliceTask, worker: int) -> Result:
        piece, batch = work
        function = self._functions[gradient_buffers.key_of(batch.spec)]
        with tf.device(tf_servers.CHIEF):
            rng_state = tf.constant(self._rng_state_of(piece))
        outputs = function(batch.parts[piece.slice], rng_state)
        with tf.device(tf_servers.CHIEF):  # fetched here, where a lost worker is noticed
            outputs = tf.nest.map_structure(tf.identity, outputs, expand_composites=True)
        return Result(outputs, 1.0)

    def _finish(self, step: int, results: list[Result]) -> None:
        with tf.device(tf_servers.CHIEF):
            self.outputs.append(
                tf.nest.map_structure(
                    lambda *parts: tf.concat(parts, 0), *(r.outputs for r in results)
                )
            )
