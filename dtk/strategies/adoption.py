"""Adopting: what makes a plain Keras model train over the replicas of a strategy.

`strategy.scope()` *adopts* every model compiled inside it. Adopting gives that one model object its
own step functions, and `fit`, `evaluate` and `predict` dtk's share of the work; once the scope is
left, nothing of Keras stays patched.

    what fit reads    feeding      global batches, cut by rank
    a step            tracing      losses that count with their share of the rows
                      optimizing   gradients reduced once, where every later step sees them
                      steps        metrics and moving statistics of the whole world
    around fit        fitting      callbacks; agreement: what ranks must agree on
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from dtk.errors import NotDistributedError, at_rank
from dtk.strategies import (
    adopt,
    agreement,
    feeding,
    moments,
    optimizing,
    reading,
    self_test,
    slicing,
    steps,
    tracing,
    trial,
)


class Adoption:
    """What dtk keeps about one model compiled under one strategy.

    Attributes:
        model: The model.
        strategy: Its strategy.
        feed: The data of the running `fit`.
        callbacks: The `keras.callbacks.CallbackList` of the running `fit`; None outside.
        kinds: What is known of the terms of each step, see `terms`; of those tried so far.
        calls: How often single batches were given, by the method's name.
    """

    def __init__(self, model: Any, strategy: Any):
        self.model = model
        self.strategy = strategy
        self.feed = feeding.Feed(model, strategy, self.distribute)
        self.callbacks: Any = None
        self.kinds: dict[str, dict[str, str]] = {}
        self.calls: collections.Counter = collections.Counter()
        self._unread = False
        self._digests: dict[str, tf.Variable] = {}
        self._carried: dict = {}

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
        for optimizer in optimizing.optimizers_of(self.model):
            optimizing.bind(optimizer, self.strategy)

    # Data.

    def cut(self, dataset: Any) -> tf.data.Dataset:
        """Dataset of `Slices` for this process, from whatever `fit` was given."""
        return feeding.cut(dataset, self.strategy)

    def distribute(self, dataset: Any) -> Any:
        """What Keras is to read instead of a dataset of global batches."""
        if self.takes_over:
            return self.cut(dataset)
        return self.strategy.experimental_distribute_dataset(dataset)

    def take_epoch_iterator(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Feed Keras's epoch iterator with cut batches, and build the model from their shapes."""
        model, strategy = self.model, self.strategy
        if iterator is not None:
            self._unread = True
            if self.takes_over:
                dataset = feeding.given_to(iterator)
                slices = feeding.tuned_for(iterator.data_adapter, self.cut(dataset))
                adopt.set_dataset(iterator, slices)
                data_batch = _first_part(slices.element_spec)
            else:
                dataset = feeding.tuned_for(iterator.data_adapter, adopt.dataset_of(iterator))
                adopt.set_dataset(iterator, dataset)
                data_batch = _first_part(dataset.element_spec)
            if self.callbacks is not None and self.feed.iterator is None:
                self.feed.begin(iterator, dataset, self.callbacks)
        with strategy.scope():
            adopt.build_from(model, data_batch)
        if not self.takes_over:
            return
        _refuse_jit(model.jit_compile or None, strategy)
        self._take_metrics()
        self.bind_optimizers()

    def _take_metrics(self) -> None:
        """Make the state of metrics created outside the scope one that is summed when read."""
        self.strategy.take_metric_state(
            [v for v in steps.metric_variables(self.model) if v.synchronization == "on_read"]
        )

    # Step functions.

    def make_step_function(self, step_function: Callable, name: str) -> Callable:
        """Keras's loop around one step, over cut batches."""
        model, strategy = self.model, self.strategy
        sequence = strategy.new_sequence(name)
        read = self._digests[name] = tf.Variable(0, dtype=tf.int64, trainable=False)

        @tf.autograph.experimental.do_not_convert
        def step(batch: slicing.Slices) -> Any:
            if not isinstance(batch.digest, tuple):
                read.assign(reading.add(read, batch.digest))
            with strategy.sequence(sequence):
                return steps.run_step(step_function, batch, model, strategy, self.kinds_of(name))

        function = adopt.make_function(model, step)

        def run(iterator: Any) -> Any:
            if not isinstance(iterator, tf.data.Iterator):
                iterator = list(feeding.cut_batches(iterator, strategy))
                self.try_step(name, step_function, iterator[0])
                iterator = iter(iterator)
            elif self._unread:
                self._unread = False
                first, iterator = reading.first_of(iterator, model.steps_per_execution)
                read.assign(0)
                agreement.check_same_batch(strategy, first)
                self.try_step(name, step_function, first)
            with (
                tracing.in_shares(),
                adopt.results_through(adopt.metrics_of(model), steps.result_of),
                adopt.moments_through(moments.of_all_replicas),
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
        if name == "test" and "train" in self.kinds and adopt.is_kerass(type(self.model).test_step):
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
            agreement.check_same_digest(self.strategy, int(read.numpy()), when)

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
        check = agreement.ReadingCheck(self.strategy)
        with self.strategy.extended.batches_told_to(check.read):
            yield
        check.end()

    def make_train_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_train_function` on the adopted model."""
        model = self.model
        if model.train_function is None or force:
            self.bind_optimizers()
            model.train_function = self.make_step_function(model.train_step, "train")
        return model.train_function

    def make_test_function(self, force: bool = False) -> Callable:
        """Replaces `Model.make_test_function` on the adopted model."""
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
                return strategy.gather_outputs(steps.predict_rows(data, model))

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
            feeding.as_tensors((x,)),
            strategy.local_ranks(),
            strategy.num_replicas_in_sync,
        )
        outputs = function([self.strategy.per_replica(batch)])
        return tf.nest.map_structure(
            lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else leaf.numpy(), outputs
        )

    def new_epoch(self, epoch: int) -> None:
        """Called when an epoch of `fit` begins."""

    def settle(self) -> None:
        """Wait for steps under way; here there are none, each is over when Keras has called it."""
        self.meet()

    @property
    def trains_apart(self) -> bool:
        """Whether replicas take steps of their own, so that weights are equal after `meet` only."""
        return any(exchanging.local for exchanging in optimizing.exchangings_of(self.model))

    def meet(self) -> None:
        """Make the weights of replicas that train apart equal. All ranks call it together."""
        if not self.trains_apart or _true_or_none(steps.weights_are_equal(self.model)):
            return
        for exchanging in optimizing.exchangings_of(self.model):
            exchanging.close()
        share = steps.share_of_meeting(self.model)
        agreement.average(self.model.non_trainable_weights, share, self.strategy)

    def go_back(self) -> None:
        """Called when `evaluate`, `predict` or a single step inside `fit` is over."""

    def leave(self) -> None:
        """Called when `fit`, `evaluate`, `predict` or a single step is over."""

    # Where training starts.

    def initial_epoch(self) -> int | None:
        """The epoch a callback wants `fit` to start from; None for the argument's."""
        return adopt.initial_epoch(self.model)

    def set_initial_epoch(self, epoch: int | None) -> None:
        """Make `fit` start from this epoch."""
        adopt.set_initial_epoch(self.model, epoch)

    # State that is this rank's own.

    def seed_states(self) -> list:
        """State variables of the model's random number generators (dropout and the like)."""
        weights = {id(v) for v in self.model.weights}
        return [
            v
            for v in self.model.variables
            if id(v) not in weights and v.name == "seed_generator_state"
        ]

    def equal_variables(self) -> list:
        """Every variable that steps keep equal on all ranks."""
        if not self.trains_apart:
            return self.shared_variables()
        rates = [
            v
            for optimizer in optimizing.optimizers_of(self.model)
            for v in optimizer.variables
            if v.path.endswith("learning_rate")
        ]
        return [*self.model.weights, *rates]

    def agreed_variables(self) -> list:
        """What ranks agree on before steps: all, but for slots that have become a rank's own."""
        begun = any(exchanging.begun for exchanging in optimizing.exchangings_of(self.model))
        return self.equal_variables() if begun else self.shared_variables()

    def exchange_state(self) -> dict:
        """What the exchange of gradients remembers, of all ranks, on rank 0. All ranks call it.

        One worker exchanges nothing, and carries what more of them have left.
        """
        return self._carried | {
            f"{i}/{name}": item
            for i, exchanging in enumerate(optimizing.exchangings_of(self.model))
            for name, item in exchanging.memory.collect(root=0).items()
        }

    def restore_exchange(self, state: dict) -> None:
        """Go on from what `exchange_state` returned."""
        exchangings = optimizing.exchangings_of(self.model)
        self._carried = {} if exchangings else dict(state)
        for i, exchanging in enumerate(exchangings):
            start = f"{i}/"
            mine = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
            exchanging.memory.restore(mine)

    def shared_variables(self) -> list:
        """Every variable the ranks must agree on: weights and optimizer state."""
        optimizers = optimizing.optimizers_of(self.model)
        own = {id(a) for optimizer in optimizers for a in optimizing.accumulators_of(optimizer)}
        optimizer_variables = [v for optimizer in optimizers for v in optimizer.variables]
        unique = {id(v): v for v in [*self.model.weights, *optimizer_variables]}
        return [v for key, v in unique.items() if key not in own]


def _true_or_none(flag: Any) -> bool:
    return flag is None or bool(flag)


def _first_part(spec: Any) -> Any:
    """What Keras is to build a model from; absent parts are None, as in a batch."""
    part = spec.parts[0] if isinstance(spec, slicing.Slices) else spec
    return keras.tree.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, part)


def adoption_of(model: Any) -> Adoption | None:
    """The adoption of a model, None when no dtk strategy compiled it."""
    return getattr(model, "_dtk_adoption", None)


def adopt_model(model: Any, strategy: Any) -> Adoption:
    """Give one compiled model the strategy's step functions. Compiling again starts afresh."""
    before = adoption_of(model)
    if before is not None and before.strategy is not strategy:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"model {model.name!r} was compiled under another strategy; build a new one for "
                "this",
            )
        )
    strategy.take_variables(model.variables)
    adoption = before or strategy.make_adoption(model)
    adoption.bind_optimizers()
    adoption.compiled()
    if before is not None:
        return before
    model._dtk_adoption = adoption
    adopt.build_through(model, adoption.take_epoch_iterator)
    model.compute_loss = tracing.checking_loss(model)
    if adoption.takes_over:
        model.make_train_function = adoption.make_train_function
        model.make_test_function = adoption.make_test_function
        model.make_predict_function = adoption.make_predict_function
    return adoption


@contextlib.contextmanager
def adopting(strategy: Any) -> Iterator[None]:
    """While inside, `compile` adopts, and losses of no replica are whole; Keras's own come back."""
    with (
        adopt.compiles_through(
            lambda model, jit_compile: check_and_own(model, jit_compile, strategy),
            lambda model: adopt_model(model, strategy),
        ),
        tracing.whole_outside(),
    ):
        yield


def check_and_own(model: Any, jit_compile: Any, strategy: Any) -> None:
    """Let a model belong to a strategy, before it is compiled there.

    Raises:
        ValueError: It belongs to another one, or is to be compiled by XLA.
    """
    _refuse_jit(jit_compile, strategy)
    owner = adopt.owner_of(model)
    if owner is not None and owner is not strategy:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"model {model.name!r} was built under another strategy "
                f"({type(owner).__name__}); build and compile it under the same one",
            )
        )
    adopt.set_owner(model, strategy)


def _refuse_jit(jit_compile: Any, strategy: Any) -> None:
    if jit_compile is True and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            at_rank(
                strategy.rank,
                "jit_compile=True compiles the whole step with XLA, which cannot contain "
                "reductions that run on the host; leave jit_compile at 'auto' (it stays off under "
                "a strategy)",
            )
        )


@tf.autograph.experimental.do_not_convert  # `run` is called in graphs; rewriting this took 0.1 s
def check_adopted(function: Any, strategy: Any) -> None:
    """Refuse to run the step of a model that this strategy did not compile."""
    model = getattr(function, "__self__", None)
    if not isinstance(model, keras.Model) or strategy.num_replicas_in_sync == 1:
        return
    if function.__name__ not in ("train_step", "test_step", "predict_step"):
        return
    if adoption_of(model) is None:
        raise NotDistributedError(
            at_rank(
                strategy.rank,
                f"model {model.name!r} was compiled outside strategy.scope(), so its steps would "
                "not be exact; call model.compile(...) inside `with strategy.scope():`",
            )
        )
