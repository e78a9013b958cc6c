"""A strategy as training sees it: who computes, how bytes move, what each replica holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_variables
from dtk.exchange.base import Exchange
from dtk.nests import Nest
from dtk.trainer.shuffle_seed import ShuffleSeed

_Made = TypeVar("_Made")

# A model's `train_step` or `test_step`: takes a batch, returns what is logged.
StepFunction: TypeAlias = Callable[[Nest], Nest]

# A model's train or test function: takes an iterator over batches, returns what is logged.
Loop: TypeAlias = Callable[[tf.data.Iterator], Nest]


class Strategy(tf.distribute.Strategy):
    """A `tf.distribute.Strategy` over a communicator; `DtkStrategy` adds scope and trainers.

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
    exchange: Exchange | None = None
    self_test: bool | str = "auto"
    supports_jit = True

    def __init__(
        self,
        extended: tf.distribute.StrategyExtended,
        communicator: Communicator,
        world: Communicator | None = None,
        model_communicator: Communicator | None = None,
    ):
        self.communicator = communicator
        self.world = world or communicator
        self.model_communicator = model_communicator or LocalCommunicator()
        self.shuffle_seed = ShuffleSeed(None)
        self._meet: Callable[[str], None] | None = None
        self.told_of_idle = False
        super().__init__(extended)

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
    def processes(self) -> int:
        """Processes of the job that take part in training."""
        return self.world.size

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

    def meet(self, where: str) -> None:
        """Call the function of `meeting`, if there is one.

        Args:
            where: Where this rank is.
        """
        if self._meet is not None:
            self._meet(where)

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
def _both(
    one: contextlib.AbstractContextManager[None], other: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    with one, other:
        yield
