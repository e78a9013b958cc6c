"""Many processes, one replica each, gradients summed over a communicator."""

from __future__ import annotations

import socket
from typing import TypeVar

import keras
import tensorflow as tf

from dtk import cluster, communicators, quiet
from dtk.cluster import progress, startup_barrier
from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.compat import tf_replicas
from dtk.compat.tf_extended import AllReduceExtended
from dtk.errors import at_rank
from dtk.exchange import Auto, Dense, parse
from dtk.exchange.contract import Exchange
from dtk.nests import Leaf
from dtk.parameter_server.consistency_models import check_no_exchange
from dtk.strategies import devices, start
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.replica.self_test import is_wanted
from dtk.trainer.strategy import ShuffleSeed

_Made = TypeVar("_Made")


class AllReduceStrategy(DtkStrategy):
    """Synchronous data-parallel training over several processes, on one or many hosts.

    Every process runs the same script. Each global batch is cut into one slice per process, and
    gradients are summed, so N workers end with the weights of one process at the same global batch.
    With one process it is plain Keras.

    Args:
        communicator: "auto" (from the environment), "horovod", "mpi" (mpi4py), "collective"
            (TensorFlow's own), "local" (one process), or a `dtk.communicators.Communicator`. dtk
            measures the cost of a message and of a byte once in each world and chooses the sizes of
            buckets and the like by it: `print(strategy.communicator.costs)` shows both; see
            `dtk.communicators.cost_measurement`.
        exchange: Which part of the gradients is sent, and when: a value of `dtk.exchange`, or its
            short name ("auto", "fp16", "bf16", "1bit" to "16bit"); None sends them unchanged.
        model_parallel: How many processes hold the parts of one model, see `dtk.layers`. The
            processes then form a grid: `model_parallel` neighbours train on the same rows, and
            gradients are summed over the `size / model_parallel` processes that hold the same part.
            1 is data parallelism only.
        shard_optimizer: Whether each process holds a part of the optimizer's state only, 1 / N of
            it, and updates that part of the weights: gradients are reduce-scattered and new weights
            gathered, which sends as much as an all-reduce. Sums of gradient accumulation are
            divided as well. Weights stay whole on every process. An optimizer with an `update_step`
            of your own is given whole variables, each on one process. Goes with `Dense` exchanges.
        memory_growth: Whether TensorFlow allocates the memory of this rank's GPU as it needs it;
            None keeps TensorFlow's default, which takes most of it at once. On a host with GPUs
            every rank sees only the GPU of its local rank; see `dtk.strategies.devices`.
        self_test: Whether a step is computed on a few rows first, as a whole and in the parts of
            all ranks, which must agree: "auto" if a part of the step is not Keras's own, True
            always, False never (losses of unknown kind then count as means over rows).
        stall_timeout: Seconds after which a job that makes no progress is ended, with exit code
            124 and the name of the missing rank; 0: never; None: DTK_STALL_TIMEOUT, or 300. Under
            `dtk run` its option `--stall-timeout` counts instead.

    Raises:
        ValueError: The exchange does not exist, or cannot work with this many workers or with parts
            of models; or this host has GPUs, but fewer than ranks; or the processes do not form a
            grid.
        TypeError: The value is not an exchange, or is one for parameter servers.
        CommunicatorError: The communicator cannot start; the message says what to do.
        DisagreementError: Ranks run different scripts or versions of dtk.

    Example:
        >>> import dtk, keras
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> strategy.size
        1
    """

    def __init__(
        self,
        communicator: str | Communicator = "auto",
        exchange: Exchange | str | None = None,
        *,
        model_parallel: int = 1,
        shard_optimizer: bool = False,
        memory_growth: bool | None = None,
        self_test: bool | str = "auto",
        stall_timeout: float | None = None,
    ):
        """Take the arguments that the class describes."""
        check_no_exchange(exchange)
        self.self_test = is_wanted(self_test)
        timeout = start.checked_timeout(stall_timeout)
        parsed = parse(exchange)
        with quiet.device_start():
            world, device = _joined(communicator, memory_growth, timeout)
        data, model = make_grid(world, model_parallel)
        super().__init__(AllReduceExtended(self, device, data), data, None, world, model)
        self.exchange = parsed
        self.shard_optimizer = shard_optimizer and world.size > 1
        if self.shard_optimizer:
            _check_sharding(parsed, model.size, world.rank)
        if exchange is not None and data.size == 1:
            print(f"dtk: one worker has nobody to exchange gradients with; {parsed} is not used")
        self.shuffle_seed = ShuffleSeed(
            start.agree(
                world,
                device,
                timeout,
                exchange=repr(parsed),
                model_parallel=str(model_parallel),
                shard_optimizer=str(shard_optimizer),
            )
        )
        for group in (data, model):
            if group is not world:  # all ranks know whether processors are alike, and the costs
                group.learn(world.alike, world.costs)
        if model.size > 1 and isinstance(parsed, Auto):
            message = (
                f"exchange={parsed} with model_parallel={model.size}: the processes that hold "
                "parts of one model might choose differently; name the exchange, such as "
                '"fp16"'
            )
            raise ValueError(at_rank(model.rank, message))
        parsed.check(data)

    def gather_outputs(self, outputs: _Made) -> _Made:
        """Gather the rows of all ranks, on every rank."""
        return keras.tree.map_structure(lambda rows: _gathered(rows, self.communicator), outputs)


