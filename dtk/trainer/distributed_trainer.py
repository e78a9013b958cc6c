"""Train a plain Keras model over the replicas of a strategy.

data of fit       keras_data         global batches, cut by rank
a step            traced_step        losses weighed by the replica's share of the rows
                  reducing_optimizer gradients summed once for each update, before they are clipped
                  step_metrics       metrics and moving statistics of all replicas
around fit        fit                callbacks; rank_checks: comparisons between ranks
state             model_state        which variables ranks share
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import keras
import tensorflow as tf

from dtk import placement
from dtk.cluster import progress
from dtk.compat import (
    keras_data,
    keras_models,
    keras_optimizers,
    keras_variables,
    tf_datasets,
    tf_extended,
    tf_replicas,
)
from dtk.input import digests, slicing
from dtk.nests import Specs, Tree
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import rank_checks, shared_weights
from dtk.trainer.replica import (
    compiled_step,
    predict_trial,
    reducing_optimizer,
    replica_step,
    self_test,
    step_checks,
    step_metrics,
    step_times,
    step_trial,
    trial_reasons,
)
from dtk.trainer.step_recorder import StepRecorder
from dtk.trainer.strategy import Loop, StepFunction, Strategy, tell


class DistributedTrainer(ModelState):
    """Training of one model compiled under one strategy: its step functions, data and checks."""

    def __init__(self, model: keras.Model, strategy: Strategy):
        super().__init__(model, strategy)
        self.feed = keras_data.Feed(model, strategy, self.cut if self.takes_over else None)
        self.recorder = StepRecorder(model, strategy, self.feed)
        self.callbacks: keras.callbacks.CallbackList = None
        self.stop_agreed = False  # whether all ranks stop after the step that ends next
        self.checks: dict[str, step_checks.StepChecks] = {}  # of train steps, and of test steps
        self.calls: collections.Counter[str] = collections.Counter()
        self._unread = False  # whether ranks have yet to compare the first batch of a call
        self._untried: set[str] = set()  # steps whose function was made anew
        self._digests: dict[str, tf.Variable] = {}
        # what train steps read that is not the model's, such as what a callback sets
        self._only_read: list[tf.Variable] = []

    def compiled(self) -> None:
        """Forget what was learned about the model's steps; `compile` has just run."""
        self.checks.clear()
        self.metrics_of_all_rows.clear()
        self.calls.clear()

    @property
    def takes_over(self) -> bool:
        """Whether dtk replaces the model's step functions; a single replica runs plain Keras."""
        return self.strategy.num_replicas_in_sync > 1 or self.strategy.world.size > 1

    def is_local_call(self, name: str) -> bool:
        """Return whether a call computes this rank's data without the other ranks."""
        del name
        return False

    def bind_optimizers(self) -> None:
        """Make the model's optimizers reduce their gradients over the replicas."""
        for optimizer in shared_optimizer.optimizers_of(self.model):
            reducing_optimizer.take_over(optimizer, self.strategy)

    # Data.

    def cut(self, dataset: keras_data.Dataset) -> tf.data.Dataset:
        """Cut a dataset of global batches for this process; a rank's own batches are its rows."""
        if tf_datasets.is_of_this_rank(dataset):
            return keras_data.cut_own(dataset)
        return self.strategy.extended.cut(tf_datasets.read_alone(dataset))

    def cut_batches(self, batches: Iterable[Tree]) -> list[slicing.Slices]:
        """Cut single global batches for this process."""
        return keras_data.cut_batches(batches, self.strategy)

    def take_epoch_iterator(
        self, iterator: keras_data.CutEpochIterator | None = None, data_batch: Tree = None
    ) -> None:
        """Give Keras's epoch iterator cut batches, and build the model from their shapes."""
        if iterator is not None:
            self._unread = self._unread or not tf_replicas.computes_as_one_replica()
            data_batch = self.feed.take(iterator, self.callbacks)
        model, strategy = self.model, self.strategy
        if not keras_models.is_built(model) and _has_shapes(data_batch):
            counted = keras_models.counted_elsewhere(model)
            if counted and self.takes_over:
                message = f"metrics {counted} have counted for another model, and start at zero for"
                cure = "in one process Keras would keep their counts. Make metrics for each model"
                tell(strategy, f"{message} model {model.name!r}; {cure}")
            with strategy.scope():
                keras_models.build_from(model, data_batch)

    def prepare_step(self) -> None:
        """Prepare the model, as built by now, for steps over all replicas."""
        compiled_step.recheck_jit(self.model, self.strategy)
        self.bind_optimizers()
        self._take_metrics()

    def _take_metrics(self) -> None:
        """Sum the state of metrics over replicas when it is read."""
        # Metrics that were created outside the scope hold the state of one replica only.
        metrics = step_metrics.metric_variables(self.model)
        read = [v for v in metrics if keras_variables.made_outside_scope(v)]
        if read:
            self.strategy.take_metric_state(read)

    def before_fit(self, asked: dict[str, object]) -> None:
        """Do nothing; an override may run here in place of `fit` and end the process."""

    def leaves_validation(self, asked: dict[str, object]) -> bool:
        """Return whether another process validates in place of this one."""
        del asked
        return False

    def settle_counts(self) -> None:
        """Agree on the optimizers' steps after an epoch on GPUs.

        Where Keras does not know how long a dataset is, it reads beyond the end. The optimizer
        counts that step, too, if the GPU is fast enough: all else of the step waits for data.
        """
        if not placement.is_gpu(placement.computing(self.strategy)):
            return
        for optimizer in shared_optimizer.optimizers_of(self.model):
            for member in keras_optimizers.members(optimizer):
                steps = keras_optimizers.steps_of(member)
                counts = [int(copy.numpy()) for copy in keras_variables.components(steps.value)]
                most = self.strategy.world.allreduce(tf.constant(max(counts), tf.int64), "max")
                if {int(most)} != set(counts):
                    steps.assign(most)

    # Step functions.

    def make_step_function(self, step_function: StepFunction, name: str) -> Loop:
        """Make Keras's loop around one step, over cut batches."""
        model, strategy = self.model, self.strategy
        if name in self._digests:  # made anew, as by make_train_function(force=True)
            self._untried.add(name)
            self.checks_of(name).kinds = None
        sequence = strategy.new_sequence(name)
        read = self._digests[name] = tf.Variable(0, dtype=tf.int64, trainable=False)

        @tf.autograph.experimental.do_not_convert
        def step(batch: slicing.Slices) -> Tree:
            if slicing.is_known(batch.digest):
                read.assign(digests.add(read, batch.digest))
            if name == "train":
                self.recorder.note_arrival(batch)
            with strategy.sequence(sequence):
                kinds, tried = self.kinds_of(name), self.checks_of(name).trial is not None
                logs = replica_step.run_step(step_function, batch, model, strategy, kinds, tried)
            if name == "train":
                self._note_reads()
            return logs

        # `strategy.run` patches Keras where replicas trace the step, whenever that is: patches for
        # each step took a fifth of a small model's.
        patched = functools.partial(replica_step.patched, model, self.metrics_of_all_rows)
        vars(step)["_dtk_trace_context"] = patched
        function = keras_models.make_function(model, step)

        def call(iterator: tf.data.Iterator, function: Loop = function) -> Tree:
            with progress.inside(f"{name} step"):
                return function(iterator)

        def run(iterator: tf.data.Iterator | Iterable[Tree]) -> Tree:
            is_new = self._unread or name in self._untried
            if not isinstance(iterator, tf.data.Iterator):
                slices = self.cut_batches(iterator)
                self.check_step(name, step_function, slices[0])
                iterator = iter(slices)
            elif is_new or self.checks_of(name).is_due():
                try:
                    first, iterator = digests.first_of(iterator, model.steps_per_execution)
                except StopIteration:
                    # A resumed epoch has no step left, so the next one has the first batch. The
                    # optimizer counts Keras's attempt to read beyond the end, as without the
                    # interruption; a step that it traces has not been tried, and is dropped.
                    unread = keras_models.make_function(model, step) if is_new else function
                    return call(iterator, unread)
                if self._unread:
                    read.assign(0)
                    rank_checks.check_same_batch(strategy, first)
                self._unread = False
                self._untried.discard(name)
                self.check_step(name, step_function, first)
                if is_new and name == "train":
                    step_times.before_training(call, first, model, strategy)
            self.checks_of(name).steps += model.steps_per_execution
            return call(iterator)

        return run

    def checks_of(self, name: str) -> step_checks.StepChecks:
        """Return the checks of the steps of a name, such as "train"."""
        if name not in self.checks:
            self.checks[name] = step_checks.StepChecks(self, self.make_trial)
        return self.checks[name]

    def kinds_of(self, name: str) -> Mapping[str, str]:
        """Return the kinds of a step's terms.

        A step that was not tried has the kinds of the train step: both compute the same losses.
        """
        own = self.checks_of(name)
        return (own if own.trial is not None else self.checks_of("train")).kinds or {}

    def check_step(self, name: str, step_function: StepFunction, batch: slicing.Slices) -> None:
        """Check that parts of a step add up: before the first of a kind, and where it is due."""
        strategy, model = self.strategy, self.model
        known = int(batch.rows) if slicing.is_known(batch.rows) else None
        self_test.check_stateful(model, known, strategy)
        asked = self_test.is_wanted(strategy.self_test)
        self.build_by(step_function, batch)
        if name not in ("train", "test"):
            return  # a callback's step, which sums nothing over replicas
        checks = self.checks_of(name)
        if checks.is_due():
            checks.audit(batch)
        if checks.kinds is not None or not asked or strategy.world.name == "null":
            return
        # A test step of Keras's own computes what the train step has, but where it is told not to.
        covered = name == "test" and self.checks_of("train").kinds is not None
        covered = covered and keras_models.is_from_keras(type(model).test_step)
        reasons = trial_reasons.of_step(model, f"{name}_step")
        told = trial_reasons.told_whether_it_trains(model)
        checks.try_step(step_function, batch, told if covered else reasons)

    def build_by(self, step_function: StepFunction, first: slicing.Slices) -> None:
        """Let one replica build the variables that only a step of the script can build.

        Replicas that are threads would wait for each other in the middle of a layer, and parameter
        servers must know their variables before a step is traced.
        """
        if keras_models.lacks_state(self.model):
            self.make_trial(step_function, first).whole()
            self._take_metrics()

    def make_trial(self, step_function: StepFunction, batch: slicing.Slices) -> step_trial.Trial:
        """Make the trial of a step on a few rows, see `self_test`."""
        return step_trial.Trial(self, step_function, batch)

    def _note_reads(self) -> None:
        """Note what the step being traced reads that no other comparison looks at."""
        if tf.executing_eagerly() or self.strategy.world.size == 1:
            return
        parts = [v for one in shared_optimizer.sharded_of(self.model) for v in one.parts.values()]
        known = map(keras_variables.stored, [*step_trial.changed_by_training(self.model), *parts])
        kept = {id(v) for one in known for v in keras_variables.components(one)}
        read = [v for v in tf_extended.variables_only_read() if id(v) not in kept]
        numbers = [v for v in read if v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool]
        self._only_read = [v for v in numbers if v.shape.is_fully_defined()]

    def check_same_reads(self, when: str) -> None:
        """Raise on every rank when steps read other values on one of them."""
        if self.strategy.world.size > 1 and self.same_data:
            shared_weights.check_same_reads(self, self._only_read, when)

    def check_same_reading(self, name: str, when: str) -> None:
        """Raise on every rank when ranks have read different batches."""
        read = self._digests.get(name)
        if read is not None and self.strategy.world.size > 1:
            rank_checks.check_same_digest(self.strategy, int(read.numpy()), when)

    @contextlib.contextmanager
    def reading_of(self, name: str) -> Iterator[None]:
        """Return a context in which `evaluate` or `predict` must read the same on all ranks."""
        unread = self._unread  # whether `fit`, which may be around it, has yet to read
        try:
            if name == "predict" and self.strategy.world.size > 1:
                with rank_checks.comparing_batches(self.strategy):
                    yield
            else:
                yield
                self.check_same_reading("test", "after evaluate")  # if there are other ranks
        finally:
            self._unread = unread

    def make_train_function(self, force: bool = False) -> Loop:
        """Make the model's train function, in place of `Model.make_train_function`."""
        model = self.model
        if model.train_function is None or force:
            model.train_function = self.make_step_function(model.train_step, "train")
        return model.train_function

    def make_test_function(self, force: bool = False) -> Loop:
        """Make the model's test function, in place of `Model.make_test_function`."""
        model = self.model
        if model.test_function is None or force:
            model.test_function = self.make_step_function(model.test_step, "test")
        return model.test_function

    def make_predict_function(self, force: bool = False) -> Callable[[list[Tree]], Tree]:
        """Make the model's predict function: every rank gets every row, in order."""
        model = self.model
        if model.predict_function is None or force:
            predict = replica_step.make_predict_function(model, self.strategy)
            model.predict_function = self._with_first_prediction(predict)
        return model.predict_function

    def _with_first_prediction(
        self, predict: Callable[[list[Tree]], Tree]
    ) -> Callable[[list[Tree]], Tree]:
        """Let the first batch build layers, and show that rows are predicted independently."""
        model, strategy = self.model, self.strategy
        one_model = strategy.num_replicas_in_sync > 1 and strategy.model_communicator.size == 1
        checks = one_model and bool(self_test.is_wanted(strategy.self_test))

        @functools.wraps(predict)
        def first(batches: list[Tree]) -> Tree:
            model.predict_function = predict
            self._build_by_predicting(batches[0])
            outputs = predict(batches)
            if checks and trial_reasons.of_predict(model):
                mine = tf.nest.map_structure(
                    lambda leaf: keras_variables.components(leaf)[0], batches[0]
                )
                predict_trial.check_predict(model, mine, strategy)
            return outputs

        return first

    def _build_by_predicting(self, batch: Tree) -> None:
        """Let one replica build the layers that only a prediction builds; see `build_by`."""
        if keras_models.lacks_layers(self.model):
            replica_step.build_by_predicting(self.model, batch, self.strategy)
            shared_weights.agree_on_weights(self)

    def predict_on_batch(self, x: Tree) -> Tree:
        """Predict a global batch, in place of `Model.predict_on_batch`."""
        return replica_step.predict_on_batch(self.make_predict_function(), x, self.strategy)

    def new_epoch(self, epoch: int) -> None:
        """Prepare for an epoch of `fit`."""

    def flush(self) -> None:
        """Finish steps in flight, and average local weights."""
        self.synchronize_weights()

    def synchronize_weights(self) -> None:
        """Average the weights of replicas that take local steps. All ranks call it together."""
        blocks = shared_optimizer.blocks_of(self.model)
        if all(bool(block.is_closed()) for block in blocks):
            return
        for block in blocks:
            block.close()
        weight = blocks[0].weight.read_value()
        shared_weights.average(self.model.non_trainable_weights, weight, self.strategy)

    def explaining_losses(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call, in which errors of lost tasks say what is lost."""
        return contextlib.nullcontext()

    def end_call(self) -> None:
        """End `fit`, `evaluate`, `predict` or a single step; the last three may be inside `fit`."""


def _has_shapes(data_batch: Tree | Specs) -> bool:
    """Return whether a batch has the shapes to build a model; else the first step builds it."""
    leaves = tf.nest.flatten(data_batch)
    return all(getattr(getattr(leaf, "shape", None), "rank", 0) is not None for leaf in leaves)
