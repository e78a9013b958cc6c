"""Trainer on the chief: workers compute the steps of Keras's `fit`, `evaluate` and `predict`.

Keras's own loop runs on the chief. In place of the train function, dtk reads the next global batch,
hands its slices to workers, applies their gradients, and returns the logs so far; see
`jobs/batch_dispatch.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.compat import keras_data, tf_datasets
from dtk.input import slicing
from dtk.nests import Nest, Specs
from dtk.parameter_server import evaluator, worker_data
from dtk.parameter_server.chief_trial import ChiefTrial
from dtk.parameter_server.consistency_models import Async
from dtk.parameter_server.job_context import JobStrategy, JobTrainer
from dtk.parameter_server.jobs.batch_dispatch import BatchDispatcher, SerialPhase
from dtk.parameter_server.jobs.batches import Batch, Batcher
from dtk.parameter_server.jobs.downpour import DownpourJob
from dtk.parameter_server.jobs.predict import PredictJob
from dtk.parameter_server.jobs.step_update import NonFiniteStep, StepUpdate
from dtk.parameter_server.jobs.test import TestJob
from dtk.parameter_server.jobs.train import TrainJob
from dtk.parameter_server.scheduler import Schedule
from dtk.trainer import feed
from dtk.trainer.strategy import Loop, StepFunction

# The argument of a function that Keras's loop calls: an iterator over slices, pipelines that
# workers read, or single batches.
_Batches: TypeAlias = "tf.data.Iterator | worker_data.Pipelines | Iterable[Nest]"


class ParameterServerTrainer(JobTrainer):
    """Trainer on the chief; the model's weights are on parameter servers."""

    def __init__(self, model: keras.Model, strategy: JobStrategy):
        super().__init__(model, strategy)
        self._dispatchers: dict[str, BatchDispatcher[object]] = {}
        self._update: StepUpdate | None = None

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of training; None before the first step."""
        dispatcher = self._dispatchers.get("train")
        return None if dispatcher is None else dispatcher.schedule

    def non_finite_step(self) -> NonFiniteStep | None:
        """Return the first step since the last call that was not finite."""
        if self._update is None:
            return None
        found, self._update.non_finite = self._update.non_finite, None
        return found

    def leaves_validation(self, asked: dict[str, object]) -> bool:
        """Return whether the evaluator validates instead of the chief."""
        return evaluator.leaves_validation(asked, self.strategy)

    # Data.

    def cut(self, dataset: feed.Dataset) -> feed.Dataset:
        """Cut every global batch into the slices of a step; keep workers' own pipelines."""
        if isinstance(dataset, worker_data.WorkerDataset):
            return dataset
        slices = self.strategy.slices
        return tf_datasets.cut_in_order(
            dataset,
            lambda given, ahead: slicing.cut_dataset(given, range(slices), slices, ahead=ahead),
        )

    def take_epoch_iterator(
        self, iterator: keras_data.TFEpochIterator | None = None, data_batch: Nest = None
    ) -> None:
        """Do as the base class, and let the workers finish when the data of an epoch ends."""
        if iterator is not None:
            self._check_steps(iterator)
        super().take_epoch_iterator(iterator, data_batch)
        if iterator is not None:
            keras_data.at_end_of_data(iterator, self.flush)

    def _check_steps(self, iterator: keras_data.TFEpochIterator) -> None:
        endless = isinstance(iterator.data_adapter.get_tf_dataset(), worker_data.WorkerDataset)
        if endless and iterator.steps_per_epoch is None:
            raise ValueError(
                "the workers read their own pipelines, which begin anew when they end, so the data "
                "does not tell how long an epoch is; give fit steps_per_epoch=, validation_steps=, "
                "and evaluate steps="
            )

    def new_epoch(self, epoch: int) -> None:
        """Begin the statistics of an epoch."""
        dispatcher = self._dispatchers.get("train")
        if dispatcher is not None:
            dispatcher.new_epoch(epoch)

    def flush(self) -> None:
        """Wait until every step handed out is applied, and every batch counted."""
        # Training comes last: inside `fit`, workers go back to it and may have steps to finish.
        for name, dispatcher in sorted(self._dispatchers.items(), key=_is_training):
            dispatcher.drain()
            if name != "train":
                dispatcher.close()

    def resume(self) -> None:
        """Let workers go back to training: a call inside `fit` has ended or failed."""
        for name, dispatcher in self._dispatchers.items():
            if name != "train":
                dispatcher.close()

    def release(self) -> None:
        """Stop the workers: the outermost call is over."""
        for dispatcher in self._dispatchers.values():
            dispatcher.close()

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
        for given in iterator:
            whole = tf.nest.map_structure(
                lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), given
            )
            yield slicing.cut(whole, range(slices), slices), slicing.spec_of(whole)

    def make_trial(self, step_function: StepFunction, batch: slicing.Slices) -> ChiefTrial:
        """Make the trial of a step cut over workers; see `DistributedTrainer.make_trial`."""
        return ChiefTrial(self, step_function, batch)

    # Functions that Keras calls.

    def make_train_function(self, force: bool = False) -> Loop:
        """Make the function that Keras calls for batches of `fit`; see `Model`."""
        if self.model.train_function is None or force:
            self.bind_optimizers()
            strategy = self.strategy
            serial_phase = SerialPhase(strategy.consistency, self.model)
            job: TrainJob | DownpourJob
            if strategy.exchange is None:
                job, batcher = TrainJob(self, serial_phase), None
            else:
                job = DownpourJob(self, strategy.exchange, serial_phase)
                batcher = Batcher(strategy.exchange.push_every)
            self._update = job.update
            dispatcher = BatchDispatcher(
                strategy,
                functools.partial(Schedule.of, strategy.consistency, strategy.workers),
                job,
                # If every worker has one slice of each step.
                in_turns=strategy.slices == strategy.workers,
                serial_phase=serial_phase,
                batcher=batcher,
            )
            self.model.train_function = self._make_function("train", job, dispatcher)
        return self.model.train_function

    def make_test_function(self, force: bool = False) -> Loop:
        """Make the function that Keras calls for batches of `evaluate`; see `Model`."""
        if self.model.test_function is None or force:
            job = TestJob(self)
            new_schedule = functools.partial(Schedule, Async().tau, self.strategy.slices)
            dispatcher = BatchDispatcher(self.strategy, new_schedule, job, in_turns=True)
            self.model.test_function = self._make_function("test", job, dispatcher)
        return self.model.test_function

    def _make_function(
        self,
        name: str,
        job: TrainJob | DownpourJob | TestJob,
        dispatcher: BatchDispatcher[object],
    ) -> Loop:
        if self.model.run_eagerly:
            raise ValueError(
                "run_eagerly=True, but steps run on workers, as graphs; to debug them in Python "
                "start the script without parameter servers, with dtk.auto_strategy()"
            )
        self._dispatchers[name] = dispatcher

        def run(iterator: _Batches) -> dict[str, Nest]:
            done = 0
            for batch, spec in self._read(iterator):
                if isinstance(batch, slicing.Slices):
                    step_function = getattr(self.model, f"{name}_step")
                    if len(batch.parts) > 1:
                        self.try_step(name, step_function, batch)
                    else:  # a single part: nothing is added up
                        self.build_by(step_function, batch)
                dispatcher.submit(Batch.of(batch, spec, self.strategy.slices))
                done += 1
                if done == self.model.steps_per_execution:
                    break
            if not done:
                dispatcher.drain()
                raise StopIteration
            if not isinstance(iterator, tf.data.Iterator | worker_data.Pipelines):
                dispatcher.drain()
            return job.logs

        return run

    def make_predict_function(self, force: bool = False) -> Callable[[list[Nest]], Nest]:
        """Make the function that Keras calls for batches of `predict`; see `Model`."""
        if self.model.predict_function is not None and not force:
            return self.model.predict_function
        job, workers = PredictJob(self), self.strategy.workers
        new_schedule = functools.partial(Schedule, math.inf, workers)
        dispatcher = BatchDispatcher(self.strategy, new_schedule, job, in_order=True)
        self._dispatchers["predict"] = dispatcher

        def run(batches: list[Nest]) -> Nest:
            for data in batches:
                if isinstance(data, worker_data.Pipelines):
                    raise ValueError(
                        "predict gives a result for every row, in order, which pipelines of the "
                        "workers' own do not have; give it arrays or a tf.data.Dataset"
                    )
                slices = slicing.cut(data, range(workers), workers)
                dispatcher.submit(Batch.of(slices, slicing.spec_of(data), workers))
            dispatcher.drain()
            return job.take_outputs()

        self.model.predict_function = run
        return run

    def predict_on_batch(self, x: Nest) -> Nest:
        """Predict for one batch; replaces `Model.predict_on_batch`."""
        batch = tf.nest.map_structure(tf.convert_to_tensor, (x,))
        outputs = self.make_predict_function()([batch])
        return keras.tree.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )


def _is_training(item: tuple[str, BatchDispatcher[object]]) -> bool:
    return item[0] == "train"
