"""Self-test, on the chief, of the steps that workers behind parameter servers take.

The chief traces the workers' steps anyway. So it computes a few rows as a whole, and again in as
many parts as a step has slices, one after the other. Only rows of tables come from the servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from dtk.compat import keras_models, random_draws, tf_replicas, tf_servers
from dtk.input import slicing
from dtk.nests import Function, Tree
from dtk.parameter_server.batch_jobs import whole_batch
from dtk.parameter_server.functional_step import (
    FunctionalStep,
    pull,
    pulled_variables,
    trace_functional_step,
    zero_metrics,
)
from dtk.parameter_server.job_context import JobStrategy
from dtk.trainer.replica import step_metrics, step_trial
from dtk.trainer.tracing import lookups


class ChiefTrial(step_trial.Trial):
    """Trial on the chief, whose parts are the slices of a synchronous step."""

    strategy: JobStrategy

    gathers = False

    def _ranks(self, batch: slicing.Slices) -> Sequence[int]:
        return range(len(batch.parts))

    @contextlib.contextmanager
    def _global_numbers(self) -> Iterator[None]:
        yield  # `trace_functional_step` has its own context

    def _moments(
        self,
        x: tf.Tensor,
        axes: int | Sequence[int],
        keepdims: bool = False,
        *,
        original: Function[tuple[tf.Tensor, tf.Tensor]],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean 0 and variance 1: moments that differ by slice are not a mistake here.

        Workers cannot have the moments of all rows.
        """
        mean, variance = original(x[:1], axes, keepdims)
        return tf.zeros_like(mean), tf.ones_like(variance)

    def _trace_whole(self, assigned: list[keras.Variable]) -> step_trial.Found:
        with self._calls.noted():
            traced = self._traced(self._whole_data, self.rows, 0, 1, {})
        return self._added_up([traced]) | {"calls": self._calls.tensors()}

    def _trace_replicas(
        self, kinds: Mapping[str, str]
    ) -> Callable[[list[keras.Variable]], step_trial.Found]:
        def trace(assigned: list[keras.Variable]) -> step_trial.Found:
            traced, first = [], 0
            for part, rows in zip(self._few.parts, self.parts, strict=True):
                if rows:
                    traced.append(self._traced(part, rows, first, len(self.parts), kinds))
                first += rows
            return self._added_up(traced)

        return trace

    def _traced(
        self, data: Tree, rows: int, first: int, size: int, kinds: Mapping[str, str]
    ) -> FunctionalStep:
        """Trace one slice's step, as a worker would take it."""
        model, strategy = self.model, self.strategy
        random_draws.restart(rows, first, self.rows)
        with tf_replicas.in_replica(strategy), tf.device(tf_servers.CHIEF):
            tables = keras_models.tables_of(model)
            pulled = pulled_variables(model, tables)
            state = zip(pulled, pull(pulled), strict=True)
            return trace_functional_step(
                self.step_function,
                whole_batch(slicing.forget_rows(data)),
                model,
                share=tf.constant(rows / self.rows, tf.float32),
                world_sum=tf.identity if size == 1 else strategy.sum_over_slices,
                state=[*state, *zero_metrics(model)],
                tables=tables,
                kinds=kinds,
            )

    def _added_up(self, traced: list[FunctionalStep]) -> step_trial.Found:
        """Add up the results of slices, as the chief and the servers do."""
        metrics = step_metrics.metric_variables(self.model)
        totals = [tf.add_n([t.value(v) for t in traced]) for v in metrics]
        with tf_replicas.in_replica(self.strategy):
            with keras.StatelessScope(state_mapping=list(zip(metrics, totals, strict=True))):
                results = step_trial.results_of(self.model)
            numbers = [
                {
                    name: tf.cast(t.step.weighed(value), tf.float64)
                    for name, value in step_metrics.numbers_of(t.step, t.logs)
                }
                for t in traced
            ]
            terms = [step_trial.terms_of(t.step) for t in traced]
            gradients = [step_trial.gradients_of(t.applied) for t in traced]
        sparse = [step_trial.slices_of(t.applied) for t in traced]
        return {
            "terms": _merged(terms, lambda column: tf.concat(column, 0)),
            "gradients": _merged(gradients, tf.add_n),
            "squares": _merged(sparse, lambda column: self._squares(traced, column)),
            "state": {},
            "logs": results | _merged(numbers, tf.add_n),
        }

    def _squares(
        self, traced: list[FunctionalStep], column: Sequence[tf.IndexedSlices]
    ) -> tf.Tensor:
        """Square one gradient's slices of all steps, summed as the servers sum them."""
        lines = tf.cast(column[0].dense_shape[0], tf.int64)
        tagged = [
            lookups.tagged(g, lookups.pieces_of(g.indices, one.step.graph), lines)
            for one, g in zip(traced, column, strict=True)
        ]
        return lookups.squares_of(lookups.sum_of_tagged(tagged, lines))


def _merged(
    parts: Sequence[Mapping[str, tf.Tensor]], merge: Callable[[list[tf.Tensor]], tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Merge the tensors that slices have by the same name."""
    return {name: merge([part[name] for part in parts]) for name in parts[0]}
