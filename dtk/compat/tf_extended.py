"""Make variables, reduce values and split data under dtk's strategies of replicas.

A `tf.distribute.Strategy` is a thin public face over an "extended" object, which decides how
variables are made, how values are reduced and how datasets are split. dtk derives its extended
objects from TensorFlow's, for one device and for several, and overrides what moves bytes between
replicas.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_utils,
    mirrored_strategy,
    one_device_strategy,
    values,
)
from tensorflow.python.framework import auto_control_deps_utils

from dtk import placement
from dtk.cluster.variables import SELF_TEST
from dtk.communicators import collective, sequencer
from dtk.communicators.aligned_slices import concatenated
from dtk.communicators.base import Communicator
from dtk.compat import keras_variables, random_draws, tf_replicas
from dtk.compat.tf_datasets import (
    MakesDataset,
    PerRankDataset,
    is_of_this_rank,
    refuse_per_replica_batches,
)
from dtk.errors import script_line
from dtk.input import digests, slicing
from dtk.nests import Function, Tree
from dtk.patches import temporarily
from dtk.pipelines import operations
from dtk.pipelines.row_maps import ArrayRows, RowMaps

_Reduced = TypeVar("_Reduced", bound=Tree)


class _Collective(tf.distribute.StrategyExtended):
    """Reductions by collectives of the running replica, for both extended objects."""

    # Divides sparse gradients by the origin of their slices; the strategy sets it.
    divide_slices: Function[tuple[list[Tree], Function[list[Tree]]]]
    _given_rows: Sequence[tf.Variable] = ()

    def _use_merge_call(self) -> bool:
        # Reductions are plain graph ops, legal inside tf.cond and tf.while_loop. This alone makes
        # gradient accumulation and steps_per_execution > 1 work.
        return False

    def _with_own_draws(self, fn: Function[Tree]) -> Function[Tree]:
        """Return a replica's function whose draws for rows are the replica's own, if it is traced.

        Eager operations do not tell which sizes depend on the batch.
        """
        if tf.executing_eagerly() or self._num_replicas_in_sync == 1:
            return fn

        def of_replica(*args: Tree, **kwargs: Tree) -> Tree:
            with random_draws.apart(tf_replicas.replica_index()):
                return fn(*args, **kwargs)

        return of_replica

    def _begin_step(self, *args: Tree, **kwargs: Tree) -> None:
        """Let collectives wait for the batch of a step of dtk's; count the rows of a script's."""
        if not (args and isinstance(args[0], slicing.Slices)):
            self._count_rows(*args, **kwargs)
        elif not tf.executing_eagerly():
            sequencer.begin_after(args[0])

    def _count_rows(self, *args: Tree, **kwargs: Tree) -> None:
        """Note how many rows a script's own step is given.

        In variables, since a function that was traced with some rows may be given none.
        """
        if self._num_replicas_in_sync == 1:
            return
        if not self._given_rows:
            with tf.init_scope(), tf.device(placement.host()):
                self._given_rows = [tf.Variable(1, dtype=tf.int64) for _ in self.worker_devices]
        for i, count in enumerate(self._given_rows):
            flat = tf.nest.flatten(distribute_utils.select_replica(i, (args, kwargs)))
            tensors = [v for v in flat if tf.is_tensor(v) and not keras_variables.is_variable(v)]
            batched = [v for v in tensors if v.shape.rank != 0]
            rows = [tf.shape(v, tf.int64)[0] for v in batched]
            count.assign(tf.reduce_max(rows) if rows else 1)

    def given_rows(self) -> tf.Tensor:
        """Return how many rows the running step of a script was given; 1 if nothing tells."""
        if not self._given_rows:
            return tf.constant(1, tf.int64)
        replica = self._get_local_replica_id(tf_replicas.replica_index())
        return self._given_rows[replica].read_value()

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Tree, options: object = None
    ) -> Tree:
        del options
        if tf_replicas.computes_as_one_replica():
            return value
        communicator = self.replica_communicator()
        flat = tf.nest.flatten(tf_replicas.if_present(value))
        if communicator.size > 1:
            tf_replicas.refuse_under_xla()
        divided, join = self.divide_slices(flat)
        reduced = communicator.allreduce(divided, tf_replicas.op_name(reduce_op))
        return tf.nest.pack_sequence_as(value, join(reduced))

    def reduce_over_replicas(
        self, values: list[tf.Tensor | tf.IndexedSlices], op: str = "sum"
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Reduce tensors over the replicas, in a replica context."""
        if tf_replicas.computes_as_one_replica():
            return values
        return self.replica_communicator().allreduce(values, op)

    def _batch_reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Tree, object]],
        options: object,
    ) -> Tree:
        return self._reduce_to(reduce_op, [v for v, _ in value_destination_pairs], None, options)


