"""Train a plain Keras model over the replicas of a strategy.

what fit reads    epoch_data         global batches, cut by rank
a step            traced_step        losses that count with their share of the rows
                  shared_optimizer   gradients reduced once, where every later step sees them
                  replica_step       metrics and moving statistics of the whole world
around fit        fit_calls          callbacks; rank_checks: what ranks must agree on
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

import keras
import tensorflow as tf

from dtk.compat import keras_data, keras_models, keras_steps
from dtk.errors import at_rank
from dtk.input import digests, slicing
from dtk.trainer import (
    epoch_data,
    fit_calls,
    rank_checks,
    replica_step,
    self_test,
    shared_optimizer,
    shared_weights,
    sync_batch_norm,
    traced_step,
    trial,
)
from dtk.trainer.contract import Strategy, StrategyT


class DistributedTrainer(Generic[StrategyT]):
    """What dtk keeps about one model compiled under one strategy.

    Attributes:
        model: The model.
        strategy: Its strategy.
        feed: The data of the running `fit`.
        callbacks: The `keras.callbacks.CallbackList` of the running `fit`; None outside.
        kinds: What is known of the terms of each step, see `loss_terms`; of those tried so far.
        calls: How often single batches were given, by the method's name.
    """

    def __init__(self, model: keras.Model, strategy: StrategyT):
        self.model = model
        self.strategy = strategy
        self.feed = epoch_data.Feed(model, strategy, self.distribute)
        self.callbacks: keras.callbacks.CallbackList = None
        self.kinds: dict[str, dict[str, str]] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self._unread = False
        self._digests: dict[str, tf.Variable] = {}
        self._carried: dict[str, dict] = {}

    def compiled(self) -> None:
        """Called when the model was compiled, maybe anew: nothing is known of its steps."""
        self.kinds.clear()
        self.calls.clear()

    @property
    def takes_over(self) -> bool:
        """Whether the model's step functions are replaced; in a world of one it is plain Keras."""
        return self.strategy.num_replicas_in_sync > 1

    def bind_optimizers(self) -> None:
        """Make the model's optimizers reduce their gradients over the replicas."""
        for optimizer in shared_optimizer.optimizers_of(self.model):
            shared_optimizer.bind(optimizer, self.strategy)

    # Data.

    def cut(self, dataset: epoch_data.Dataset) -> tf.data.Dataset:
        """Dataset of `Slices` for this process, from whatever `fit` was given."""
        return epoch_data.cut(dataset, self.strategy)

    def distribute(self, dataset: epoch_data.Dataset) -> epoch_data.Dataset:
        """What Keras is to read instead of a dataset of global batches."""
        if self.takes_over:
            return self.cut(dataset)
        return self.strategy.experimental_distribute_dataset(dataset)

    def take_epoch_iterator(
        self, iterator: keras_data.TFEpochIterator | None = None, data_batch: Any = None
    ) -> None:
        """Feed Keras's epoch iterator with cut batches, and build the model from their shapes."""
        model, strategy = self.model, self.strategy
        if iterator is not None:
            self._unread = True
            if self.takes_over:
                dataset = epoch_data.given_to(iterator)
                slices = epoch_data.tuned_for(iterator.data_adapter, self.cut(dataset))
                keras_data.set_dataset(iterator, slices)
                data_batch = _first_part(slices.element_spec)
            else:
                dataset = epoch_data.tuned_for(
                    iterator.data_adapter, keras_data.dataset_of(iterator)
                )
                keras_data.set_dataset(iterator, dataset)
                data_batch = _first_part(dataset.element_spec)
            if self.callbacks is not None and self.feed.iterator is None:
                self.feed.begin(iterator, dataset, self.callbacks)
        with strategy.scope():
            keras_models.build_from(model, data_batch)
        if not self.takes_over:
            return
        refuse_jit(model.jit_compile or None, strategy)
        self._take_metrics()
        self.bind_optimizers()

    def _take_metrics(self) -> None:
        """Make the state of metrics created outside the scope one that is summed when read."""
        self.strategy.take_metric_state(
            [v for v in replica_step.metric_variables(self.model) if v.synchronization == "on_read"]
        )

    def fit(self, method: Callable, args: tuple, kwargs: dict) -> Any:
        """Call Keras's `fit`, bound to the model, as all ranks do."""
        return fit_calls.fit(method, self, args, kwargs)

    def leaves_validation(self, asked: dict[str, Any]) -> bool:
        """Whether another process validates, of a job that `fit` is asked for in these words."""
        del asked
        return False

    # Step functions.

    def make_step_function(self, step_function: Callable, name: str) -> Callable:
        """Keras's loop around one step, over cut batches."""
        model, strategy = self.model, self.strategy
        sequence = strategy.new_sequence(name)
        read = self._digests[name] = tf.Variable(0, dtype=tf.int64, trainable=False)

        @tf.autograph.experimental.do_not_convert
        def step(batch: slicing.Slices) -> Any:
            if not isinstance(batch.digest, tuple):
                read.assign(digests.add(read, batch.digest))
            with strategy.sequence(sequence):
                return replica_step.run_step(
                    step_function, batch, model, strategy, self.kinds_of(name)
                )

        function = keras_models.make_function(model, step)

        def run(iterator: tf.data.Iterator | Iterable) -> Any:
            if not isinstance(iterator, tf.data.Iterator):
                iterator = list(epoch_data.cut_batches(iterator, strategy))
                self.try_step(name, step_function, iterator[0])
                iterator = iter(iterator)
            elif self._unread:
                self._unread = False
                first, iterator = digests.first_of(iterator, model.steps_per_execution)
                read.assign(0)
                rank_checks.check_same_batch(strategy, first)
                self.try_step(name, step_function, first)
            with (
                traced_step.in_shares(),
                keras_steps.results_through(keras_models.metrics_of(model), replica_step.result_of),
                keras_steps.moments_through(sync_batch_norm.of_all_replicas),
            ):
                return function(iterator)

        return run

    def kinds_of(self, name: str) -> Mapping[str, str]:
        """Of the terms of a step, or of the train step's, which computes the same losses."""
        return self.kinds.get(name) or self.kinds.get("train") or {}

    def try_step(self, name: str, step_function: Callable, first: slicing.Slices) -> None:
        """Before the first step of its kind, make sure that its parts add up to it."""
        strategy = self.strategy
        asked = self_test.is_wanted(strategy.self_test)
        if name in self.kinds or not asked or strategy.communicator.name == "null":
            return
        if name not in ("train", "test"):
            return  # a callback's, which adds nothing up
        why = self_test.reasons(self.model, f"{name}_step")
        if (
            name == "test"
            and "train" in self.kinds
            and keras_models.is_kerass(type(self.model).test_step)
        ):
            why = []  # it computes nothing that the train step did not
        self.kinds[name] = {}
        if why or asked in (True, "only"):
            why = why or ["asked for"]
            self.kinds[name] = self_test.run(self, step_function, first, why).kinds
        if asked == "only":
            self_test.end_check()

    def make_trial(self, step_function: Callable, batch: slicing.Slices) -> trial.Trial:
        """How a step is tried before it is trusted, see `self_test`."""
        return trial.Trial(self, step_function, batch)

    def check_same_reading(self, name: str, when: str) -> None:
        """Raise on every rank when ranks have read other batches than each other.

        Args:
            name: "train" or "test".
            when: Such as "after step 4".

        Raises:
            DisagreementError: They have.
        """
        read = self._digests.get(name)
        if read is not None and self.strategy.communicator.size > 1:
            rank_checks.check_same_digest(self.strategy, int(read.numpy()), when)

    @contextlib.contextmanager
    def reading_of(self, name: str) -> Iterator[None]:
        """A context for `evaluate` or `predict`: ranks must read the same batches."""
        if not self.takes_over or self.strategy.communicator.size == 1:
            yield
            return
        if name == "evaluate":
            yield
            self.check_same_reading("test", "after evaluate")
            return
        check = rank_checks.ReadingCheck(self.strategy)
        with self.strategy.extended.observing_batches(check.read):
            yield
        check.end()

    def make_train_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_train_function` on the model."""
        model = self.model
        if model.train_function is None or force:
            self.bind_optimizers()
            model.train_function = self.make_step_function(model.train_step, "train")
        return model.train_function

    def make_test_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_test_function` on the model."""
        model = self.model
        if model.test_function is None or force:
            model.test_function = self.make_step_function(model.test_step, "test")
        return model.test_function

    def make_predict_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_predict_function`: every rank gets every row, in order."""
        model, strategy = self.model, self.strategy
        if model.predict_function is not None and not force:
            return model.predict_function
        sequence = strategy.new_sequence("predict")

        @tf.autograph.experimental.do_not_convert
        def one_step(data: Any) -> Any:
            with strategy.sequence(sequence):
                return strategy.gather_outputs(replica_step.predict_rows(data, model))

        @tf.autograph.experimental.do_not_convert
        def every_step(batches: list) -> Any:
            outputs = [
                strategy.join_outputs(strategy.run(one_step, args=(data,))) for data in batches
            ]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        function = (
            every_step if model.run_eagerly else tf.function(every_step, reduce_retracing=True)
        )
        model.predict_function = function
        return function

    def predict_on_batch(self, x: Any) -> Any:
        """Replaces `Model.predict_on_batch`: a cut batch, a whole result on every rank."""
        function = self.make_predict_function()
        strategy = self.strategy
        batch = slicing.cut_exactly(
            epoch_data.as_tensors((x,)),
            strategy.local_ranks(),
            strategy.num_replicas_in_sync,
        )
        outputs = function([self.strategy.per_replica(batch)])
        return tf.nest.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )

    def new_epoch(self, epoch: int) -> None:
        """Called when an epoch of `fit` begins."""

    def flush(self) -> None:
        """Wait for steps under way; here there are none, each is over when Keras has called it."""
        self.synchronize_weights()

    @property
    def has_local_steps(self) -> bool:
        """Whether replicas take steps of their own, and weights are equal at times only."""
        return any(
            exchanging.local for exchanging in shared_optimizer.gradient_exchanges_of(self.model)
        )

    def synchronize_weights(self) -> None:
        """Make the weights of replicas that train apart equal. All ranks call it together."""
        if not self.has_local_steps or _true_or_none(replica_step.weights_are_equal(self.model)):
            return
        for exchanging in shared_optimizer.gradient_exchanges_of(self.model):
            exchanging.close()
        share = replica_step.share_of_meeting(self.model)
        shared_weights.average(self.model.non_trainable_weights, share, self.strategy)

    def resume(self) -> None:
        """Called when `evaluate`, `predict` or a single step inside `fit` is over."""

    def release(self) -> None:
        """Called when `fit`, `evaluate`, `predict` or a single step is over."""

    # Where training starts.

    def initial_epoch(self) -> int | None:
        """The epoch a callback wants `fit` to start from; None for the argument's."""
        return keras_models.initial_epoch(self.model)

    def set_initial_epoch(self, epoch: int | None) -> None:
        """Make `fit` start from this epoch."""
        keras_models.set_initial_epoch(self.model, epoch)

    # State that is this rank's own.

    def seed_states(self) -> list[keras.Variable]:
        """State variables of the model's random number generators (dropout and the like)."""
        weights = {id(v) for v in self.model.weights}
        return [
            v
            for v in self.model.variables
            if id(v) not in weights and v.name == "seed_generator_state"
        ]

    def equal_variables(self) -> list[keras.Variable]:
        """Every variable that steps keep equal on all ranks."""
        if not self.has_local_steps:
            return self.shared_variables()
        rates = [
            v
            for optimizer in shared_optimizer.optimizers_of(self.model)
            for v in optimizer.variables
            if v.path.endswith("learning_rate")
        ]
        return [*self.model.weights, *rates]

    def agreed_variables(self) -> list[keras.Variable]:
        """What ranks agree on before steps: all, but for slots that have become a rank's own."""
        begun = any(
            exchanging.begun for exchanging in shared_optimizer.gradient_exchanges_of(self.model)
        )
        return self.equal_variables() if begun else self.shared_variables()

    def exchange_state(self) -> dict:
        """What the exchange of gradients remembers, of all ranks, on rank 0. All ranks call it.

        One worker exchanges nothing, and carries what more of them have left.
        """
        return self._carried | {
            f"{i}/{name}": item
            for i, exchanging in enumerate(shared_optimizer.gradient_exchanges_of(self.model))
            for name, item in exchanging.state.collect(root=0).items()
        }

    def restore_exchange(self, state: dict) -> None:
        """Go on from what `exchange_state` returned."""
        exchangings = shared_optimizer.gradient_exchanges_of(self.model)
        self._carried = {} if exchangings else dict(state)
        for i, exchanging in enumerate(exchangings):
            start = f"{i}/"
            mine = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
            exchanging.state.restore(mine)

    def shared_variables(self) -> list[keras.Variable]:
        """Every variable the ranks must agree on: weights and optimizer state."""
        optimizers = shared_optimizer.optimizers_of(self.model)
        own = {
            id(a) for optimizer in optimizers for a in shared_optimizer.accumulators_of(optimizer)
        }
        optimizer_variables = [v for optimizer in optimizers for v in optimizer.variables]
        unique = {id(v): v for v in [*self.model.weights, *optimizer_variables]}
        return [v for key, v in unique.items() if key not in own]


def _true_or_none(flag: tf.Tensor) -> bool:
    return flag is None or bool(flag)


def _first_part(spec: Any) -> Any:
    """What Keras is to build a model from; absent parts are None, as in a batch."""
    part = spec.parts[0] if isinstance(spec, slicing.Slices) else spec
    return keras.tree.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, part)


def refuse_jit(jit_compile: bool | str | None, strategy: Strategy) -> None:
    """Raise ValueError if several replicas are asked to compile their step by XLA."""
    if jit_compile is True and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            at_rank(
                strategy.rank,
                "jit_compile=True compiles the whole step with XLA, which cannot contain "
                "reductions that run on the host; leave jit_compile at 'auto' (it stays off under "
                "a strategy)",
            )
        )
