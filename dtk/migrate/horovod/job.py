"""`hvd.init()` and what it makes: one strategy for the whole script, and this rank's place in it.

Other strategies of dtk give all ranks the same data and cut it. Here every rank brings its own:

    rank 0   batch of 32 rows --> gradient --+
                                             +--> of 64 rows, each counted once --> equal weights
    rank 1   batch of 32 rows --> gradient --+
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from dtk import communicators
from dtk.cluster.detect import detect
from dtk.cluster.variables import COMMUNICATOR
from dtk.compat import keras_data, keras_variables
from dtk.compat.random_draws import spread_seed
from dtk.errors import NotDistributedError, ReplacedError, at_rank
from dtk.exchange import parse
from dtk.input import slicing
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Function, Tree
from dtk.patches import definer, patch_around
from dtk.strategies.allreduce import AllReduceStrategy
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.strategy import Loop, tell

# The exchange of a `DistributedOptimizer`, on the optimizer itself; "" for whole gradients.
_MARK = "_dtk_horovod_exchange"


def mark(optimizer: keras.Optimizer, exchange: str) -> None:
    """Mark an optimizer as a `DistributedOptimizer` whose gradients go by an exchange."""
    setattr(optimizer, _MARK, exchange)


def exchange_of(optimizer: keras.Optimizer | None) -> str | None:
    """Return the exchange of a `DistributedOptimizer`; None for an optimizer that is none."""
    exchange: str | None = getattr(optimizer, _MARK, None)
    inner = getattr(optimizer, "inner_optimizer", None)
    return exchange_of(inner) if exchange is None and inner is not None else exchange


class RankTrainer(DistributedTrainer):
    """Trains on each rank's own batches; evaluates and predicts without the other ranks."""

    same_data = False

    def is_local_call(self, name: str) -> bool:
        """Return whether a call is for this rank only; refuse training that Horovod would not sum.

        Horovod's ranks may evaluate and predict when they like, or one of them alone.
        """
        if name not in ("fit", "train_on_batch") or not self.takes_over:
            return self.takes_over
        if exchange_of(self.model.optimizer) is None:
            message = (
                f"{name} of model {self.model.name!r}, whose optimizer is no "
                "DistributedOptimizer: each rank would train a model of its own. Write "
                "optimizer = hvd.DistributedOptimizer(optimizer), after hvd.init() and before "
                "model.compile, and load models by hvd.load_model"
            )
            raise NotDistributedError(at_rank(self.strategy.rank, message))
        return False

    def bind_optimizers(self) -> None:
        """Make the optimizers reduce their gradients, in the way that each was made for."""
        super().bind_optimizers()
        optimizers = shared_optimizer.optimizers_of(self.model)
        exchanges = shared_optimizer.gradient_exchanges_of(self.model)
        for optimizer, one in zip(optimizers, exchanges, strict=True):
            asked = parse(exchange_of(optimizer) or None)
            if asked is not None and self.takes_over and one.exchange != asked:
                one.use(asked)

    def take_epoch_iterator(
        self, iterator: keras_data.CutEpochIterator | None = None, data_batch: Tree = None
    ) -> None:
        """Take the data, of which only this rank's batches are known."""
        super().take_epoch_iterator(iterator, data_batch)
        self.feed.rows_unknown = self.takes_over

    def cut(self, dataset: keras_data.Dataset) -> tf.data.Dataset:
        """Take a dataset as this rank's own batches."""
        return keras_data.cut_own(dataset)

    def cut_batches(self, batches: Iterable[Tree]) -> list[slicing.Slices]:
        """Take single batches as this rank's own."""
        return [keras_data.as_own_slice(keras_data.as_tensors(batch)) for batch in batches]

    def make_test_function(self, force: bool = False) -> Loop:
        """Make Keras's own test function."""
        keras.Model.make_test_function(self.model, force)
        return self.model.test_function

    def make_predict_function(self, force: bool = False) -> Callable[[list[Tree]], Tree]:
        """Make Keras's own predict function."""
        keras.Model.make_predict_function(self.model, force)
        return self.model.predict_function


class HorovodStrategy(AllReduceStrategy):
    """An `AllReduceStrategy` whose ranks bring data of their own; `hvd.init()` makes it."""

    def __init__(self) -> None:
        super().__init__()
        seed = self.shuffle_seed.value
        if seed is not None:  # ranks shuffle and draw differently unless the script sets a seed
            own = spread_seed(seed, self.rank)
            keras.utils.set_random_seed(own)
            self.shuffle_seed.restore(own, own)

    def make_trainer(self, model: keras.Model) -> RankTrainer:
        """Make the trainer of a model compiled after `hvd.init()`."""
        return RankTrainer(model, self)


class _Job:
    """The strategy of this process, and its scope while `hvd.init()` is in force."""

    def __init__(self) -> None:
        self.made: HorovodStrategy | None = None
        self.scope: contextlib.ExitStack | None = None


_job = _Job()


def strategy() -> HorovodStrategy:
    """Return the strategy; raise as Horovod does before `init`."""
    if _job.made is None or _job.scope is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _job.made


def note_summed(sources: Sequence[object]) -> None:
    """Let the script's own loop apply optimizers to variables, whose gradients it sums."""
    variables = filter(keras_variables.is_variable, sources)
    strategy().summed_by_loop |= {keras_variables.reference_to(one) for one in variables}


def hint(text: str) -> None:
    """Print on rank 0 what dtk makes of an argument that changes no result."""
    tell(strategy(), text)


