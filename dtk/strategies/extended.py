"""The seam with TensorFlow: the only file that touches its private names.

A `tf.distribute.Strategy` is a thin public face over an "extended" object that decides how
variables are made, how values are reduced and how datasets are split. dtk derives its own from
TensorFlow's one-device and mirrored ones and overrides only what moves bytes between ranks.

Private names used, each with a test in tests/strategies/test_private_names.py:

    tensorflow.python.distribute.distribute_lib         ReplicaContext (constructor), InputContext
        ReplicaContext._replica_id_in_sync_group
    tensorflow.python.distribute.distribute_utils       create_mirrored_variable, regroup,
        VARIABLE_CLASS_MAPPING, VARIABLE_POLICY_MAPPING
    tensorflow.python.distribute.input_lib              DistributedDataset (its name)
    tensorflow.python.distribute.one_device_strategy    OneDeviceExtended
        ._create_variable, ._call_for_each_replica, ._reduce_to, ._batch_reduce_to,
        ._gather_to_implementation, ._replica_ctx_all_reduce, ._use_merge_call,
        ._num_replicas_in_sync, ._get_local_replica_id, ._experimental_distribute_dataset,
        ._distribute_datasets_from_function, ._experimental_distribute_values_from_function
    tensorflow.python.distribute.mirrored_strategy      MirroredExtended (the same methods)
    Strategy._collective_key_base, Variable._distribute_strategy
    tensorflow.python.distribute.parameter_server_strategy_v2
        ParameterServerStrategyV2 (._connect_to_cluster, ._verify_args_and_config and the attributes
        its constructor sets), ParameterServerStrategyV2Extended (._create_variable,
        ._create_variable_round_robin, ._experimental_distribute_dataset, ._use_merge_call)
    tensorflow.python.distribute.sharded_variable       ShardedVariable
    tensorflow.python.distribute.coordinator
        cluster_coordinator.ClusterCoordinator._cluster (.schedule), ._is_worker_failure
        coordinator_context.get_current_dispatch_context
    tensorflow.python.distribute.values                 DistributedVariable.values,
        MirroredVariable, SyncOnReadVariable
    tensorflow.python.framework.auto_control_deps_utils   register_read_only_resource_op
    tensorflow.python.framework.ops                     colocate_with
    tensorflow.python.eager.context                     context().executing_eagerly, global_seed
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    input_lib,
    mirrored_strategy,
    one_device_strategy,
    parameter_server_strategy_v2,
    sharded_variable,
    values,
)
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import auto_control_deps_utils, ops

from dtk.communicators import collective
from dtk.communicators.base import Communicator
from dtk.strategies import reading, slicing
from dtk.strategies.pipelines import in_time, read_ahead


def op_name(reduce_op: Any) -> str:
    """`tf.distribute.ReduceOp` or its name -> the communicator's word for it."""
    return str(getattr(reduce_op, "value", reduce_op)).lower()


def global_seed() -> int | None:
    """TensorFlow's global seed, None when nobody has set one."""
    return eager_context.global_seed()


def replica_index() -> int:
    """Index of the running replica over the whole world; call in a replica context."""
    replica = tf.distribute.get_replica_context()
    return int(replica._replica_id_in_sync_group)


def local_value(variable: Any) -> Any:
    """What this replica holds of a variable, without any communication."""
    if isinstance(variable, values.DistributedVariable):
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.strategy is variable.distribute_strategy:
            return variable._get_on_device_or_primary()
        return variable.values[0]
    return variable


# Whether the running replica has rows of its own; one per thread, as replicas may be threads.
_presence = threading.local()

# Below this many elements multiplying is cheaper than branching.
_FEW = 1 << 14


@contextlib.contextmanager
def counted_if(present: tf.Tensor | None) -> Iterator[None]:
    """Inside, what this replica adds to sums over replicas counts only if `present` (a bool).

    None: it counts in any case.
    """
    outer = getattr(_presence, "flag", None)
    _presence.flag = present
    try:
        yield
    finally:
        _presence.flag = outer


