"""Make variables, reduce values and split data under a mirrored strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeVar

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    mirrored_strategy,
    values,
)
from tensorflow.python.framework import auto_control_deps_utils

from dtk.communicators import collective
from dtk.communicators.base import Communicator
from dtk.compat.tf_datasets import MakesDataset, PerRankDataset, cut_through
from dtk.compat.tf_replicas import (
    all_reduce,
    if_present,
    is_whole,
    op_name,
    replica_index,
    undivided,
)
from dtk.compat.tf_variables import MirroredVariable, SyncOnReadVariable, components
from dtk.input import slicing
from dtk.input.pipelines import in_time
from dtk.nests import Function, Nest

_Reduced = TypeVar("_Reduced", bound=Nest)


class MirroredExtended(mirrored_strategy.MirroredExtended):
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
        self.divide_slices: Function[tuple[list[Nest], Function[list[Nest]]]] = undivided
        # Each strategy in this process needs its own group key.
        self._replicas = collective.replicas(self._devices, group=id(container_strategy))

    def _use_merge_call(self) -> bool:
        return False

    def replica_communicator(self) -> Communicator:
        """Return the communicator of the running replica."""
        return self._replicas[replica_index()]

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if is_whole() else super()._num_replicas_in_sync

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, options: object = None
    ) -> Nest:
        if is_whole():
            return value
        if tf.executing_eagerly():
            return self._merge(reduce_op, if_present(value))
        return all_reduce(
            self.replica_communicator(), reduce_op, if_present(value), self.divide_slices
        )

    def _merge(self, reduce_op: tf.distribute.ReduceOp, value: _Reduced) -> _Reduced:
        # Eager replicas take turns, so a collective op would wait forever: merge the values.
        return distribute_lib.StrategyExtendedV2._replica_ctx_all_reduce(self, reduce_op, value)

    def reduce_over_replicas(
        self, values: list[tf.Tensor | tf.IndexedSlices], op: str = "sum"
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Reduce tensors over the replicas, in a replica context."""
        if is_whole():
            return values
        if not tf.executing_eagerly():
            return self.replica_communicator().allreduce(values, op)
        if op == "sum":
            return self._merge(tf.distribute.ReduceOp.SUM, values)

        def largest(_: object, merged: list[tf.Tensor]) -> list[tf.Tensor]:
            return [tf.reduce_max(components(value), axis=0) for value in merged]

        return tf.distribute.get_replica_context().merge_call(largest, args=(values,))

    def _create_variable(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        # Each replica updates its own copy with the same value, so TensorFlow's aggregation on
        # assignment, which would merge threads, is not needed.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        made = super()._create_variable(next_creator, **kwargs)
        # TensorFlow has no parameter for the class. A variable without copies keeps its class.
        if isinstance(made, values.MirroredVariable):
            made.__class__ = MirroredVariable
        elif isinstance(made, values.SyncOnReadVariable):
            made.__class__ = SyncOnReadVariable
        return made

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, destinations: object, options: object
    ) -> Nest:
        # Outside replicas this process has all values: add them up here, without collectives.
        del destinations, options
        return tf.nest.map_structure(lambda v: _reduce_components(reduce_op, v, self), value)

    def _batch_reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Nest, object]],
        options: object,
    ) -> Nest:
        del options
        return [_reduce_components(reduce_op, value, self) for value, _ in value_destination_pairs]

    def _gather_to_implementation(
        self, value: tf.Tensor, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        del destinations, options
        if isinstance(value, values.DistributedValues):
            return tf.concat(value.values, axis)
        return value

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.data.Dataset:
        del options
        size = self._num_replicas_in_sync
        if size == 1:
            return in_time(dataset)
        slicing.check_rows(dataset.element_spec)

        def cut() -> tf.data.Dataset:
            return cut_through(
                dataset,
                lambda given, ahead: slicing.cut_dataset_exactly(given, range(size), size, ahead),
            )

        return PerRankDataset(cut, whole=dataset, regrouped=True)

    def _distribute_datasets_from_function(
        self, dataset_fn: MakesDataset, options: object
    ) -> tf.data.Dataset:
        distributed = super()._distribute_datasets_from_function(dataset_fn, options)
        # Custom loops use TensorFlow's dataset unchanged. `fit` would call its `map` first.
        distributed.map = _refuse_per_replica_batches
        return distributed


def _reduce_components(
    reduce_op: tf.distribute.ReduceOp, value: Nest, extended: tf.distribute.StrategyExtended
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(value, values.DistributedValues) and isinstance(
        value.values[0], tf.IndexedSlices
    ):
        return _add_slices(value.values, op_name(reduce_op))
    if isinstance(value, values.DistributedValues):
        parts = [tf.convert_to_tensor(part) for part in value.values]
    else:
        # Every replica holds a plain value.
        parts = [tf.convert_to_tensor(value)] * extended._num_replicas_in_sync
    total = tf.add_n(parts) if parts[0].dtype != tf.bool else tf.reduce_any(parts, axis=0)
    if op_name(reduce_op) == "mean":
        total = total / tf.cast(len(parts), total.dtype)
    return total


def _add_slices(parts: Sequence[tf.IndexedSlices], op: str) -> tf.IndexedSlices:
    rows = tf.concat([part.values for part in parts], 0)
    if op == "mean":
        rows = rows / tf.cast(len(parts), rows.dtype)
    return tf.IndexedSlices(
        rows, tf.concat([part.indices for part in parts], 0), parts[0].dense_shape
    )


def _refuse_per_replica_batches(function: Function[Nest]) -> NoReturn:
    raise ValueError(
        "fit, evaluate and predict under MirroredStrategy take global batches; give them the "
        "dataset itself. distribute_datasets_from_function is for custom loops, and for strategies "
        "of several processes"
    )