class AllReduceExtended(_Collective, one_device_strategy.OneDeviceExtended):
    """Extended object of processes that hold one replica each; a communicator reduces values."""

    what_is_read = "the dataset"  # for messages
    # Makes what a loop's iterator tells the digests of its batches; the strategy sets it.
    compare_reads: Callable[[], Callable[[tf.Tensor], None]]

    def __init__(
        self, container_strategy: tf.distribute.Strategy, device: str, communicator: Communicator
    ):
        super().__init__(container_strategy, device)
        self._communicator = communicator
        self._observe: Callable[[tf.Tensor], None] | None = None
        self._reasons: set[str] = set()  # already printed by `_row_maps`

    # Replicas.

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if tf_replicas.computes_as_one_replica() else self._communicator.size

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    def replica_communicator(self) -> Communicator:
        """Return the communicator of the running replica: this process's."""
        return self._communicator

    # Scripts may ask TensorFlow which process writes. The evaluator has no rank and trains nothing.

    @property
    def should_checkpoint(self) -> bool:
        """Whether this is rank 0."""
        return self._communicator.rank == 0 and not self._container_strategy().is_evaluator

    should_save_summary = should_checkpoint

    # Variables are plain TensorFlow ones, equal on all ranks by induction. Only variables that are
    # summed when read (Keras's metric state), or reduced when a script assigns them, need a class.

    def _create_variable(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        reads = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if not reads and kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE):
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)

        def create_one(**inner: object) -> list[tf.Variable]:
            with tf.device(self._device):
                return [next_creator(**inner)]

        return distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create_one,
            keras_variables.VARIABLE_CLASSES,
            distribute_utils.VARIABLE_POLICY_MAPPING,
            **kwargs,
        )

    def variable_created_in_scope(self, v: tf.Variable) -> bool:
        """Return whether a variable belongs to this strategy; plain ones belong to every strategy.

        So a model may be built outside the scope.
        """
        owner = getattr(v, "_distribute_strategy", None)
        return owner is None or owner is self._container_strategy()

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"variable {colocate_with_variable.name!r} belongs to another strategy; create the "
                "model and its optimizer under the strategy that trains them"
            )

    # Running and reducing.

    def _call_for_each_replica(
        self, fn: Function[Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        replica = tf.distribute.ReplicaContext(self._container_strategy(), self._communicator.rank)
        with tf.device(self._device), replica:
            self._begin_step(*args, **kwargs)
            return self._with_own_draws(fn)(*args, **kwargs)

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Tree, destinations: object, options: object
    ) -> Tree:
        del destinations, options
        value = tf.nest.map_structure(keras_variables.local_value, value)
        if tf_replicas.computes_as_one_replica():
            return tf.nest.map_structure(tf.convert_to_tensor, value)
        return self._replica_ctx_all_reduce(reduce_op, value)

    def _gather_to_implementation(
        self, value: tf.Tensor, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        del destinations, options
        value = tf.convert_to_tensor(keras_variables.local_value(value))
        if axis == 0:
            return self._communicator.allgather(value)
        order = [axis, *(d for d in range(value.shape.rank) if d != axis)]
        back = [order.index(d) for d in range(value.shape.rank)]
        gathered = self._communicator.allgather(tf.transpose(value, order))
        return tf.transpose(gathered, back)

    # Data.

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.data.Dataset:
        del options
        if self._num_replicas_in_sync == 1:
            return slicing.in_time(dataset)
        if is_of_this_rank(dataset):
            return PerRankDataset(slicing.in_time(dataset), whole=None)
        rows_only = slicing.rows_only(dataset.element_spec, self._communicator.size)

        def made(digested: bool) -> tf.data.Dataset:
            @tf.autograph.experimental.do_not_convert
            def own(batch: slicing.Slices) -> Tree:
                (rows,) = rows_only(batch)
                return (rows, batch.digest) if digested else rows

            return self.cut(dataset, digested).map(own, synchronous=True)

        shared = self._container_strategy().world.size > 1
        return PerRankDataset(
            functools.partial(made, False),
            whole=dataset,
            on_read=(self._observe or self.compare_reads()) if shared else None,
            digested=functools.partial(made, True),
        )

    def cut(self, dataset: tf.data.Dataset, digested: bool = True) -> tf.data.Dataset:
        """Cut every global batch of a dataset for this rank, into `slicing.Slices`.

        They have digests where several processes read the dataset.
        """
        shared = self._container_strategy().world.size > 1
        return operations.cut_pipeline(
            dataset,
            (self._communicator.rank,),
            self._communicator.size,
            digests.digest_of if digested and shared else None,
            self._row_maps if shared else None,
        )

    def _row_maps(self, dataset: tf.data.Dataset) -> RowMaps | ArrayRows | None:
        """Take apart a pipeline that maps rows before it puts them into batches; None if it cannot.

        Rank 0 prints each reason once.
        """
        if self._communicator.size == 1:  # a grid in which every rank reads all rows
            return None
        parts = operations.take_apart(dataset)
        why = parts if isinstance(parts, str) else parts and parts.why
        if why is not None and why not in self._reasons and self.what_is_read:
            self._reasons.add(why)
            self._say_why_all_is_read(dataset, why)
        return None if isinstance(parts, str) else parts

    def _say_why_all_is_read(self, dataset: tf.data.Dataset, why: str) -> None:
        cure = "dtk.data.shard(files_or_dataset, strategy, batch_size) gives each its own part"
        if "whole batches" in why:  # such as those of Keras's utilities
            cure = (
                "dtk.data.shard(dataset, strategy).map(f), in place of dataset.map(f), maps each "
                "worker's own rows alone"
            )
        if os.environ.get(SELF_TEST) == "only":  # `dtk check` trains nothing: it may read
            seconds, size = slicing.seconds_of_batch(dataset), self._communicator.size
            cure += f", and saves {seconds * (size - 1) / size:.3f} of {seconds:.3f} s a step"
        if self._communicator.rank == 0:
            print(
                f"dtk: at {script_line()}, every worker maps all rows of {self.what_is_read}, not "
                f"only its own: {why}. {cure}",
                flush=True,
            )

    def observing_batches(
        self, observe: Callable[[tf.Tensor], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which datasets report the digest of each batch they read."""
        return temporarily(self, _observe=observe)

    def _distribute_datasets_from_function(
        self, dataset_fn: MakesDataset, options: object
    ) -> tf.data.Dataset:
        del options
        size, rank = self._communicator.size, self._communicator.rank
        input_context = tf.distribute.InputContext(
            num_input_pipelines=size, input_pipeline_id=rank, num_replicas_in_sync=size
        )
        return PerRankDataset(slicing.in_time(dataset_fn(input_context)), whole=None)

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], Tree]
    ) -> Tree:
        return value_fn(
            tf.distribute.experimental.ValueContext(
                self._communicator.rank, self._communicator.size
            )
        )


class MirroredBase(mirrored_strategy.MirroredStrategy):
    """TensorFlow's strategy of several devices, for `isinstance`, with dtk's extended object."""

    def __init__(self, extended: tf.distribute.StrategyExtended):
        tf.distribute.Strategy.__init__(self, extended)


class MirroredExtended(_Collective, mirrored_strategy.MirroredExtended):
    """Extended object of several devices of one process, with TensorFlow's mirrored variables.

    TensorFlow's strategy reduces by merging its replica threads. That is impossible inside
    `tf.cond` or `tf.while_loop`, so gradient accumulation, loss scaling and several steps per
    execution fail. Here each replica calls collective ops, as ranks in different processes do.
    """

    def __init__(self, container_strategy: tf.distribute.Strategy, devices: Sequence[str]):
        # TensorFlow numbers a process's device groups from here; each strategy needs its own start.
        container_strategy._collective_key_base = id(container_strategy) % 2**30
        super().__init__(container_strategy, devices=devices)
        # Replicas share lookup tables. Tell TensorFlow that a lookup changes nothing, or it makes
        # one replica's step wait for the end of another's.
        for op in ("LookupTableFindV2", "LookupTableSizeV2"):
            auto_control_deps_utils.register_read_only_resource_op(op)
        # Each strategy in this process needs its own group key.
        reducing = [placement.reducing(device) for device in self._devices]
        self._replicas = collective.replicas(reducing, group=id(container_strategy))
        self._in_graphs: dict[object, Function[Tree]] = {}

    def replica_communicator(self) -> Communicator:
        """Return the communicator of the running replica: its device's."""
        return self._replicas[tf_replicas.replica_index()]

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if tf_replicas.computes_as_one_replica() else super()._num_replicas_in_sync

    def _call_for_each_replica(
        self, fn: Function[Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        if tf.executing_eagerly() and isinstance(fn, tf.types.experimental.PolymorphicFunction):
            # TensorFlow would trace all replicas in one graph: see `MirroredStrategy._of_replica`
            if fn not in self._in_graphs:
                run = functools.partial(self._container_strategy().run, fn)
                self._in_graphs[fn] = tf.function(run, autograph=False)
            return self._in_graphs[fn](args, kwargs)
        self._begin_step(*args, **kwargs)
        return super()._call_for_each_replica(self._with_own_draws(fn), args, kwargs)

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Tree, options: object = None
    ) -> Tree:
        if tf.executing_eagerly() and not tf_replicas.computes_as_one_replica():
            return self._merge(reduce_op, tf_replicas.if_present(value))
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _merge(self, reduce_op: tf.distribute.ReduceOp, value: _Reduced) -> _Reduced:
        # Eager replicas take turns, so a collective op would wait forever: merge the values.
        with tf_replicas.running.while_others_run():
            return tf.distribute.StrategyExtended._replica_ctx_all_reduce(self, reduce_op, value)

    def reduce_over_replicas(
        self, values: list[tf.Tensor | tf.IndexedSlices], op: str = "sum"
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        if tf_replicas.computes_as_one_replica() or not tf.executing_eagerly():
            return super().reduce_over_replicas(values, op)
        if op == "sum":
            return self._merge(tf.distribute.ReduceOp.SUM, values)

        def largest(_: object, merged: list[tf.Tensor]) -> list[tf.Tensor]:
            return [tf.reduce_max(keras_variables.components(value), axis=0) for value in merged]

        with tf_replicas.running.while_others_run():
            return tf.distribute.get_replica_context().merge_call(largest, args=(values,))

    def _create_variable(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        made = super()._create_variable(next_creator, **kwargs)
        # TensorFlow has no parameter for the class. A variable without copies keeps its class.
        if isinstance(made, values.MirroredVariable):
            made.__class__ = keras_variables.MirroredVariable
        elif isinstance(made, values.SyncOnReadVariable):
            made.__class__ = keras_variables.SyncOnReadVariable
        return made

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Tree, destinations: object, options: object
    ) -> Tree:
        # Outside replicas this process has all values: add them up here, without collectives.
        del destinations, options
        return tf.nest.map_structure(lambda v: _reduce_components(reduce_op, v, self), value)

    def _gather_to_implementation(
        self, value: tf.Tensor, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        del destinations, options
        if isinstance(value, tf.distribute.DistributedValues):
            return tf.concat(value.values, axis)
        return value

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.data.Dataset:
        del options
        size = self._num_replicas_in_sync
        if size == 1:
            return slicing.in_time(dataset)
        rows_only = slicing.rows_only(dataset.element_spec, size)

        def local() -> tf.data.Dataset:
            return self.cut(dataset).map(rows_only, synchronous=True)

        return PerRankDataset(local, whole=dataset, regrouped=True)

    def cut(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Cut every global batch of a dataset for the devices, into `slicing.Slices`."""
        size = self._num_replicas_in_sync
        return operations.cut_pipeline(dataset, range(size), size)

    def _distribute_datasets_from_function(
        self, dataset_fn: MakesDataset, options: object
    ) -> tf.data.Dataset:
        distributed = super()._distribute_datasets_from_function(dataset_fn, options)
        # Custom loops use TensorFlow's dataset unchanged. With class weights `fit` calls its `map`.
        distributed.map = refuse_per_replica_batches
        return distributed


def variables_only_read() -> list[tf.Variable]:
    """Return the variables that the traced graph has read so far, and does not assign."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    assigned = {
        id(resource)
        for op in graph.get_operations()
        for resource in auto_control_deps_utils.get_read_write_resource_inputs(op)[1]
    }
    read = {id(variable.handle): variable for variable in graph._watched_variables}
    return [
        read[id(outside)]
        for outside, inside in graph.captures
        if id(outside) in read and id(inside) not in assigned
    ]


def _reduce_components(
    reduce_op: tf.distribute.ReduceOp, value: Tree, extended: tf.distribute.StrategyExtended
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(value, tf.distribute.DistributedValues):
        parts = value.values
    else:  # every replica holds this value
        parts = [tf.convert_to_tensor(value)] * extended._num_replicas_in_sync
    if isinstance(parts[0], tf.IndexedSlices):
        total = concatenated(parts)
    else:
        parts = [tf.convert_to_tensor(part) for part in parts]
        total = tf.add_n(parts) if parts[0].dtype != tf.bool else tf.reduce_any(parts, axis=0)
    if tf_replicas.op_name(reduce_op) == "mean":
        return tf_replicas.on_values(total, lambda v: v / tf.cast(len(parts), v.dtype))
    return total
