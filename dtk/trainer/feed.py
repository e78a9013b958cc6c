"""The batches that `fit` reads, cut by rank; their order, their size, and the place to resume from.

dtk gives Keras's epoch iterator the cut dataset. Between epochs it is another one: shuffled
anew, in batches of another size, or starting where a checkpoint was saved.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypedDict

import keras
import tensorflow as tf

from dtk import placement
from dtk.cluster.variables import SELF_TEST
from dtk.compat import keras_data, keras_models, tf_datasets
from dtk.compat.tf_datasets import PerRankDataset
from dtk.errors import script_line
from dtk.input import digests, row_maps, slicing
from dtk.input.pipelines import read_ahead, untuned
from dtk.nests import Logs, Nest, Specs
from dtk.trainer.strategy import Strategy

# Items of a `PyDataset` that are timed, and from how many seconds on rank 0 says what they cost.
_ITEMS, _LONG_ITEM = 20, 0.005

# A dataset that a script gives to `fit`, or that Keras reads in its place.
Dataset: TypeAlias = "tf.data.Dataset | PerRankDataset"


def cut(dataset: Dataset, strategy: Strategy) -> tf.data.Dataset:
    """Cut a dataset for the replicas of this process."""
    if isinstance(dataset, PerRankDataset):
        if dataset.whole is None:
            local = dataset.local
            return read_ahead(local.map(slicing.on_elements(local, _own_rows)))
        dataset = dataset.whole
    return tf_datasets.cut_in_order(dataset, functools.partial(_cut, strategy))


def _cut(strategy: Strategy, dataset: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
    ranks, size = strategy.local_ranks(), strategy.num_replicas_in_sync
    if strategy.world.size == 1:
        return slicing.cut_dataset(dataset, ranks, size, ahead=ahead)
    maps = strategy.extended.row_maps(dataset)
    if maps is not None:
        return row_maps.cut_dataset(maps, ranks[0], size, digests.digest_of, ahead)
    return slicing.cut_dataset(dataset, ranks, size, digests.digest_of, ahead)


def _own_rows(batch: Nest) -> slicing.Slices:
    return slicing.Slices((batch,), (slicing.count_rows(batch),), ())


def cut_batches(batches: Iterable[Nest], strategy: Strategy) -> Iterator[slicing.Slices]:
    """Cut single global batches, of tensors or arrays."""
    for batch in batches:
        yield slicing.cut(as_tensors(batch), strategy.local_ranks(), strategy.num_replicas_in_sync)


def as_tensors(batch: Nest) -> Nest:
    """Convert every leaf of a batch to a tensor."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
    )


class EpochDataset:
    """Dataset for Keras's epoch iterator; it is cut once, when it is first opened."""

    def __init__(self, given: Dataset, cut: Callable[[Dataset], Dataset]):
        if not is_per_rank(given):
            slicing.check_rows(spec_of(given))
        self.given = given
        self._cut = cut

    @functools.cached_property
    def _pipeline(self) -> Dataset:
        return self._cut(self.given)

    def __iter__(self) -> Iterator[Nest]:
        return iter(self._pipeline)


def spec_of(given: Dataset) -> Specs:
    """Return the spec of a batch with any number of rows, from which Keras builds models."""
    whole = getattr(given, "whole", None)
    spec = slicing.spec_of((given if whole is None else whole).element_spec)
    return keras.tree.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, spec)


def tuned_for(adapter: keras_data.DataAdapter, dataset: Dataset) -> Dataset:
    """Disable tuning of a pipeline that takes rows from arrays: it has nothing to tune."""
    return untuned(dataset) if isinstance(adapter, keras_data.ArrayDataAdapter) else dataset


def is_per_rank(dataset: Dataset) -> bool:
    """Return whether every rank reads its own pipeline."""
    return isinstance(dataset, PerRankDataset) and dataset.whole is None


# The data of a running `fit`.


class FeedPosition(TypedDict):
    """Position of a `fit` in its data, as plain numbers."""

    iterators: int  # how often the data was opened
    seen: int  # steps read since the data was last opened
    open: bool  # whether an epoch goes on with the open data
    batch_size: int | None  # rows of a global batch; None where unknown
    batches: int | None  # batches of an epoch; None where unknown


