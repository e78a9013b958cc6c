"""Parameter servers by TensorFlow's strategy: where variables are, and the threads of workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2, sharded_variable
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY

from dtk.communicators.base import Communicator
from dtk.compat.tf_datasets import MakesDataset
from dtk.nests import Array, Function, Tree

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


class ServerStrategy(parameter_server_strategy_v2.ParameterServerStrategyV2):
    """TensorFlow's parameter-server strategy with dtk's extended object.

    TensorFlow's constructor connects to the cluster and makes its own extended object. Here these
    are two steps: `connect`, then the constructor.
    """

    def __init__(self, extended: tf.distribute.StrategyExtended):
        tf.distribute.Strategy.__init__(self, extended)

    def connect(self, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
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


class PartitionedVariable(sharded_variable.ShardedVariable):
    """A variable in parts on several servers."""

    @property
    def handle(self) -> tf.Tensor:
        """Say why there is none: `GradientTape.gradient` asks Keras's variable for it."""
        name = self.variables[0].name.partition("/part_")[0]
        raise AttributeError(
            f"variable_partitioner= has cut {name!r} into {len(self.variables)} parts, and a "
            "loop of your own has no gradient of a Keras variable in parts. Train it by model.fit; "
            "or make the strategy without variable_partitioner, or with one that leaves it whole"
        )

    def __array__(self, dtype: tf.DType = None, copy: bool | None = None) -> Array:
        """Return the whole value, which Keras and NumPy save."""
        return np.asarray(self.numpy(), dtype)

    # Keras's variable asks for these two, for `tf.train.Checkpoint`.

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VARIABLE_VALUE_KEY: tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> tf.Variable:
        return self.assign(tf.ensure_shape(restored_tensors[VARIABLE_VALUE_KEY], self.shape))


class ParameterServerExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):
    """Extended object that places variables on servers, by bytes, and metric state on the chief."""

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        partitioner: tf.distribute.experimental.partitioners.Partitioner | None,
    ):
        super().__init__(container_strategy, resolver, partitioner)
        self.bytes_placed = [0] * self._num_ps
        self._without_part: set[int] = set()

    def replica_communicator(self) -> Communicator:
        """Return the communicator of this process, which computes alone."""
        return self._container_strategy().communicator

    def _use_merge_call(self) -> bool:
        return False

    def _create_variable(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            # Metric state: the chief sums the workers' counts.
            with tf.device(CHIEF):
                return next_creator(**kwargs)
        kwargs["aggregation"] = tf.VariableAggregation.NONE
        beside = kwargs.get("colocate_with")
        if isinstance(beside, sharded_variable.ShardedVariable):
            return self._create_sharded_beside(beside, next_creator, **kwargs)
        made = super()._create_variable(next_creator, **kwargs)
        if isinstance(made, sharded_variable.ShardedVariable):
            made.__class__ = PartitionedVariable
        return made

    def _create_sharded_beside(
        self,
        beside: sharded_variable.ShardedVariable,
        next_creator: Function[tf.Variable],
        **kwargs: object,
    ) -> sharded_variable.ShardedVariable:
        """Create a slot variable with the same partition as its variable."""
        initial = kwargs.pop("initial_value")
        whole = tf.convert_to_tensor(initial() if callable(initial) else initial)
        sizes = [shard.shape[0] for shard in beside.variables]
        kwargs.pop("shape", None)
        made = []
        for shard, part in zip(beside.variables, tf.split(whole, sizes), strict=True):
            kwargs |= {"colocate_with": shard, "initial_value": part}
            made.append(super()._create_variable(next_creator, **kwargs))
        return PartitionedVariable(made)

    def _create_variable_round_robin(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        """Create a variable on the server with the fewest bytes (TensorFlow takes turns instead).

        Parts of one variable go to different servers while some have none.
        """
        part = str(kwargs.get("name")).rpartition("/part_")[2]
        if not part.isdigit() or int(part) % self._num_ps == 0:
            self._without_part = set(range(self._num_ps))
        index = min(self._without_part, key=lambda server: self.bytes_placed[server])
        self._without_part.discard(index)
        with (
            tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True),
            tf.device(server_device(index)),
        ):
            variable = next_creator(**kwargs)
        self.bytes_placed[index] += variable.shape.num_elements() * variable.dtype.size
        return variable

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Tree, options: object = None
    ) -> Tree:
        del reduce_op, options
        self._container_strategy().check_whole_step("a reduction over workers inside a step")
        return value

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.data.Dataset:
        if tf.inside_function():
            return super()._experimental_distribute_dataset(dataset, options)
        # The chief reads it and hands out batches.
        return dataset

    def _distribute_datasets_from_function(
        self, dataset_fn: MakesDataset, options: object
    ) -> tf.data.Dataset:
        if tf.inside_function():
            return super()._distribute_datasets_from_function(dataset_fn, options)
        return self._container_strategy().per_worker_dataset(dataset_fn)


def server_device(index: int) -> str:
    """Return the device that variables of a parameter server live on."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


# Threads that TensorFlow keeps for workers.


def employ(strategy: tf.distribute.Strategy, work: Callable[[], None], count: int) -> None:
    """Run a Python function on the threads that TensorFlow keeps for its workers.

    TensorFlow calls it under the worker's device. When it raises because the worker is lost,
    TensorFlow waits until the worker is back, rebuilds its resources, and calls it again.
    """
    cluster = tf.distribute.coordinator.ClusterCoordinator(strategy)._cluster
    for _ in range(count):
        cluster.schedule(work, args=None, kwargs=None)


def silence_coordinator() -> None:
    """Keep TensorFlow's report of a lost worker, several pages long, out of the log.

    dtk names the lost worker in one line and raises errors that end the job.
    """

    def needed(record: logging.LogRecord) -> bool:
        return os.path.basename(record.pathname) != os.path.basename(cluster_coordinator.__file__)

    tf.get_logger().addFilter(needed)


def current_worker() -> int:
    """Return the index of this thread's worker; call it inside `work` of `employ`."""
    return int(coordinator_context.get_current_dispatch_context().worker_index)


def worker_is_lost(error: Exception) -> bool:
    """Return whether an error makes TensorFlow wait for a lost worker to return."""
    if isinstance(error, tf.errors.CancelledError) and "/job:" in str(error):
        return True
    return bool(cluster_coordinator._is_worker_failure(error))
