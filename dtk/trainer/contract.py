"""What the modules of this folder see of a strategy, and of the trainer of a model.

`Strategy` and `Trainer` are protocols: `DtkStrategy` and `DistributedTrainer` satisfy them without
being imported, and imports keep pointing down.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat.keras_data import TFEpochIterator
from dtk.exchange.base import Exchange
from dtk.input.row_maps import RowMaps
from dtk.nests import Args, Function, Kwargs, Nest
from dtk.trainer.shuffle_seed import ShuffleSeed

_Made = TypeVar("_Made")

# A model's `train_step` or `test_step`: takes a batch, returns what is logged.
StepFunction: TypeAlias = Callable[[Nest], Nest]

# A model's train or test function: takes an iterator over batches, returns what is logged.
Loop: TypeAlias = Callable[[tf.data.Iterator], Nest]


class Extended(Protocol):
    """The extended object behind a strategy, as far as `dtk.trainer` uses it."""

    @property
    def worker_devices(self) -> Sequence[str]:
        """Devices of this process's replicas."""

    def reduce_over_replicas(
        self, values: list[tf.Tensor | tf.IndexedSlices], op: str = "sum"
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Reduce tensors over the replicas, in a replica context."""

    def observing_batches(
        self, observe: Callable[[tf.Tensor], None]
    ) -> AbstractContextManager[None]:
        """Return a context in which datasets report the digest of each batch that is read."""

    def row_maps(self, dataset: tf.data.Dataset) -> RowMaps | None:
        """Take a pipeline apart that maps rows before it puts them into batches.

        Only strategies of several processes are asked.
        """


class Strategy(Protocol):
    """A strategy, as far as training a model uses it.

    See `DtkStrategy` for attributes and arguments.
    """

    told_of_idle: bool

    communicator: Communicator
    world: Communicator
    model_communicator: Communicator
    exchange: Exchange | None
    self_test: bool | str
    shuffle_seed: ShuffleSeed
    supports_jit: bool

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def size(self) -> int:
        """Number of replicas, or of workers, whose gradients count."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that train together."""

    @property
    def processes(self) -> int:
        """Processes of the job that take part in training."""

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""

    @property
    def extended(self) -> Extended:
        """The object that makes variables and reduces values."""

    def scope(self) -> AbstractContextManager[object]:
        """Return the context in which models are built and compiled."""

    def meet(self, where: str) -> None:
        """Tell all ranks if one of them has failed, where the strategy does so."""

    def run(self, fn: Function[_Made], args: tuple[Nest, ...] = ()) -> _Made:
        """Run a function on every replica of this process."""

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset that this process iterates over."""

    def experimental_local_results(self, value: Nest) -> tuple[tf.Tensor, ...]:
        """Return what each replica of this process holds of a value."""

    def new_sequence(self, name: str) -> str:
        """Return a new name for a sequence of collectives, equal on all ranks."""

    def sequence(self, name: str) -> AbstractContextManager[None]:
        """Return a context that names collectives; see `Communicator.sequence`."""

    def concurrent(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose collectives run beside others; see `Communicator.concurrent`."""

    def local_ranks(self) -> Sequence[int]:
        """Return the ranks of the replicas that this process holds."""

    def local_index(self) -> int:
        """Return which of `local_ranks` is running, in a replica context."""

    def per_replica(self, parts: tuple[Nest, ...]) -> Nest:
        """Return what `run` is given so that replica i gets `parts[i]`."""

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Make variables created outside the scope usable under the strategy."""

    def take_metric_state(self, variables: Sequence[keras.Variable]) -> None:
        """Make metric state created outside the scope one that is summed when read."""

    def set_per_replica(self, variable: keras.Variable, values: Sequence[tf.Tensor]) -> None:
        """Assign a value of its own to every local replica's copy of a variable."""

    def copies(self, variable: keras.Variable) -> Sequence[tf.Tensor | tf.Variable]:
        """Return what this process's replicas hold of a variable."""

    def gather_outputs(self, outputs: _Made) -> _Made:
        """Gather the rows of all ranks, in a replica context."""

    def join_outputs(self, outputs: _Made) -> _Made:
        """Concatenate the rows of this process's replicas, outside a replica context."""


# A base class that leaves this open takes a strategy with more to it, such as parameter servers.
StrategyT = TypeVar("StrategyT", bound=Strategy, covariant=True)


class EpochData(Protocol):
    """The data of the running `fit`, see `feed.Feed`."""

    @property
    def iterator(self) -> TFEpochIterator | None:
        """Keras's epoch iterator; None outside `fit`."""

    def show_learned_steps(self) -> None:
        """Give the progress bar the number of steps that the first epoch has shown."""

    def rows_in(self, steps: int) -> int | None:
        """Count the rows in the first batches of an epoch; None where the data does not tell."""

    def shuffle(self, epoch: int) -> None:
        """Shuffle the rows of arrays for this epoch, alike on every rank."""

    def end(self) -> None:
        """Forget the data of a `fit` that is over."""


class Trainer(Protocol):
    """The trainer of one model, as far as what runs around its steps uses it.

    See `DistributedTrainer` for attributes and arguments.
    """

    model: keras.Model
    callbacks: keras.callbacks.CallbackList
    calls: collections.Counter[str]
    gathered: list[keras.Metric]

    @property
    def strategy(self) -> Strategy:
        """The model's strategy."""

    @property
    def feed(self) -> EpochData:
        """The data of the running `fit`."""

    @property
    def takes_over(self) -> bool:
        """Whether the model's step functions are replaced."""

    @property
    def has_local_steps(self) -> bool:
        """Whether replicas take steps of their own, and weights are equal at times only."""

    def fit(self, method: Function[object], args: Args, kwargs: Kwargs) -> object:
        """Call Keras's `fit`."""

    def predict_on_batch(self, x: Nest) -> Nest:
        """Predict a global batch; every rank gets all rows."""

    def make_train_function(self, force: bool = False) -> Loop:
        """Make the model's train function."""

    def leaves_validation(self, asked: dict[str, object]) -> bool:
        """Return whether another process validates."""

    def reading_of(self, name: str) -> AbstractContextManager[None]:
        """Return a context that checks that ranks read the same batches."""

    def check_same_reading(self, name: str, when: str) -> None:
        """Raise on every rank when ranks have read different batches."""

    def new_epoch(self, epoch: int) -> None:
        """Prepare for an epoch of `fit`."""

    def flush(self) -> None:
        """Wait for steps in flight."""

    def synchronize_weights(self) -> None:
        """Make the weights of all replicas equal."""

    def resume(self) -> None:
        """Continue training after an evaluation inside `fit`."""

    def release(self) -> None:
        """Let go of what `fit` or another call has held."""

    def initial_epoch(self) -> int | None:
        """Return the epoch that a callback wants `fit` to start from."""

    def set_initial_epoch(self, epoch: int | None) -> None:
        """Make `fit` start from an epoch."""

    def seed_states(self) -> list[keras.Variable]:
        """Return the state of the model's random number generators."""

    def shared_variables(self) -> list[keras.Variable]:
        """Return the weights and optimizer state that ranks must agree on."""

    def equal_variables(self) -> list[keras.Variable]:
        """Return the variables that steps keep equal on all ranks."""

    def agreed_variables(self) -> list[keras.Variable]:
        """Return the variables that ranks agree on before steps."""