class Feed:
    """The data of the running `fit`."""

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        distribute: Callable[[Dataset], Dataset],
    ):
        self.model = model
        self.strategy = strategy
        self.iterator: keras_data.TFEpochIterator = None
        self.rows_unknown = False
        self._distribute = distribute
        self._callbacks: keras.callbacks.CallbackList = None
        self._given_adapter: keras_data.DataAdapter = None
        self._batch_size: int | None = None
        self._openings = 0
        # The seed of an epoch's order of rows; None where Keras draws the order.
        self._order: tf.Variable | None = None

    def begin(
        self,
        iterator: keras_data.TFEpochIterator,
        dataset: Dataset,
        callbacks: keras.callbacks.CallbackList,
    ) -> None:
        """Take the data of a `fit` that begins."""
        self.iterator = iterator
        self.rows_unknown = is_per_rank(dataset)
        self._callbacks = callbacks
        self._given_adapter = iterator.data_adapter
        self._batch_size = None
        self._openings = 0
        self._order = None
        keras_data.on_opening(iterator, self._count_opening)
        self._tell_steps(iterator.num_batches)
        if isinstance(self._given_adapter, keras_data.PyDatasetAdapter):
            self._time_items(self._given_adapter)

    def _time_items(self, adapter: keras_data.PyDatasetAdapter) -> None:
        """Say once what a `PyDataset` costs every rank, if that is much."""
        world, at = self.strategy.world, script_line()

        def tell(seconds: float) -> None:
            if seconds >= _LONG_ITEM:
                saved = seconds * (world.size - 1) / world.size
                print(
                    f"dtk: every worker makes every item of the PyDataset at {at}, {seconds:.3f} s "
                    "each; dtk.data.shard(dataset, strategy), with items of batch_size / "
                    f"{world.size} rows, saves {saved:.3f} s a step",
                    flush=True,
                )

        if world.size > 1 and world.rank == 0:
            only_checks = os.environ.get(SELF_TEST) == "only"
            keras_data.on_items(adapter, 1 if only_checks else _ITEMS, tell)

    def end(self) -> None:
        """Forget the data of a `fit` that is over, or was left by an exception."""
        self.iterator = self._callbacks = None

    def _count_opening(self) -> None:
        self._openings += 1

    def _tell_steps(self, steps: int | None) -> None:
        """Tell the callbacks, the progress bar among them, how many steps an epoch has."""
        self._callbacks.set_params({**self._callbacks.params, "steps": steps})

    def show_learned_steps(self) -> None:
        """Give the progress bar the number of steps, once an epoch has counted them."""
        iterator = self.iterator
        if iterator is None or self._callbacks.params.get("steps") is not None:
            return
        if iterator.num_batches is not None:
            # Keras counts the attempt that found no more data, too.
            self._tell_steps(iterator.num_batches - iterator.steps_per_execution)

    def _distributed(self, adapter: keras_data.DataAdapter, steps: int = -1) -> EpochDataset:
        """Return the dataset that Keras reads for a data adapter; `steps` limits its batches."""
        if self._order is not None and _is_shuffled(adapter):
            dataset = keras_data.shuffled_from(adapter, self._order)
        else:
            dataset = keras_data.pipeline_of(adapter)
        return EpochDataset(
            dataset if steps < 0 else dataset.take(steps),
            lambda given: tuned_for(adapter, self._distribute(given)),
        )

    def shuffle(self, epoch: int) -> None:
        """Shuffle the rows of arrays for this epoch, in the same order on every rank.

        As without dtk: with a fixed seed Keras repeats one order in every epoch, and a script that
        sets no seed gets a new order in each.
        """
        iterator, seed = self.iterator, self.strategy.shuffle_seed.of_epoch(epoch)
        if iterator is None or not _is_shuffled(iterator.data_adapter):
            return
        if (seed is None) != (self._order is None):
            with tf.device(placement.host()):
                self._order = None if seed is None else tf.Variable(seed, False, dtype=tf.int64)
            keras_data.set_dataset(iterator, self._distributed(iterator.data_adapter))
        if self._order is not None:
            self._order.assign(seed)

    # Batch size between epochs.

    def set_batches(self, adapter: keras_data.DataAdapter) -> None:
        """Read the following epochs from another Keras data adapter."""
        iterator = self.iterator
        dataset = self._distributed(adapter)
        iterator.data_adapter = adapter
        keras_data.set_dataset(iterator, dataset)
        keras_data.set_batches_in(iterator, adapter.num_batches)
        keras_data.forget_place(iterator)
        self._tell_steps(iterator.num_batches)

    def batch_size(self) -> int | None:
        """Return the global batch size of the running `fit`; None where it is unknown."""
        if self._batch_size is not None:
            return self._batch_size
        adapter = self.iterator.data_adapter
        return None if self.rows_unknown else adapter.batch_size

    def rows_in(self, steps: int) -> int | None:
        """Count the rows in the first batches of an epoch, from the batch size."""
        adapter, size = self.iterator.data_adapter, self.batch_size()
        if size is None:
            return None
        partial = adapter.partial_batch_size if steps == adapter.num_batches else None
        return steps * size - (size - partial if partial else 0)

    def rows_counted(self, steps: int) -> int | None:
        """Count the rows in the first batches of this epoch, exactly."""
        iterator = self.iterator
        adapter = iterator.data_adapter
        if (
            not isinstance(adapter, keras_data.ArrayDataAdapter)
            or iterator.steps_per_epoch is not None
        ):
            return None
        return self.rows_in(min(steps, adapter.num_batches))

    def check_rebatch(self) -> None:
        """Check that `rebatch` is possible."""
        given = self._given_adapter
        if isinstance(given, keras_data.ArrayDataAdapter) or (
            isinstance(given, keras_data.TFDatasetAdapter) and not self.rows_unknown
        ):
            return
        raise ValueError(
            f"the batch size of data from a {type(given).__name__} cannot be changed during fit; "
            "give fit arrays or a tf.data.Dataset of global batches"
        )

    def rebatch(self, size: int) -> None:
        """Read the following epochs in global batches of another size.

        Arrays keep their order of rows (the same shuffle, cut differently). A dataset is rebatched
        at the end of the script's pipeline; Keras then learns the number of steps in the next
        epoch.
        """
        if size == self.batch_size():
            return
        adapter = self._adapter(size)
        self.set_batches(adapter)
        self._batch_size = size
        if adapter.num_batches is None:
            # An epoch of unknown length ends where the data ends: nothing to warn about.
            keras_data.end_quietly(self.iterator)

    def _adapter(self, size: int) -> keras_data.DataAdapter:
        """Make an adapter of the data given to `fit`, in global batches of `size` rows."""
        self.check_rebatch()
        given = self._given_adapter
        if isinstance(given, keras_data.ArrayDataAdapter):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras_data.arrays_of(given))
            return keras_data.ArrayDataAdapter(
                x, y, sample_weight, batch_size=size, shuffle=keras_data.shuffles(given)
            )
        data = given.get_tf_dataset()
        whole: tf.data.Dataset = data.whole if isinstance(data, PerRankDataset) else data
        return keras_data.TFDatasetAdapter(whole.rebatch(size))

    def peek(self, size: int, rows: int) -> tuple[Iterator[Nest], int]:
        """Return a separate iterator over the first rows in batches of `size`, and its steps."""
        adapter = self._adapter(size)
        steps = -(-rows // size)
        steps = min(steps, adapter.num_batches or steps)
        self._count_opening()  # A pipeline that shuffles draws a new order at each opening.
        return iter(self._distributed(adapter, steps)), steps

    # Position in the data, to resume from.

    def position(self, in_epoch: bool) -> FeedPosition:
        """Return the position of the running `fit` in its data, as plain numbers."""
        iterator = self.iterator
        ahead = iterator.steps_per_execution if in_epoch else 0
        return {
            "iterators": self._openings,
            "seen": keras_data.steps_seen(iterator) - ahead,
            "open": in_epoch or keras_data.is_open(iterator),
            "batch_size": self.batch_size(),
            "batches": None if self._batch_size else keras_data.batches_in(iterator),
        }

    def resume_at(self, step: int, position: FeedPosition) -> None:
        """Make the next epoch begin at a step, with the rows that belong there.

        A dataset shuffles anew at each opening, so the data is opened as often as before; then the
        batches already seen are passed over.
        """
        iterator = self.iterator

        def resumed(steps: keras_data.Steps) -> keras_data.Steps:
            if step and position["batch_size"] != self.batch_size():
                raise ValueError(
                    f"step {step} of an epoch was reached with batch_size="
                    f"{position['batch_size']}, so batch_size={self.batch_size()} cannot continue "
                    "the epoch; use the same batch size, or a checkpoint from the end of an epoch"
                )
            self._find_position(step, position)
            for begin, end, batches in steps:
                if begin >= step:
                    yield begin, end, batches
                elif iterator.steps_per_epoch is None:
                    _pass_over(batches, end - begin + 1)

        keras_data.patch_steps(iterator, resumed, once=True)

    def resume_after_steps(self, logs: Logs, position: FeedPosition) -> None:
        """Make the next epoch run no steps: all are done, and only its validation is left."""

        def none_left(steps: keras_data.Steps) -> keras_data.Steps:
            del steps
            self._find_position(0, position)
            # Keras asks for the epoch's logs after the last step.
            keras_models.answer_once(self.model, logs)
            yield from ()

        keras_data.patch_steps(self.iterator, none_left, once=True)

    def _find_position(self, step: int, position: FeedPosition) -> None:
        iterator = self.iterator
        stream = iterator.steps_per_epoch is not None
        inside = position["open"] if stream else step > 0
        if keras_data.batches_in(iterator) is None and not self._batch_size:
            keras_data.set_batches_in(iterator, position["batches"])
        if not isinstance(iterator.data_adapter, keras_data.ArrayDataAdapter):
            while self._openings < position["iterators"] - inside:
                keras_data.open_data(iterator)
        if stream and inside:
            opened = keras_data.open_data(iterator)
            _pass_over(opened, position["seen"])
            keras_data.set_place(iterator, opened, position["seen"] - step)


def _is_shuffled(adapter: keras_data.DataAdapter) -> bool:
    return isinstance(adapter, keras_data.ArrayDataAdapter) and bool(keras_data.shuffles(adapter))


def _pass_over(batches: Iterator[Nest], count: int) -> None:
    for _ in range(count):
        next(batches, None)
