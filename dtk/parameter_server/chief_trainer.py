"""Trainer on the chief: workers compute the steps of Keras's `fit`, `evaluate` and `predict`.

Keras's own loop runs on the chief. In place of the train function, dtk reads the next global batch,
hands its slices to workers, applies their gradients, and returns the logs so far; see `batch_jobs`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import (
    keras_data,
    keras_models,
    keras_variables,
    random_draws,
    tf_replicas,
    tf_servers,
)
from dtk.errors import NotDistributedError, at_rank
from dtk.input import slicing
from dtk.nests import Function, Specs, Tree
from dtk.parameter_server import functional_step, worker_data
from dtk.parameter_server.batch_jobs import Batch, PredictJob, TestJob, whole_batch
from dtk.parameter_server.evaluator import source_of
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.job_context import JobStrategy, JobTrainer, WholeStepNeeded
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.train_jobs import DownpourJob, NonFiniteStep, TrainJob
from dtk.pipelines import operations
from dtk.trainer.replica import comparing, metric_trial, self_test, step_metrics, step_trial
from dtk.trainer.strategy import Loop, StepFunction, tell
from dtk.trainer.tracing import lookups

# The argument of a function that Keras's loop calls: an iterator over slices, pipelines that
# workers read, or single batches.
_Batches: TypeAlias = "tf.data.Iterator | worker_data.Pipelines | Iterable[Tree]"


# How far apart two changes of a moving average may be, relative to the first, and their rounding.
_MOST_APART, _ROUNDING = 0.51, 1e-5


class ParameterServerTrainer(JobTrainer):
    """Trainer on the chief; the model's weights are on parameter servers."""

    def __init__(self, model: keras.Model, strategy: JobStrategy):
        super().__init__(model, strategy)
        self._training: TrainJob | None = None
        # Those that work inside `fit`, too.
        self._others: dict[str, TestJob | PredictJob] = {}

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of training; None before the first step."""
        return None if self._training is None else self._training.schedule

    def non_finite_step(self) -> NonFiniteStep | None:
        """Return the first step since the last call that was not finite."""
        if self._training is None:
            return None
        step, self._training.non_finite = self._training.non_finite, None
        return step

    def leaves_validation(self, asked: dict[str, object]) -> bool:
        """Return whether the evaluator validates instead of the chief.

        The chief validates anyway if a callback monitors the result.
        """
        callbacks = asked["callbacks"]
        listed = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
        waits = any(str(getattr(c, "monitor", "")).startswith("val_") for c in listed)
        return self.strategy.has_evaluator and source_of(callbacks) is not None and not waits

    # Data.

    def cut(self, dataset: keras_data.Dataset) -> keras_data.Dataset:
        """Cut every global batch into the slices of a step; keep workers' own pipelines."""
        if isinstance(dataset, worker_data.WorkerDataset):
            return dataset
        slices = self.strategy.slices
        return operations.cut_pipeline(dataset, range(slices), slices)

    def take_epoch_iterator(
        self, iterator: keras_data.CutEpochIterator | None = None, data_batch: Tree = None
    ) -> None:
        """Do as the base class, and let the workers finish when the data of an epoch ends."""
        if iterator is not None:
            self._check_steps(iterator)
        super().take_epoch_iterator(iterator, data_batch)
        if iterator is not None:
            iterator.at_end = self.flush

    def _check_steps(self, iterator: keras_data.CutEpochIterator) -> None:
        endless = isinstance(iterator.data_adapter.get_tf_dataset(), worker_data.WorkerDataset)
        if endless and iterator.steps_per_epoch is None:
            raise ValueError(
                "the workers read their own pipelines, which begin anew when they end, so the data "
                "does not tell how long an epoch is; give fit steps_per_epoch=, validation_steps=, "
                "and evaluate steps="
            )

    def new_epoch(self, epoch: int) -> None:
        if self._training is not None:
            self._training.new_epoch(epoch)

    def flush(self) -> None:
        """Wait until every step handed out is applied, and every batch counted."""
        for job in self._others.values():
            job.drain()
            job.close()
        # Last: inside `fit`, workers go back to training and may have steps to finish.
        if self._training is not None:
            self._training.drain()

    def explaining_losses(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call: callbacks read weights of the servers, too."""
        return self.strategy.pool.asking_servers()

    def end_call(self) -> None:
        """Let workers go back to training inside `fit`; stop them after the outermost call."""
        for job in self._others.values():
            job.close()
        if self.callbacks is None and self._training is not None:
            self._training.close()

    def _read(
        self, iterator: _Batches
    ) -> Iterator[tuple[slicing.Slices | worker_data.Pipelines, Specs]]:
        """Yield batches and the specification of their slices."""
        if isinstance(iterator, worker_data.Pipelines):
            yield from itertools.repeat((iterator, tf.data.IteratorSpec(iterator.element_spec)))
        if isinstance(iterator, tf.data.Iterator):
            spec = slicing.spec_of(iterator.element_spec.parts[0])
            for batch in iterator:
                yield batch, spec
            return
        slices = self.strategy.slices
        for batch in iterator:
            whole = keras_data.as_tensors(batch)
            yield slicing.cut_batch(whole, range(slices), slices), slicing.spec_of(whole)

    def make_trial(self, step_function: StepFunction, batch: slicing.Slices) -> ChiefTrial:
        return ChiefTrial(self, step_function, batch)

    # Functions that Keras calls.

    def make_train_function(self, force: bool = False) -> Loop:
        if self.model.train_function is None or force:
            self.bind_optimizers()
            exchange = self.strategy.exchange
            job = TrainJob(self) if exchange is None else DownpourJob(self, exchange)
            self.model.train_function = self._make_function(job)
            self._training = job
        return self.model.train_function

    def make_test_function(self, force: bool = False) -> Loop:
        if self.model.test_function is None or force:
            self._others["test"] = job = TestJob(self)
            self.model.test_function = self._make_function(job)
        return self.model.test_function

    def _make_function(self, job: TrainJob | TestJob) -> Loop:
        if self.model.run_eagerly:
            raise ValueError(
                "run_eagerly=True, but steps run on workers, as graphs; to debug them in Python "
                "start the script without parameter servers, with dtk.auto_strategy()"
            )

        def run(iterator: _Batches) -> dict[str, Tree]:
            done = 0
            for batch, spec in self._read(iterator):
                if isinstance(batch, slicing.Slices):
                    self._check(job, batch)
                elif not self.checks_of(job.name).tried_whole:
                    why = "the workers read pipelines of their own"
                    metrics, state = self._may_not_add_up(job.name)
                    self._tell_of_untried([*metrics, *state], why)
                    self.checks_of(job.name).tried_whole = True
                self._submit(job, batch, spec)
                done += 1
                if done == self.model.steps_per_execution:
                    break
            single = not isinstance(iterator, tf.data.Iterator | worker_data.Pipelines)
            if single or not done:
                job.drain()
            if not done:
                raise StopIteration
            return job.metrics.logs

        return run

    def _check(self, job: TrainJob | TestJob, batch: slicing.Slices) -> None:
        """Check before a step that its slices add up, if it is the first one or an audit is due."""
        checks, step_function = self.checks_of(job.name), getattr(self.model, f"{job.name}_step")
        if len(batch.parts) == 1:
            self.build_by(step_function, batch)
        else:
            if checks.is_due():
                job.drain()  # steps in flight move the weights that are compared
            with self._joining(job):
                self.check_step(job.name, step_function, batch)
        if not checks.tried_whole and (len(batch.parts) == 1 or job.is_joined):
            checks.tried_whole = True
            self._try_whole(job.name, step_function, slicing.joined(batch))
        checks.steps += 1

    def _try_whole(self, name: str, step_function: StepFunction, batch: slicing.Slices) -> None:
        """Try what must add up over whole batches: a script's metrics, and its layers' state."""
        model, (metrics, state) = self.model, self._may_not_add_up(name)
        if not (metrics or state):
            return
        trial = ChiefTrial(self, step_function, batch)
        try:
            trial.check_changes(state)
        except NotDistributedError:
            raise
        except (ValueError, tf.errors.InvalidArgumentError):  # a model for one size of batch
            self.metrics_of_all_rows += metrics
            self._tell_of_untried(state, "a few rows of a batch are too few")
            return
        calls = [call for call in trial.counted if call.metric in metrics]
        counting = metric_trial.Counting(
            model, {}, comparing.tolerance_of(model), served=True, by_batch=True
        )
        for doubt in metric_trial.doubts_of(calls, trial.rows, counting):
            self.metrics_of_all_rows.append(doubt.metric)
            told = doubt.told(cured=True, counts="the chief")
            tell(self.strategy, f"warning: model {model.name!r}: {told}")

    def _may_not_add_up(self, name: str) -> tuple[list[keras.Metric], list[keras.Variable]]:
        """Return a script's metrics and state whose changes may not add up over whole batches."""
        model, strategy = self.model, self.strategy
        covered = name == "test" and self.checks_of("train").tried_whole
        covered = covered and keras_models.is_from_keras(type(model).test_step)
        if covered or not self_test.is_wanted(strategy.self_test):
            return [], []
        metrics = [
            metric
            for metric in keras_models.foreign_metrics(model)
            if not keras_models.is_from_keras(type(metric).update_state)
            and metric not in self.metrics_of_all_rows
        ]
        # Where a step waits for the one before, it changes what that has left.
        at_once = name == "train" and strategy.consistency.tau
        return metrics, keras_models.foreign_state(model) if at_once else []

    def _tell_of_untried(
        self, parts: Sequence[keras.Metric | keras.Variable], why: str
    ) -> None:
        if names := [part.path if hasattr(part, "path") else part.name for part in parts]:
            message = (
                f"warning: model {self.model.name!r}: {names} cannot be tried, as {why}. Steps add "
                "up what they change: metrics must add sums over rows, and layers sums, or "
                "averages that move a little"
            )
            tell(self.strategy, message)

    @contextlib.contextmanager
    def _joining(self, job: TrainJob | TestJob | PredictJob) -> Iterator[None]:
        """Return a context in which steps that need all rows in one place are made to have them."""
        try:
            yield
        except WholeStepNeeded:
            step = f"the {job.name}_step of model {self.model.name!r}"
            needs = f"{step} needs all rows of a batch in one place"
            tell(self.strategy, f"warning: {needs}. {self_test.JOINED}")
            self.checks_of(job.name).joined = True

    def _submit(
        self,
        job: TrainJob | TestJob | PredictJob,
        batch: slicing.Slices | worker_data.Pipelines,
        spec: Specs,
    ) -> None:
        """Submit a batch, cut into slices unless its step needs all rows in one place."""
        if not isinstance(batch, slicing.Slices):
            job.submit(Batch.of(batch, spec, job.slices))
            return
        if not job.is_joined:
            with self._joining(job):  # if its trace raises, nothing is submitted
                job.submit(Batch.of(batch, spec, job.slices))
                return
        job.submit(Batch.of(slicing.joined(batch), spec, job.slices))

    def make_predict_function(self, force: bool = False) -> Callable[[list[Tree]], Tree]:
        if self.model.predict_function is not None and not force:
            return self.model.predict_function
        job, workers = PredictJob(self), self.strategy.workers
        self._others["predict"] = job

        def run(batches: list[Tree]) -> Tree:
            for data in batches:
                if isinstance(data, worker_data.Pipelines):
                    raise ValueError(
                        "predict gives a result for every row, in order, which pipelines of the "
                        "workers' own do not have; give it arrays or a tf.data.Dataset"
                    )
                slices = slicing.cut_batch(data, range(workers), workers)
                self._submit(job, slices, slicing.spec_of(data))
            job.drain()
            return job.take_outputs()

        self.model.predict_function = run
        return run

    def predict_on_batch(self, x: Tree) -> Tree:
        outputs = self.make_predict_function()([keras_data.as_tensors((x,))])
        return keras.tree.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )


