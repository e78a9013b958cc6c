"""The base strategy that training needs: replicas, communicators, and each replica's values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_variables, tf_replicas
from dtk.exchange.contract import Exchange
from dtk.nests import Array, Tree
from dtk.patches import temporarily

_Made = TypeVar("_Made")

# A model's `train_step` or `test_step`: takes a batch, returns logs.
StepFunction: TypeAlias = Callable[[Tree], Tree]

# A model's train or test function: takes an iterator over batches, returns logs.
Loop: TypeAlias = Callable[[tf.data.Iterator], Tree]


def tell(strategy: tf.distribute.Strategy, text: str, once: bool = False) -> None:
    """Print on rank 0, beside what the script prints; the same text only once if so asked."""
    if strategy.is_chief and not (once and text in strategy.told):
        strategy.told.add(text)
        print(f"dtk: {text}", file=sys.stderr, flush=True)


# Between the seeds of one `fit` and the next, so that no epochs of the two have the same.
_FITS_APART = 0x9E3779B1


class ShuffleSeed:
    """Seed of the order of rows, for scripts that leave it to dtk.

    Example:
        >>> ShuffleSeed(None).of_epoch(3) is None
        True
    """

    def __init__(self, chosen: int | None):
        self.value = self._in_force = chosen
        self._fits = 0

    def begin_fit(self) -> None:
        """Change the order of rows from one `fit` to the next, as one process does unseeded."""
        if self.value is not None and self._fits:
            self.value = (self.value + _FITS_APART) % 2**31
        self._fits += 1

    def of_epoch(self, epoch: int) -> int | None:
        """Return the seed of an epoch; None once the script has set a global seed itself."""
        if tf_replicas.global_seed() != self._in_force:
            self.value = None
        return None if self.value is None else (self.value + epoch) % 2**31

    def restore(self, value: int, in_force: int | None) -> None:
        """Continue from a checkpoint's seed."""
        self.value, self._in_force = value, in_force


class Strategy(tf.distribute.Strategy):
    """A `tf.distribute.Strategy` over a communicator; `DtkStrategy` adds scope and trainers.

    Attributes:
        communicator: Between replicas: the processes that sum their gradients.
        model_communicator: Between the processes that hold the parts of one model; this process
            alone where each process holds the whole model.
        world: Between all processes of both.
        shuffle_seed: The seed of each epoch's shuffling while the script has set none.
        is_evaluator: Whether this process evaluates beside the training and trains nothing.
        has_evaluator: Whether the job has such a process.
        exchange: Which part of the gradients is sent, and when; None: all of them, unchanged, every
            step.
        self_test: Whether steps are tried on a few rows first, see `self_test`; "auto": only steps
            with parts that are not Keras's own.
        shard_optimizer: Whether each process updates a part of the weights only, see
            `sharded_optimizer`.
        supports_jit: Whether XLA can compile steps under this strategy.
        summed_by_loop: References to the variables whose gradients the script's own loop sums, so
            that it may apply optimizers to them.
    """

    communicator: Communicator
    model_communicator: Communicator
    world: Communicator
    is_evaluator = False
    has_evaluator = False
    exchange: Exchange | None = None
    self_test: bool | str = "auto"
    shard_optimizer = False
    supports_jit = True
    summed_by_loop: frozenset[object] = frozenset()

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
        self.told: set[str] = set()  # what `tell` has printed
        super().__init__(extended)

    @property
    def rank(self) -> int:
        """Rank of this process among all processes."""
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
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def part_communicator(self) -> Communicator:
        """Between the processes whose optimizers hold parts of the same variables."""
        return self.communicator if self.shard_optimizer else self.model_communicator

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return self.world.size

    def meeting(self, meet: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all ranks call a function when `fit` and its like begin.

        All ranks also call it before and after each epoch of `fit`. No rank waits in another
        collective at these points, so one rank can tell the others about an exception.

        Args:
            meet: Called with the rank's position, such as "epoch 3 ends"; may communicate and
                raise.
        """
        return temporarily(self, _meet=meet)

    def meet(self, where: str) -> None:
        """Call the function of `meeting`, if there is one.

        Args:
            where: This rank's position, such as "epoch 3 ends".
        """
        if self._meet is not None:
            self._meet(where)

    def new_sequence(self, name: str) -> str:
        """Return a new name for the collectives of one step function, equal on every rank.

        Args:
            name: The beginning of the name, such as "train".
        """
        return f"{name}.{self.communicator.next_number()}"

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Return a context that names the collectives traced inside; see `Communicator.sequence`.

        Args:
            name: Name of the sequence.
        """
        running = self.extended.replica_communicator()
        with running.sequence(name), self.model_communicator.sequence(name):
            yield

    def concurrent(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context whose collectives run beside all others; see `Communicator.concurrent`.

        Args:
            name: Collectives of the same name run in order.
        """
        return self.extended.replica_communicator().concurrent(name)

    # What follows is right for one replica in each process; other strategies override it.

    def local_ranks(self) -> Sequence[int]:
        """Return the ranks of the replicas that this process holds."""
        return (self.communicator.rank,)

    def local_index(self) -> int:
        """Return the index in `local_ranks` of the running replica; call in a replica context."""
        return 0

    def per_replica(self, parts: tuple[Tree, ...]) -> Tree:
        """Return an argument for `run` that gives `parts[i]` to replica i.

        Args:
            parts: One structure of tensors for each of `local_ranks`.
        """
        return parts[0]

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Make variables created outside the scope usable under this strategy.

        Args:
            variables: Keras variables; they keep their values. Plain ones belong to every strategy.
        """

    def take_metric_state(self, variables: Sequence[keras.Variable]) -> None:
        """Make the state of metrics created outside the scope be summed when it is read.

        Args:
            variables: Keras variables; they keep their values.
        """
        with self.scope():
            for variable in variables:
                keras_variables.move_variable(variable)

    def set_per_replica(self, variable: keras.Variable, values: Sequence[tf.Tensor]) -> None:
        """Assign a different value to each local replica's copy of a Keras variable.

        Args:
            variable: The variable.
            values: One value for each of `local_ranks`.
        """
        copies = keras_variables.components(variable.value)
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)

    def set_sum(self, variable: keras.Variable, whole: tf.Tensor | Array | float) -> None:
        """Assign what the copies of all replicas add up to: rank 0 holds it, the others zeros.

        TensorFlow would give each replica an equal part, and lose the remainders of whole numbers.

        Args:
            variable: The variable.
            whole: The sum.
        """
        whole = tf.convert_to_tensor(whole, variable.dtype)
        parts = [tf.zeros_like(whole) if rank else whole for rank in self.local_ranks()]
        self.set_per_replica(variable, parts)

    def gather_outputs(self, outputs: _Made) -> _Made:
        """Gather the rows that other processes hold, in a replica context.

        Args:
            outputs: Structure of this replica's rows.

        Returns:
            The same structure; with the rows of all ranks if other processes hold some.
        """
        return outputs

    def join_outputs(self, outputs: _Made) -> _Made:
        """Concatenate the rows of this process's replicas, outside a replica context.

        Args:
            outputs: Structure of per-replica rows, as `run` returns it.

        Returns:
            The same structure with all rows, in rank order.
        """

        def joined(rows: tf.Tensor) -> tf.Tensor:
            parts = self.experimental_local_results(rows)
            return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

        return keras.tree.map_structure(joined, outputs)
