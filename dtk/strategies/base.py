"""What every dtk strategy has besides being a `tf.distribute.Strategy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_variables, tf_replicas
from dtk.errors import at_rank
from dtk.exchange import Downpour
from dtk.exchange.base import Exchange
from dtk.nests import Function, Nest
from dtk.strategies import start
from dtk.strategies.cluster_resolver import JobResolver, resolve
from dtk.trainer import (
    distributed_trainer,
    fit_guard,
    loop_guard,
    model_scope,
    undistributed_jobs,
    weight_check,
)
from dtk.trainer.contract import Strategy
from dtk.trainer.gradients import lookup_slices
from dtk.trainer.shuffle_seed import ShuffleSeed

_Made = TypeVar("_Made")


class DtkStrategy(tf.distribute.Strategy):
    """Base of dtk's strategies: a scope that distributes models, and what their trainers use.

    Attributes:
        communicator: How bytes move between replicas: the processes whose gradients add up.
        model_communicator: How bytes move between the processes that hold the parts of one model;
            of this process alone where each holds all of it.
        world: Over all processes of both.
        shuffle_seed: What epochs are shuffled from while the script has set no seed.
        is_evaluator: Whether this process evaluates beside the training and trains nothing.
        has_evaluator: Whether the job has such a process.
        exchange: What is sent of gradients, and when; None is all, as it is, every step.
        self_test: Whether steps are tried on a few rows first, see `self_test`; "auto" is where
            something in them is not Keras's own.
        supports_jit: Whether XLA can compile steps under it.
    """

    communicator: Communicator
    model_communicator: Communicator
    world: Communicator
    is_evaluator = False
    has_evaluator = False
    exchange: Exchange | Downpour | None = None
    self_test: bool | str = "auto"
    supports_jit = True

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        # Without a docstring of its own, help() shows that of TensorFlow's constructor, which
        # takes other arguments. The class's docstring describes these.
        if "__init__" in vars(cls) and not cls.__init__.__doc__:
            cls.__init__.__doc__ = f"Take the arguments that {cls.__name__} describes."

    def __init__(
        self,
        extended: tf.distribute.StrategyExtended,
        communicator: Communicator,
        resolver: JobResolver | None = None,
        world: Communicator | None = None,
        model_communicator: Communicator | None = None,
    ):
        self.communicator = communicator
        self.world = world or communicator
        self.model_communicator = model_communicator or LocalCommunicator()
        self._resolver = resolver or resolve(self.world)
        self.shuffle_seed = ShuffleSeed(None)
        self._meet: Callable[[str], None] | None = None
        self.told_of_idle = False
        if self.world.rank == 0:
            start.tell_untested_versions()
        super().__init__(extended)
        extended.divide_slices = lookup_slices.divide_in_loop
        undistributed_jobs.made_strategy()
        fit_guard.install(self)
        loop_guard.install()

    @property
    def rank(self) -> int:
        """Rank of this process, among all."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of replicas that train together."""
        return self.num_replicas_in_sync

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self.world.local_rank

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, the one that writes files and prints."""
        return self.rank == 0

    @property
    def cluster_resolver(self) -> JobResolver:
        """The job and this process's task in it, as TensorFlow names them; see `JobResolver`.

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
            raise ValueError(
                at_rank(
                    self.rank,
                    f"{type(self).__name__}.scope() inside the scope of another strategy "
                    f"({type(current).__name__}); one strategy trains a model, so leave that scope",
                )
            )
        return _scope(super().scope(), self)

    def run(
        self,
        fn: Function[_Made],
        args: tuple[Nest, ...] = (),
        kwargs: dict[str, Nest] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> _Made:
        """Run a function on every replica of this process, as `tf.distribute.Strategy.run` does."""
        model_scope.check_distributed(fn, self)
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def check_weights(self, model: keras.Model) -> int:
        """Compare a model's weights and optimizer state over all replicas, bit for bit.

        `fit` does so after its first step and after every epoch; this is for scripts that want to
        know at another time, such as after changing weights by themselves. Every rank calls it.
        Under an exchange with local steps (`BlockMomentum`, `ModelAveraging`) weights
        are equal between calls of `fit`, and optimizer state, each worker's own, is left out.

        Args:
            model: Compiled in this strategy's scope.

        Returns:
            How many variables were compared, all of them equal.

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
        return weight_check.check_weights(model, self)

    @contextlib.contextmanager
    def meeting(self, meet: Callable[[str], None]) -> Iterator[None]:
        """Return a context in which all ranks call a function at the borders of `fit` and its like.

        That is where `fit`, `evaluate` and `predict` begin, and before and after the epochs of
        `fit`: where an exception of one rank can be told to the others, since none of them waits
        in another collective.

        Args:
            meet: Called with where the rank is, such as "epoch 3 ends"; may communicate, and raise.
        """
        outer, self._meet = self._meet, meet
        try:
            yield
        finally:
            self._meet = outer

    # For the trainers of models.

    def meet(self, where: str) -> None:
        """Call the function of `meeting`, if there is one.

        Args:
            where: Where this rank is.
        """
        if self._meet is not None:
            self._meet(where)

    @property
    def processes(self) -> int:
        """Processes of the job that take part in training."""
        return self.world.size

    def make_trainer(self, model: keras.Model) -> distributed_trainer.DistributedTrainer[Strategy]:
        """Make the trainer of a model compiled in this strategy's scope.

        Args:
            model: The model.
        """
        return distributed_trainer.DistributedTrainer(model, self)

    def new_sequence(self, name: str) -> str:
        """Return a new name for the collectives of one step function, equal on every rank.

        Args:
            name: What the name begins with, such as "train".
        """
        return f"{name}.{self.communicator.next_number()}"

    def sequence(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that names the collectives traced inside; see `Communicator.sequence`.

        Args:
            name: Name of the sequence.
        """
        return _both(self.communicator.sequence(name), self.model_communicator.sequence(name))

    def concurrent(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context whose collectives run beside all others; see `Communicator.concurrent`.

        Args:
            name: Those of one name are ordered among themselves.
        """
        return self.communicator.concurrent(name)

    def local_ranks(self) -> Sequence[int]:
        """Return the ranks of the replicas that this process holds."""
        raise NotImplementedError

    def local_index(self) -> int:
        """Return which of `local_ranks` is running; call in a replica context."""
        raise NotImplementedError

    def per_replica(self, parts: tuple[Nest, ...]) -> Nest:
        """Return what `run` is given so that replica i gets `parts[i]`.

        Args:
            parts: One structure of tensors for each of `local_ranks`.
        """
        raise NotImplementedError

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Make variables created outside the scope usable under this strategy.

        Args:
            variables: Keras variables; they keep their values.
        """
        raise NotImplementedError

    def take_metric_state(self, variables: Sequence[keras.Variable]) -> None:
        """Make the state of metrics created outside the scope one that is summed when read.

        Args:
            variables: Keras variables; they keep their values.
        """
        with self.scope():
            for variable in variables:
                keras_variables.move_variable(variable)

    def set_per_replica(self, variable: keras.Variable, values: Sequence[tf.Tensor]) -> None:
        """Assign a value of its own to every local replica's copy of a Keras variable.

        Args:
            variable: The variable.
            values: One value for each of `local_ranks`.
        """
        raise NotImplementedError

    def copies(self, variable: keras.Variable) -> Sequence[tf.Tensor | tf.Variable]:
        """Return what this process's replicas hold of a Keras variable.

        Args:
            variable: The variable.

        Returns:
            One tensor or TensorFlow variable for each of `local_ranks`.
        """
        return (variable,)

    def gather_outputs(self, outputs: _Made) -> _Made:
        """Gather the rows that other processes hold, in a replica context.

        Args:
            outputs: Structure of this replica's rows.

        Returns:
            The same structure; of all ranks' rows where other processes hold some.
        """
        raise NotImplementedError

    def join_outputs(self, outputs: _Made) -> _Made:
        """Concatenate the rows of this process's replicas, outside a replica context.

        Args:
            outputs: Structure of per-replica rows, as `run` returns it.

        Returns:
            The same structure of all rows, in rank order.
        """
        raise NotImplementedError


@contextlib.contextmanager
def _scope(
    scope: contextlib.AbstractContextManager[object], strategy: DtkStrategy
) -> Iterator[object]:
    with scope as entered, model_scope.distributing(strategy), tf_replicas.scope_kept():
        yield entered


@contextlib.contextmanager
def _both(
    one: contextlib.AbstractContextManager[None], other: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    with one, other:
        yield