def _without_old_argument(
    model: keras.Model, *args: object, original: Function[None], **kwargs: object
) -> None:
    # Horovod's examples give it to `compile` of TensorFlow 2.0; Keras 3 knows it no more.
    kwargs.pop("experimental_run_tf_function", None)
    original(model, *args, **kwargs)


def init(comm: object = None, process_sets: Sequence[object] | None = None) -> None:
    """Join the ranks; models compiled from now on train over all of them.

    Call it before models are compiled, and before TensorFlow computes anything. A second call does
    nothing.

    Args:
        comm: Must be None: all ranks that were started.
        process_sets: Must be empty, see `add_process_set`.

    Raises:
        ReplacedError: An argument was given.
        CommunicatorError: The ranks cannot be joined; the message says what to do.

    Example:
        >>> import dtk.migrate.horovod as hvd
        >>> hvd.init()
        >>> hvd.rank(), hvd.size()
        (0, 1)
        >>> hvd.shutdown()
    """
    if comm is not None or process_sets:
        raise ReplacedError(
            "hvd.init takes all ranks that were started; start as many as shall train, such as "
            "`dtk run -n 4`, and join some of them by strategy.communicator.split(color)"
        )
    if _job.made is None:
        # Horovod's scripts ask for this after `init`, which has started TensorFlow by then; what is
        # set already may be set again.
        for gpu in tf.config.list_physical_devices("GPU"):
            with contextlib.suppress(RuntimeError):
                tf.config.experimental.set_memory_growth(gpu, True)
        _job.made = HorovodStrategy()
    if _job.scope is None:
        _job.scope = contextlib.ExitStack()
        _job.scope.enter_context(_job.made.scope())
        owner = definer(keras.Model, "compile")
        _job.scope.enter_context(patch_around(owner, compile=_without_old_argument))


def shutdown() -> None:
    """Leave what `init` has entered: models compiled from now on are plain Keras's.

    Example:
        >>> import dtk.migrate.horovod as hvd
        >>> hvd.shutdown()
        >>> hvd.is_initialized()
        False
    """
    if _job.scope is not None:
        _job.scope.close()
        _job.scope = None


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not."""
    return _job.scope is not None


# This rank's place.


def rank() -> int:
    """Return the rank of this process."""
    return strategy().rank


def size() -> int:
    """Return the number of processes."""
    return strategy().processes


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return strategy().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return strategy().world.local_size


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of this process as a tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(rank(), name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of this process among those of its host as a tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(local_rank(), name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of processes as a tensor.

    Args:
        process_set_id: Must be 0: all processes.
        name: Name of the tensor.
    """
    _check_set(process_set_id)
    return tf.constant(size(), name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of processes on this host as a tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(local_size(), name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 as a tensor: this process is one of all.

    Args:
        process_set_id: Must be 0: all processes.
        name: Name of the tensor.
    """
    _check_set(process_set_id)
    return tf.constant(1, name=name)


def _check_set(number: int) -> None:
    if number:
        raise ReplacedError(f"process_set_id={number}: there is only hvd.global_process_set, 0")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU.

    Args:
        ext_base_name: Not needed.
        verbose: Not needed.
    """
    return bool(tf.config.list_physical_devices("GPU"))


def _hosts() -> Counter[str]:
    """Count the ranks of each host, hosts in the order of their first rank."""
    return Counter(strategy().world.hosts)


def _across() -> list[str]:
    """Return the hosts that have a process of this local rank."""
    return [host for host, ranks in _hosts().items() if ranks > local_rank()]


def cross_rank() -> int:
    """Return the number of this host among those that have a process of this local rank."""
    return _across().index(strategy().world.hosts[rank()])


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return len(_across())


def is_homogeneous() -> bool:
    """Return whether every host has as many processes."""
    return len(set(_hosts().values())) == 1


# What moves the bytes. Horovod tells of its own build; without it there is only mpi4py.


def _flag(name: str, what: str) -> Callable[[], bool]:
    def flag() -> bool:
        if _job.scope is None and name.endswith("_built"):  # scripts ask before `init`
            world = os.environ.get(COMMUNICATOR) or communicators.choose(detect()).name
        else:
            world = strategy().world.name
        if world != "horovod":
            return world == "mpi" and name in ("mpi_enabled", "mpi_built")
        import horovod.tensorflow

        return bool(getattr(horovod.tensorflow, name)())

    flag.__name__ = flag.__qualname__ = name
    flag.__doc__ = f"Return whether the communicator {what}."
    return flag


mpi_threads_supported = _flag("mpi_threads_supported", "is a Horovod whose MPI supports threads")
mpi_enabled = _flag("mpi_enabled", "sends by MPI")
mpi_built = _flag("mpi_built", "can send by MPI")
gloo_enabled = _flag("gloo_enabled", "is a Horovod that sends by Gloo")
gloo_built = _flag("gloo_built", "is a Horovod built with Gloo")
nccl_built = _flag("nccl_built", "is a Horovod built with NCCL")
ddl_built = _flag("ddl_built", "is a Horovod built with DDL")
ccl_built = _flag("ccl_built", "is a Horovod built with oneCCL")
cuda_built = _flag("cuda_built", "is a Horovod built with CUDA")
rocm_built = _flag("rocm_built", "is a Horovod built with ROCm")

_PROFILE = (
    "give fit keras.callbacks.TensorBoard(log_dir, profile_batch=(10, 20)), which writes rank 0's "
    "steps with their messages"
)
start_timeline = replaced("start_timeline", _PROFILE)
stop_timeline = replaced("stop_timeline", _PROFILE)
