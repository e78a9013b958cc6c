"""Make variables, reduce values and split data under an all-reduce strategy.

A `tf.distribute.Strategy` is a thin public face over an "extended" object, which decides how
variables are made, how values are reduced and how datasets are split. dtk derives its extended
object from TensorFlow's for one device and overrides only what moves bytes between ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    one_device_strategy,
)

from dtk.communicators.base import Communicator
from dtk.compat.tf_datasets import MakesDataset, PerRankDataset, cut_through, take_apart
from dtk.compat.tf_replicas import all_reduce, if_present, is_whole, undivided
from dtk.compat.tf_variables import VARIABLE_CLASSES, local_value
from dtk.input import digests, row_maps, slicing
from dtk.input.pipelines import in_time
from dtk.input.row_maps import RowMaps
from dtk.nests import Function, Nest


class AllReduceExtended(one_device_strategy.OneDeviceExtended):
    """Extended object of processes that hold one replica each; a communicator reduces values."""

    def __init__(
        self, container_strategy: tf.distribute.Strategy, device: str, communicator: Communicator
    ):
        super().__init__(container_strategy, device)
        self._communicator = communicator
        self.divide_slices: Function[tuple[list[Nest], Function[list[Nest]]]] = undivided
        self._reads_are_local = False
        self._observe: Callable[[tf.Tensor], None] | None = None
        self._reasons: set[str] = set()  # already printed by `row_maps`

    # Replicas.

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if is_whole() else self._communicator.size

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    def _use_merge_call(self) -> bool:
        # Reductions are plain graph ops, legal inside tf.cond and tf.while_loop. This alone makes
        # gradient accumulation and steps_per_execution > 1 work.
        return False

    @property
    def _container(self) -> tf.distribute.Strategy:
        return self._container_strategy()

    # Scripts may ask TensorFlow which process writes. The evaluator has no rank and trains nothing.

    @property
    def should_checkpoint(self) -> bool:
        """Whether this is rank 0."""
        return self._communicator.rank == 0 and not self._container.is_evaluator

    @property
    def should_save_summary(self) -> bool:
        """Whether this is rank 0."""
        return self.should_checkpoint

    # Variables are plain TensorFlow ones, equal on all ranks by induction. Only variables that are
    # summed when read (Keras's metric state) need a special class.

    def _create_variable(
        self, next_creator: Function[tf.Variable], **kwargs: object
    ) -> tf.Variable:
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)

        def create_one(**inner: object) -> list[tf.Variable]:
            with tf.device(self._device):
                return [next_creator(**inner)]

        return distribute_utils.create_mirrored_variable(
            self._container_strategy(),
            create_one,
            VARIABLE_CLASSES,
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
        self, fn: Function[Nest], args: tuple[Nest, ...], kwargs: dict[str, Nest]
    ) -> Nest:
        replica = distribute_lib.ReplicaContext(self._container_strategy(), self._communicator.rank)
        with tf.device(self._device), replica:
            return fn(*args, **kwargs)

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, options: object = None
    ) -> Nest:
        del options
        if is_whole():
            return value
        return all_reduce(self._communicator, reduce_op, if_present(value), self.divide_slices)

    def reduce_over_replicas(
        self, values: list[tf.Tensor | tf.IndexedSlices], op: str = "sum"
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Reduce tensors over the replicas, in a replica context."""
        return values if is_whole() else self._communicator.allreduce(values, op)

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, destinations: object, options: object
    ) -> Nest:
        del destinations, options
        value = tf.nest.map_structure(local_value, value)
        if self._reads_are_local:
            return tf.nest.map_structure(tf.convert_to_tensor, value)
        return self._replica_ctx_all_reduce(reduce_op, value)

    def _batch_reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Nest, object]],
        options: object,
    ) -> Nest:
        del options
        return self._replica_ctx_all_reduce(
            reduce_op, [local_value(value) for value, _ in value_destination_pairs]
        )

    def _gather_to_implementation(
        self, value: tf.Tensor, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        del destinations, options
        return self.gather(value, axis)

    def gather(self, value: tf.Tensor | tf.Variable, axis: int = 0) -> tf.Tensor:
        """Concatenate the values of all replicas, in rank order."""
        value = tf.convert_to_tensor(local_value(value))
        if axis == 0:
            return self._communicator.allgather(value)
        order = [axis, *(d for d in range(value.shape.rank) if d != axis)]
        back = [order.index(d) for d in range(value.shape.rank)]
        gathered = self._communicator.allgather(tf.transpose(value, order))
        return tf.transpose(gathered, back)

    @contextlib.contextmanager
    def local_reads(self) -> Iterator[None]:
        """Return a context in which reading a variable never communicates.

        For code that runs on one rank only, such as a checkpoint writer.
        """
        before, self._reads_are_local = self._reads_are_local, True
        try:
            yield
        finally:
            self._reads_are_local = before

    # Data.

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.data.Dataset:
        del options
        if self._communicator.size == 1:
            return in_time(dataset)
        slicing.check_rows(dataset.element_spec)
        ranks, size = (self._communicator.rank,), self._communicator.size

        def with_digests(given: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
            maps = self.row_maps(given)
            if maps is not None:
                own, digest = ranks[0], digests.digest_of
                return row_maps.cut_dataset_exactly(maps, own, size, digest, ahead)
            cut_one = digests.with_digest(lambda batch: slicing.cut_exactly(batch, ranks, size)[0])
            return slicing.mapped(given.enumerate(), cut_one, ahead)

        def without(given: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
            maps = self.row_maps(given)
            if maps is not None:
                return row_maps.cut_dataset_exactly(maps, ranks[0], size, ahead=ahead)
            only = tf.autograph.experimental.do_not_convert(lambda *parts: parts[0])
            return slicing.cut_dataset_exactly(given, ranks, size, ahead).map(only)

        how = without if self._observe is None else with_digests
        cut = functools.partial(cut_through, dataset, how)
        return PerRankDataset(cut, whole=dataset, on_read=self._observe)

    def row_maps(self, dataset: tf.data.Dataset) -> RowMaps | None:
        """Take apart a pipeline that maps rows before it puts them into batches; None if it cannot.

        Rank 0 prints each reason once.
        """
        if self._communicator.size == 1:  # a grid in which every rank reads all rows
            return None
        found = take_apart(dataset)
        if not isinstance(found, str):
            return found
        if self._communicator.rank == 0 and found not in self._reasons:
            self._reasons.add(found)
            print(f"dtk: every worker maps all rows of a dataset, not only its own: {found}")
        return None

    @contextlib.contextmanager
    def observing_batches(self, observe: Callable[[tf.Tensor], None]) -> Iterator[None]:
        """Return a context in which datasets report the digest of each batch they read."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = None

    def _distribute_datasets_from_function(
        self, dataset_fn: MakesDataset, options: object
    ) -> tf.data.Dataset:
        del options
        size, rank = self._communicator.size, self._communicator.rank
        input_context = distribute_lib.InputContext(
            num_input_pipelines=size, input_pipeline_id=rank, num_replicas_in_sync=size
        )
        return PerRankDataset(in_time(dataset_fn(input_context)), whole=None)

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], Nest]
    ) -> Nest:
        return value_fn(
            distribute_lib.ValueContext(self._communicator.rank, self._communicator.size)
        )