def if_present(value: Any) -> Any:
    """A structure of tensors (None stays None), or zeros where the replica has no rows."""
    present = getattr(_presence, "flag", None)
    flat = tf.nest.flatten(value)
    if present is None or not flat:
        return value
    given = [v for v in flat if v is not None]
    elements = [getattr(v, "shape", tf.TensorShape(None)).num_elements() for v in given]
    if None not in elements and sum(elements) < _FEW and not _any_slices(given):
        counted = [_times(tf.convert_to_tensor(v), present) for v in given]
    else:
        counted = tf.cond(
            present,
            lambda: [_nothing(v, False) for v in given],
            lambda: [_nothing(v, True) for v in given],
        )
    remaining = iter(counted)
    flat = [None if v is None else next(remaining) for v in flat]
    return tf.nest.pack_sequence_as(value, flat)


def _any_slices(flat: Sequence) -> bool:
    return any(isinstance(v, tf.IndexedSlices) for v in flat)


def _times(value: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_floating:
        return tf.math.multiply_no_nan(value, tf.cast(present, value.dtype))
    return tf.where(present, value, tf.zeros_like(value))


def _nothing(value: Any, really: bool) -> Any:
    """`value`, or as much of zero."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_nothing(value.values, really), value.indices, value.dense_shape)
    value = tf.convert_to_tensor(value)
    return tf.zeros_like(value) if really else tf.identity(value)


# Whether this thread computes a step as if there were one replica.
_whole = threading.local()


@contextlib.contextmanager
def as_one_replica(strategy: Any) -> Iterator[None]:
    """Inside, a step is computed as in a world of one: nothing is reduced over replicas."""
    _whole.flag = True
    try:
        with (
            tf.device(strategy.extended.worker_devices[0]),
            distribute_lib.ReplicaContext(strategy, 0),
        ):
            yield
    finally:
        _whole.flag = False


def _is_whole() -> bool:
    return getattr(_whole, "flag", False)


class _Number:
    """What makes a distributed variable a number where a plain variable is one.

    TensorFlow's know neither `int()` nor `float()`, and NumPy makes no array of a scalar one. A
    callback may well ask for `int(optimizer.iterations)` or `float(optimizer.learning_rate)`.
    """

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Reading has made a copy already.
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]


class MirroredVariable(_Number, values.MirroredVariable):
    """A variable of which every replica holds a copy, all of them equal."""


class SyncOnReadVariable(_Number, values.SyncOnReadVariable):
    """A variable of which every replica holds a part, summed when it is read."""


_CLASSES = distribute_utils.VARIABLE_CLASS_MAPPING | {
    tf.VariableSynchronization.ON_WRITE: MirroredVariable,
    tf.VariableSynchronization.ON_READ: SyncOnReadVariable,
}


class AllReduceExtended(one_device_strategy.OneDeviceExtended):
    """One process is one replica; values are reduced over a communicator.

    Args:
        container_strategy: The strategy this extends.
        device: Where this replica computes, such as "/cpu:0" or "/gpu:0".
        communicator: How bytes move.
    """

    def __init__(self, container_strategy: Any, device: str, communicator: Communicator):
        super().__init__(container_strategy, device)
        self._communicator = communicator
        self._reads_are_local = False
        self._told: Callable[[tf.Tensor], None] | None = None

    # World shape.

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if _is_whole() else self._communicator.size

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    def _use_merge_call(self) -> bool:
        # Reductions are plain graph ops, legal inside tf.cond and tf.while_loop. This alone makes
        # gradient accumulation and steps_per_execution > 1 work.
        return False

    # Who writes, for scripts that ask TensorFlow. The evaluator has no rank, and trains nothing.

    @property
    def should_checkpoint(self) -> bool:
        """Whether this is rank 0."""
        return self._communicator.rank == 0 and not self._container_strategy().is_evaluator

    @property
    def should_save_summary(self) -> bool:
        """Whether this is rank 0."""
        return self.should_checkpoint

    # Variables: plain ones, equal on all ranks by induction. Only those that are summed when read
    # (Keras's metric state) need a class of their own.

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)

        def create_one(**inner: Any) -> list:
            with tf.device(self._device):
                return [next_creator(**inner)]

        return distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create_one,
            _CLASSES,
            distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    def variable_created_in_scope(self, v: Any) -> bool:
        """Plain variables belong to every strategy: models may be built outside the scope."""
        owner = getattr(v, "_distribute_strategy", None)
        return owner is None or owner is self._container_strategy()

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"variable {colocate_with_variable.name!r} belongs to another strategy; create the "
                "model and its optimizer under the strategy that trains them"
            )

    # Running and reducing.

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        replica = distribute_lib.ReplicaContext(self._container_strategy(), self._communicator.rank)
        with tf.device(self._device), replica:
            return fn(*args, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        if _is_whole():
            return value
        return _all_reduce(self._communicator, reduce_op, if_present(value))

    def all_reduce_max(self, tensors: list) -> list:
        """The largest over the replicas; call in a replica context."""
        return self._communicator.allreduce(if_present(tensors), "max")

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        value = tf.nest.map_structure(local_value, value)
        if self._reads_are_local:
            return tf.nest.map_structure(tf.convert_to_tensor, value)
        return self._replica_ctx_all_reduce(reduce_op, value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        del options
        return self._replica_ctx_all_reduce(
            reduce_op, [local_value(value) for value, _ in value_destination_pairs]
        )

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        del destinations, options
        return self.gather(value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate `value` of all replicas along `axis`, in rank order."""
        value = tf.convert_to_tensor(local_value(value))
        if axis == 0:
            return self._communicator.allgather(value)
        order = [axis, *(d for d in range(value.shape.rank) if d != axis)]
        back = [order.index(d) for d in range(value.shape.rank)]
        gathered = self._communicator.allgather(tf.transpose(value, order))
        return tf.transpose(gathered, back)

    @contextlib.contextmanager
    def local_reads(self) -> Iterator[None]:
        """Inside, reading a summed-on-read variable communicates nothing.

        For code that runs on one rank only, such as a checkpoint writer.
        """
        before, self._reads_are_local = self._reads_are_local, True
        try:
            yield
        finally:
            self._reads_are_local = before

    # Data.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        del options
        if self._communicator.size == 1:
            return in_time(dataset)
        ranks, size = (self._communicator.rank,), self._communicator.size
        if self._told is not None:
            cut_one = reading.with_digest(lambda batch: slicing.cut_exactly(batch, ranks, size)[0])
            local = read_ahead(slicing.mapped(dataset.enumerate(), cut_one))
            return PerRankDataset(local, whole=dataset, told=self._told)
        cut = slicing.cut_dataset_exactly(dataset, ranks, self._communicator.size)
        only = tf.autograph.experimental.do_not_convert(lambda *parts: parts[0])
        return PerRankDataset(read_ahead(cut.map(only)), whole=dataset)

    @contextlib.contextmanager
    def batches_told_to(self, told: Callable[[tf.Tensor], None]) -> Iterator[None]:
        """Inside, datasets are distributed that tell the digest of each batch they are read of."""
        self._told = told
        try:
            yield
        finally:
            self._told = None

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        del options
        size, rank = self._communicator.size, self._communicator.rank
        input_context = distribute_lib.InputContext(
            num_input_pipelines=size, input_pipeline_id=rank, num_replicas_in_sync=size
        )
        return PerRankDataset(in_time(dataset_fn(input_context)), whole=None)

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        return value_fn(
            distribute_lib.ValueContext(self._communicator.rank, self._communicator.size)
        )


class MirroredExtended(mirrored_strategy.MirroredExtended):
    """Several devices of one process, with TensorFlow's own mirrored variables.

    TensorFlow's strategy reduces by merging its replica threads, which cannot stand inside
    `tf.cond` or `tf.while_loop`: gradient accumulation, loss scaling and several steps per
    execution fail. Here each replica calls collective ops, as a rank does between processes.

    Args:
        container_strategy: The strategy this extends.
        devices: Device names.
    """

    def __init__(self, container_strategy: Any, devices: Sequence[str]):
        # TensorFlow numbers the device groups of a process from here; strategies must not share.
        container_strategy._collective_key_base = id(container_strategy) % 2**30
        super().__init__(container_strategy, devices=devices)
        # Replicas share lookup tables. Looking up changes nothing, but TensorFlow has to be told,
        # or it makes one replica's step wait for the end of the other's.
        for op in ("LookupTableFindV2", "LookupTableSizeV2"):
            auto_control_deps_utils.register_read_only_resource_op(op)
        # Groups of other strategies in this process must have other keys.
        self._replicas = collective.replicas(self._devices, group=id(container_strategy))

    def _use_merge_call(self) -> bool:
        return False

    def replica_communicator(self) -> Communicator:
        """The running replica's view of its peers."""
        return self._replicas[replica_index()]

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if _is_whole() else super()._num_replicas_in_sync

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if _is_whole():
            return value
        if tf.executing_eagerly():
            # Eager replicas take turns, so a collective op would wait for ever: merge them.
            return distribute_lib.StrategyExtendedV2._replica_ctx_all_reduce(
                self, reduce_op, if_present(value), options
            )
        return _all_reduce(self.replica_communicator(), reduce_op, if_present(value))

    def all_reduce_max(self, tensors: list) -> list:
        """The largest over the replicas; call in a replica context."""
        tensors = if_present(tensors)
        if not tf.executing_eagerly():
            return self.replica_communicator().allreduce(tensors, "max")

        def largest(_: Any, merged: list) -> list:
            return [tf.reduce_max(components(value), axis=0) for value in merged]

        return tf.distribute.get_replica_context().merge_call(largest, args=(tensors,))

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        # Each replica updates its own copy with the same value. TensorFlow's aggregation on
        # assignment would merge threads, and has nothing left to do.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        made = super()._create_variable(next_creator, **kwargs)
        # TensorFlow asks nobody which class it should be. One without copies stays what it is.
        if isinstance(made, values.MirroredVariable):
            made.__class__ = MirroredVariable
        elif isinstance(made, values.SyncOnReadVariable):
            made.__class__ = SyncOnReadVariable
        return made

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        # Outside replicas everything is at hand: add it up here instead of launching collectives.
        del destinations, options
        return tf.nest.map_structure(lambda v: _reduce_components(reduce_op, v, self), value)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        del options
        return [_reduce_components(reduce_op, value, self) for value, _ in value_destination_pairs]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        del destinations, options
        if isinstance(value, values.DistributedValues):
            return tf.concat(value.values, axis)
        return value

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        del options
        size = self._num_replicas_in_sync
        if size == 1:
            return in_time(dataset)
        cut = slicing.cut_dataset_exactly(dataset, range(size), size)
        return PerRankDataset(read_ahead(cut), whole=dataset, regrouped=True)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        distributed = super()._distribute_datasets_from_function(dataset_fn, options)
        # For custom loops it is as TensorFlow made it. `fit` would ask it for `map` first of all.
        distributed.map = _refuse_per_replica_batches
        return distributed


CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ServerStrategy(parameter_server_strategy_v2.ParameterServerStrategyV2):
    """TensorFlow's parameter-server strategy, with an extended object of dtk's.

    TensorFlow's constructor connects to the cluster and makes its own extended object; here the two
    are apart: `connect` first, then construct.
    """

    def __init__(self, extended: Any):
        distribute_lib.Strategy.__init__(self, extended)

    def connect(self, resolver: Any) -> None:
        """Connect this process, the chief, to the servers of the other tasks.

        Args:
            resolver: A `tf.distribute.cluster_resolver.ClusterResolver`.
        """
        self._cluster_resolver = resolver
        self._verify_args_and_config(resolver)
        self._cluster_coordinator = None
        self._connect_to_cluster(coordinator_name="chief")
        self._should_use_with_coordinator = True
        self._canonicalize_devices = False
        self._is_parameter_server_strategy_v2 = True


class ParameterServerExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):
    """Variables on the parameter servers, by bytes; metric state on the chief.

    Args:
        container_strategy: The strategy this extends.
        resolver: Its cluster.
        partitioner: A `tf.distribute.experimental.partitioners.Partitioner`, or None.

    Attributes:
        bytes_placed: Bytes of variables by server.
    """

    def __init__(self, container_strategy: Any, resolver: Any, partitioner: Any):
        super().__init__(container_strategy, resolver, partitioner)
        self.bytes_placed = [0] * self._num_ps
        self._without_part: set[int] = set()

    def _use_merge_call(self) -> bool:
        return False

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # Metric state: the chief adds up what the workers count.
            with tf.device(CHIEF):
                return next_creator(**kwargs)
        kwargs["aggregation"] = tf.VariableAggregation.NONE
        beside = kwargs.get("colocate_with")
        if isinstance(beside, sharded_variable.ShardedVariable):
            return self._create_sharded_beside(beside, next_creator, **kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _create_sharded_beside(self, beside: Any, next_creator: Callable, **kwargs: Any) -> Any:
        """A slot variable of a partitioned variable, partitioned alike."""
        initial = kwargs.pop("initial_value")
        whole = tf.convert_to_tensor(initial() if callable(initial) else initial)
        sizes = [shard.shape[0] for shard in beside.variables]
        kwargs.pop("shape", None)
        made = []
        for shard, part in zip(beside.variables, tf.split(whole, sizes), strict=True):
            kwargs |= {"colocate_with": shard, "initial_value": part}
            made.append(super()._create_variable(next_creator, **kwargs))
        return sharded_variable.ShardedVariable(made)

    def _create_variable_round_robin(self, next_creator: Callable, **kwargs: Any) -> Any:
        """On the server that holds the fewest bytes; TensorFlow counts variables instead.

        Parts of one variable go to different servers, as long as there are some.
        """
        part = str(kwargs.get("name")).rpartition("/part_")[2]
        if not part.isdigit() or int(part) % self._num_ps == 0:
            self._without_part = set(range(self._num_ps))
        index = min(self._without_part, key=lambda server: self.bytes_placed[server])
        self._without_part.discard(index)
        with (
            ops.colocate_with(None, ignore_existing=True),
            tf.device(server_device(index)),
        ):
            variable = next_creator(**kwargs)
        self.bytes_placed[index] += variable.shape.num_elements() * variable.dtype.size
        return variable

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        self._container_strategy().check_whole_step("a reduction over workers inside a step")
        return value

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if tf.inside_function():
            return super()._experimental_distribute_dataset(dataset, options)
        # The chief reads it and hands out batches.
        return dataset

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        if tf.inside_function():
            return super()._distribute_datasets_from_function(dataset_fn, options)
        return self._container_strategy().per_worker_dataset(dataset_fn)


def server_device(index: int) -> str:
    """The device variables of parameter server `index` live on."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def in_replica(strategy: Any) -> Any:
    """A context in which Keras takes itself to be the one replica of `strategy`."""
    return distribute_lib.ReplicaContext(strategy, 0)


def is_served(variable: Any) -> bool:
    """Whether a TensorFlow variable is where a parameter-server strategy puts its own."""
    if isinstance(variable, sharded_variable.ShardedVariable):
        return True
    return "/job:" in variable.device and "/job:localhost" not in variable.device


def shards_of(variable: Any) -> tuple | None:
    """The parts of a partitioned variable in row order; None for any other."""
    if isinstance(variable, sharded_variable.ShardedVariable):
        return tuple(variable.variables)
    return None


def employ(strategy: Any, work: Callable[[], None], count: int) -> None:
    """Run a Python function `count` times on the threads that TensorFlow keeps for its workers.

    TensorFlow calls it under the worker's device. When it raises because the worker is lost,
    TensorFlow waits until the worker is back, rebuilds its resources, and calls it again.
    """
    cluster = tf.distribute.coordinator.ClusterCoordinator(strategy)._cluster
    for _ in range(count):
        cluster.schedule(work, args=None, kwargs=None)


def hush_coordinator() -> None:
    """Keep TensorFlow's account of a lost worker, several pages of it, off the screen.

    dtk says in one line who is lost, and raises what ends the job.
    """

    def needed(record: logging.LogRecord) -> bool:
        return os.path.basename(record.pathname) != os.path.basename(cluster_coordinator.__file__)

    tf.get_logger().addFilter(needed)


def current_worker() -> int:
    """Index of the worker whose thread this is; call in what `employ` runs."""
    return int(coordinator_context.get_current_dispatch_context().worker_index)


def worker_is_lost(error: Exception) -> bool:
    """Whether TensorFlow takes an error for the loss of a worker, and will wait for its return."""
    if isinstance(error, tf.errors.CancelledError) and "/job:" in str(error):
        return True
    return bool(cluster_coordinator._is_worker_failure(error))


def _all_reduce(communicator: Communicator, reduce_op: Any, value: Any) -> Any:
    """All-reduce a structure of tensors and `IndexedSlices`."""
    flat = tf.nest.flatten(value)
    if not flat:
        return value
    return tf.nest.pack_sequence_as(value, communicator.allreduce(flat, op_name(reduce_op)))


def _reduce_components(reduce_op: Any, value: Any, extended: Any) -> Any:
    if isinstance(value, values.DistributedValues) and isinstance(
        value.values[0], tf.IndexedSlices
    ):
        return _add_slices(value.values, op_name(reduce_op))
    if isinstance(value, values.DistributedValues):
        parts = [tf.convert_to_tensor(part) for part in value.values]
    else:
        # A plain value stands for one that every replica holds.
        parts = [tf.convert_to_tensor(value)] * extended._num_replicas_in_sync
    total = tf.add_n(parts) if parts[0].dtype != tf.bool else tf.reduce_any(parts, axis=0)
    if op_name(reduce_op) == "mean":
        total = total / tf.cast(len(parts), total.dtype)
    return total


def _add_slices(parts: Sequence, op: str) -> tf.IndexedSlices:
    rows = tf.concat([part.values for part in parts], 0)
    if op == "mean":
        rows = rows / tf.cast(len(parts), rows.dtype)
    return tf.IndexedSlices(
        rows, tf.concat([part.indices for part in parts], 0), parts[0].dense_shape
    )


def _refuse_per_replica_batches(function: Callable) -> Any:
    raise ValueError(
        "fit, evaluate and predict under MirroredStrategy take global batches; give them the "
        "dataset itself. distribute_datasets_from_function is for custom loops, and for strategies "
        "of several processes"
    )


def regroup(parts: tuple) -> Any:
    """One structure per replica -> one structure of per-replica values."""
    return distribute_utils.regroup(parts, always_wrap=True)


def components(value: Any) -> tuple:
    """The plain variables or values behind a distributed one, in replica order."""
    return value.values if isinstance(value, values.DistributedValues) else (value,)


def is_distributed(variable: Any) -> bool:
    """Whether a TensorFlow variable has one component per replica."""
    return isinstance(variable, values.DistributedVariable)


class PerRankDataset(input_lib.DistributedDataset):
    """What a rank reads: a dataset of local batches that `fit` must not cut again.

    Keras recognises it by the name of its base class, of which nothing else is used.

    Args:
        local: Dataset of this rank's rows (a tuple of parts if a process holds several replicas).
        whole: The dataset of global batches it was cut from; None when every rank has a pipeline of
            its own and only the sum over ranks tells how many rows a global batch has.
        regrouped: Whether elements of `local` are tuples of parts, which a custom loop gets as
            per-replica values.
        told: Called with the digest of each batch that is read; `local` has pairs then, of rows and
            digests.
    """

    def __init__(
        self,
        local: tf.data.Dataset,
        whole: tf.data.Dataset | None,
        regrouped: bool = False,
        told: Callable[[tf.Tensor], None] | None = None,
    ):
        self.local = local
        self.whole = whole
        self._regrouped = regrouped
        self._told = told

    @property
    def element_spec(self) -> Any:
        """Specification of a local element."""
        return self.local.element_spec

    @property
    def cardinality(self) -> tf.Tensor:
        """Batches in an epoch; a property, as in `tf.distribute.DistributedDataset`."""
        return self.local.cardinality()

    def map(self, function: Callable) -> PerRankDataset:
        """Apply a function to every batch; Keras does so to turn class weights into row weights."""
        whole = None if self.whole is None else self.whole.map(function)
        return PerRankDataset(self.local.map(function), whole, self._regrouped)

    def prefetch(self, count: int) -> PerRankDataset:
        """Keep batches ready."""
        return PerRankDataset(self.local.prefetch(count), self.whole, self._regrouped)

    def __len__(self) -> int:
        return len(self.local)

    def __iter__(self) -> Any:
        if self._told is not None:
            return self._telling(self._told)
        return map(regroup, self.local) if self._regrouped else iter(self.local)

    def _telling(self, told: Callable[[tf.Tensor], None]) -> Iterator[Any]:
        for rows, digest in self.local:
            told(digest)
            yield rows

    def reduce(self, initial_state: Any, reduce_func: Any) -> Any:
        """As `tf.data.Dataset.reduce`; what `for` becomes inside a `tf.function`."""
        if not self._regrouped:
            return self.local.reduce(initial_state, reduce_func)
        return self.local.reduce(
            initial_state, lambda state, parts: reduce_func(state, regroup(parts))
        )

    @property
    def _type_spec(self) -> Any:
        return PerRankDatasetSpec(tf.data.DatasetSpec(self.local.element_spec), self._regrouped)


class PerRankDatasetSpec(tf.TypeSpec):
    """Lets a `PerRankDataset` be an argument of a `tf.function`.

    Args:
        local: Specification of the dataset of this rank's rows.
        regrouped: As in `PerRankDataset`.
    """

    def __init__(self, local: tf.data.DatasetSpec, regrouped: bool):
        self._local = local
        self._regrouped = regrouped

    @property
    def value_type(self) -> type:
        """What it specifies."""
        return PerRankDataset

    def _serialize(self) -> tuple:
        return self._local, self._regrouped

    @property
    def _component_specs(self) -> Any:
        return self._local

    def _to_components(self, value: PerRankDataset) -> Any:
        return value.local

    def _from_components(self, components: Any) -> PerRankDataset:
        return PerRankDataset(components, None, self._regrouped)