def _joined(
    communicator: str | Communicator, memory_growth: bool | None, stall_timeout: float
) -> tuple[Communicator, str]:
    """Connect the ranks and take this rank's device, before TensorFlow starts if possible."""
    if isinstance(communicator, Communicator):
        return communicator, devices.link(communicator, devices.pin(communicator, memory_growth))
    place = cluster.detect() if communicator != "local" else None
    if place is not None and place.size == 1:
        start.tell_of_idle_tasks()
    # If the launcher does not say which ranks share a host, the communicator finds out; but that
    # starts TensorFlow.
    ahead = place is not None and place.tells_local_rank
    device = devices.pin(place, memory_growth) if place is not None and ahead else ""
    if place is not None and not progress.is_launched():
        if place.size > 1:
            start.end_at_once(f"rank {place.rank} on {socket.gethostname()}", place.rank)
        startup_barrier.await_neighbours(place, stall_timeout)
    # `dtk run` sees at once that a task has died; without it, only the task's silence shows it.
    patient = tf_replicas.let_tasks_be_silent if progress.is_launched() else None
    world = communicators.create(communicator, place, patient)
    return world, devices.link(world, device or devices.pin(world, memory_growth))


def _gathered(rows: Leaf, communicator: Communicator) -> Leaf:
    if not isinstance(rows, tf.RaggedTensor):
        return communicator.allgather(_of_one_shape(rows, communicator))
    values = _gathered(rows.values, communicator)
    lengths = communicator.allgather(rows.row_lengths())
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def _of_one_shape(rows: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Refuse rows of other shapes on other ranks, such as text padded to a rank's longest row."""
    if rows.shape[1:].is_fully_defined():
        return rows
    sizes, none = tf.shape(rows)[1:], tf.shape(rows)[0] == 0
    # On all ranks: one that raised alone would leave the others waiting. No rows have no shape.
    both = tf.where(none, [[0], [-sizes.dtype.max]], tf.stack([sizes, -sizes]))
    largest, smallest = tf.unstack(communicator.allreduce(both, "max") * [[1], [-1]])
    same = tf.debugging.Assert(
        tf.reduce_all(largest == smallest),
        [
            at_rank(
                communicator.rank,
                "predict: an output's rows have other shapes on other ranks, from",
            ),
            smallest,
            "to",
            largest,
            "; here",
            sizes,
            ". A layer pads a batch to its "
            "longest row, and each rank has only a part of the rows: give it a fixed length, such "
            "as TextVectorization(output_sequence_length=...)",
        ],
    )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.reshape(rows, tf.concat([tf.shape(rows)[:1], largest], 0))


def _check_sharding(exchange: Exchange, parts: int, rank: int) -> None:
    """Refuse what does not go with `shard_optimizer=True`."""
    why = ""
    if parts > 1:
        why = f"model_parallel={parts}, which divides layers and their slots already"
    elif not isinstance(exchange, Dense):
        why = (
            f"exchange={exchange}: each rank gets the sum of its own part of gradients only, as "
            'they are or in half precision; use None, "fp16" or "bf16"'
        )
    if why:
        raise ValueError(at_rank(rank, f"shard_optimizer=True with {why}"))


def make_grid(world: Communicator, parts: int) -> tuple[Communicator, Communicator]:
    """Divide ranks into models of `parts` parts. Every rank calls it.

    Rank r has place `r % parts` in its model and place `r // parts` among replicas. So the parts of
    a model are on neighbouring ranks, which launchers put on one host if possible.

    Returns:
        The processes that hold the same part, one of each replica; and the processes that hold the
        parts of one replica.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(
            at_rank(world.rank, f"model_parallel={parts!r}; expected a whole number, 1 or more")
        )
    if world.size % parts:
        fits = [n for n in range(1, world.size + 1) if world.size % n == 0]
        message = (
            f"model_parallel={parts} with {world.size} processes: each model takes {parts} of "
            f"them, and the rest would be left over; use one of {fits}, or start a multiple of "
            f"{parts}, such as `dtk run -n {parts * max(1, round(world.size / parts))}`"
        )
        raise ValueError(at_rank(world.rank, message))
    if parts == 1:
        return world, LocalCommunicator(world.hosts[world.rank] if world.hosts else None)
    data = world.split(world.rank % parts, world.rank)
    return data, world.split(world.rank // parts, world.rank)
