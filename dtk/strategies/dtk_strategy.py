"""The base of all dtk strategies: scope, checks of weights, trainers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat import keras_steps, tf_replicas
from dtk.errors import at_rank
from dtk.nests import Function, Tree
from dtk.strategies import start
from dtk.strategies.cluster_resolver import JobResolver, resolve
from dtk.trainer import distributed_model, distributed_trainer, guard, undistributed_jobs
from dtk.trainer.ranks import rank_checks
from dtk.trainer.replica import step_metrics
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import lookups, own_loops

_Made = TypeVar("_Made")


class DtkStrategy(Strategy):
    """Base of dtk's strategies: a `Strategy` with a scope that distributes models."""

    def __init__(
        self,
        extended: tf.distribute.StrategyExtended,
        communicator: Communicator,
        resolver: JobResolver | None = None,
        world: Communicator | None = None,
        model_communicator: Communicator | None = None,
    ):
        self._resolver = resolver or resolve(world or communicator)
        super().__init__(extended, communicator, world, model_communicator)
        if self.world.rank == 0:
            start.tell_untested_versions()
        extended.divide_slices = lookups.divided
        extended.compare_reads = functools.partial(rank_checks.comparer, self)
        undistributed_jobs.made_strategy()
        guard.install(self)

    @property
    def cluster_resolver(self) -> JobResolver:
        """The job and this process's task, in TensorFlow's terms; see `JobResolver`.

        Example:
            >>> import dtk
            >>> strategy = dtk.strategies.AllReduceStrategy("local")
            >>> strategy.cluster_resolver.task_type, strategy.cluster_resolver.cluster_spec()
            (None, ClusterSpec({}))
        """
        return self._resolver

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which models are built and compiled for this strategy."""
        current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else self
        if current is not self:
            message = (
                f"{type(self).__name__}.scope() inside the scope of another strategy "
                f"({type(current).__name__}); one strategy trains a model, so leave that scope"
            )
            raise ValueError(at_rank(self.rank, message))
        return _scope(super().scope(), self)

    def run(
        self,
        fn: Function[_Made],
        args: tuple[Tree, ...] = (),
        kwargs: dict[str, Tree] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> _Made:
        """Run a function on every replica of this process, as `tf.distribute.Strategy.run` does."""
        distributed_model.check_distributed(fn, self)
        with getattr(fn, "_dtk_trace_context", self._of_own_loops)():
            return super().run(self._of_replica(fn), args=args, kwargs=kwargs, options=options)

    @contextlib.contextmanager
    def _of_own_loops(self) -> Iterator[None]:
        """Return the context of replicas in a script's own loop."""
        with (
            keras_steps.patch_moments(step_metrics.moments_of_all_replicas),
            own_loops.watched(self) if self.num_replicas_in_sync > 1 else contextlib.nullcontext(),
        ):
            yield

    def _of_replica(self, fn: Function[_Made]) -> Function[_Made]:
        """Return the function that each replica runs in place of a script's."""
        return fn

    def check_weights(self, model: keras.Model) -> int:
        """Compare a model's weights and optimizer state over all replicas, bit for bit.

        `fit` compares them after its first step and after every epoch. Call this on every rank to
        compare at another time, for example after a script has changed weights. Under an exchange
        with local steps (`BlockMomentum`, `ModelAveraging`) weights are equal between calls of
        `fit`; optimizer state differs by worker and is left out.

        Args:
            model: Compiled in this strategy's scope.

        Returns:
            The number of variables compared; all are equal.

        Raises:
            DisagreementError: On every rank, naming the first variable that differs.
            ValueError: The model was not compiled in this strategy's scope.

        Example:
            >>> import dtk, keras
            >>> strategy = dtk.strategies.AllReduceStrategy("local")
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
            >>> strategy.check_weights(model)
            4
        """
        return distributed_model.check_weights(model, self)

    def make_trainer(self, model: keras.Model) -> distributed_trainer.DistributedTrainer:
        """Make the trainer of a model compiled in this strategy's scope.

        Args:
            model: The model.
        """
        return distributed_trainer.DistributedTrainer(model, self)


@contextlib.contextmanager
def _scope(
    scope: contextlib.AbstractContextManager[object], strategy: DtkStrategy
) -> Iterator[object]:
    with scope as entered, distributed_model.distributing(strategy), tf_replicas.scope_kept():
        yield entered