# The self-test of the steps that workers take. The chief traces these steps anyway. So it computes
# a few rows as a whole, and again in as many parts as a step has slices, one after the other. Only
# rows of tables come from the servers.


class ChiefTrial(step_trial.Trial):
    """Trial on the chief, whose parts are the slices of a synchronous step."""

    strategy: JobStrategy

    gathers = False
    may_join = True

    def take(self, batch: slicing.Slices, seed: int = 0, many: bool = False) -> bool:
        # Workers are sent no slices without rows.
        sent = [one for one in zip(batch.parts, batch.counts, strict=True) if int(one[1])]
        parts, counts = zip(*sent, strict=True)
        return super().take(batch._replace(parts=parts, counts=counts), seed, many)

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
        kept: tf.Tensor | None = None,
        *,
        original: Function[tuple[tf.Tensor, tf.Tensor]],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean 0 and variance 1: moments that differ by slice are not a mistake here.

        Workers cannot have the moments of all rows.
        """
        mean, variance = original(x[:1], axes, keepdims)
        return tf.zeros_like(mean), tf.ones_like(variance)

    def _trace_whole(
        self, assigned: list[keras.Variable], whole: Tree, parts: tuple[Tree, ...]
    ) -> step_trial.Found:
        if keras_models.lacks_state(self.model):  # which a pure function cannot make
            with super()._global_numbers():
                return super()._trace_whole(assigned, whole, parts)
        rows = self._bounds[-1]
        with self._calls.noted():
            traced = self._traced(whole, (rows, 0, rows), 1, {})
        self.doubtful = step_trial.doubtful_in(traced.step)
        return self._added_up([traced]) | {"calls": self._calls.tensors()}

    def _trace_again(
        self, assigned: list[keras.Variable], whole: Tree, parts: tuple[Tree, ...]
    ) -> step_trial.Found:
        """Trace the step on all rows, and again where it has left the model's state."""
        rows = self._bounds[-1]
        first = self._traced(whole, (rows, 0, rows), 1, {})
        after = {id(v): first.value(v) for v in self.model.non_trainable_weights}
        return self._added_up([self._traced(whole, (rows, 0, rows), 1, {}, after)])

    def check_changes(self, variables: Sequence[keras.Variable]) -> None:
        """Refuse a step whose changes of variables do not add up, where steps do not wait.

        Two steps on the same rows, of which the second sees the first one's changes, must change
        what two do that begin at once. Of a moving average they nearly do.
        """
        once = self.whole().state
        moved = [v for v in variables if v.path in once]
        twice = self._compute("again", self._trace_again).state if moved else {}
        for variable in moved:
            path = variable.path
            before = np.asarray(keras_variables.stored(variable), "float64")
            change, later = once[path] - before, twice[path] - once[path]
            rounding = _ROUNDING * (np.abs(once[path]) + np.abs(change))
            wrong = np.abs(later - change) > _MOST_APART * np.abs(change) + rounding
            if not wrong.any():
                continue
            numbers = (f"{one[wrong][0]:.5g}" for one in (before, once[path], twice[path]))
            message = (
                f"the train_step of model {self.model.name!r} takes {path!r} from "
                f"{next(numbers)} to {next(numbers)}, and the same rows then take it to "
                f"{next(numbers)}. Here steps begin before others are applied, and what they "
                "change is added up: the variable would get values of no step. It must be a sum, "
                f"self.{variable.name}.assign_add(sum), or an average that moves by less than half "
                f"of the way, self.{variable.name}.assign(0.9 * self.{variable.name} + 0.1 * new). "
                'ParameterServerStrategy("sync") and AllReduceStrategy() apply one step before the '
                "next begins. Nothing was updated"
            )
            raise NotDistributedError(at_rank(self.strategy.rank, message))

    def _trace_replicas(self, kinds: Mapping[str, str]) -> step_trial.Trace:
        def trace(
            assigned: list[keras.Variable], whole: Tree, parts: tuple[Tree, ...]
        ) -> step_trial.Found:
            return self._added_up(
                [
                    self._traced(part, self._rows_of(number), len(parts), kinds)
                    for number, part in enumerate(parts)
                ]
            )

        return trace

    def _traced(
        self,
        data: Tree,
        bounds: tuple[tf.Tensor, tf.Tensor | int, tf.Tensor],
        size: int,
        kinds: Mapping[str, str],
        after: Mapping[int, tf.Tensor] | None = None,
    ) -> FunctionalStep:
        """Trace one slice's step, as a worker would take it; after another, with its values."""
        model, strategy = self.model, self.strategy
        rows, first, of_all = bounds
        random_draws.restart(rows, first, of_all, self.of_python)
        only = tf_replicas.as_only_replica() if size == 1 else contextlib.nullcontext()
        with tf_replicas.in_replica(strategy), tf.device(tf_servers.CHIEF), only:
            tables = keras_models.tables_of(model)
            pulled = functional_step.pulled_variables(model, tables)
            values = zip(pulled, functional_step.pull(pulled), strict=True)
            state = [(v, (after or {}).get(id(v), value)) for v, value in values]
            return functional_step.trace_functional_step(
                self.step_function,
                whole_batch(slicing.forget_rows(data)),
                model,
                share=tf.cast(rows / of_all, tf.float32),
                sum_over_replicas=tf.identity if size == 1 else strategy.sum_over_slices,
                state=[*state, *functional_step.zero_metrics(model)],
                tables=tables,
                kinds=kinds,
                notes_losses=size == 1,
                times=self._factor,
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
                    one.name: tf.cast(t.step.weighed(one.value), tf.float64)
                    for one in step_metrics.numbers_of(t.step, t.logs)
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
            "state": self._moved(traced),
            "logs": results | _merged(numbers, tf.add_n),
        }

    def _moved(self, traced: list[FunctionalStep]) -> dict[str, tf.Tensor]:
        """Return the values of the variables that steps move, as the servers move them."""
        pulled = {id(v): (v, value) for v, value in traced[0].state}
        own = [*step_metrics.metric_variables(self.model), *self.trainer.seed_states()]
        moved = {}
        for key in set(pulled) & set(traced[0].step.assigned) - {id(v) for v in own}:
            variable, before = pulled[key]
            changes = [tf.cast(t.value(variable) - before, tf.float64) for t in traced]
            pairs = zip(traced, changes, strict=True)
            change = tf.add_n([one.step.weighed(change) for one, change in pairs])
            change = tf.round(change) if before.dtype.is_integer else change
            moved[variable.path] = tf.cast(before, tf.float64) + change
        return moved

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
