"""Keras's data adapters and its epoch iterator: the batches that `fit` reads, cut by rank.

dtk gives the epoch iterator the cut dataset. Between epochs it is another one: shuffled anew, in
batches of another size, or starting where a checkpoint was saved.

while a pipeline is made   ArrayDataAdapter._epoch          pipeline_of
                           functions that shuffle           shuffled_from
during a call of `fit`     TFEpochIterator                  CutEpochIterator
of one epoch iterator      _interrupted_warning             Feed.rebatch
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NotRequired, TypeAlias, TypedDict

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from dtk import placement
from dtk.cluster import progress
from dtk.compat import keras_models, names, py_datasets, tf_datasets, tf_replicas
from dtk.compat.py_datasets import PyDatasetAdapter
from dtk.compat.tf_datasets import PerRankDataset
from dtk.errors import at_rank
from dtk.input import slicing
from dtk.nests import Array, Logs, Specs, Tree
from dtk.patches import patch, temporarily

DataAdapter: TypeAlias = ArrayDataAdapter | TFDatasetAdapter

# A dataset that a script gives to `fit`, or that Keras reads in its place.
Dataset: TypeAlias = "tf.data.Dataset | PerRankDataset"

# The steps of an epoch: numbers of an execution's first and last step, and the iterator over the
# data that it reads.
Steps: TypeAlias = Iterator[tuple[int, int, Iterator[Tree]]]


# Batches, cut by rank.


def cut_own(dataset: Dataset) -> tf.data.Dataset:
    """Take the batches of a dataset as the rows of this rank alone."""
    own = tf.autograph.experimental.do_not_convert(lambda number, batch: as_own_slice(batch))
    given = slicing.in_time(tf_datasets.read_alone(dataset))
    return slicing.read_ahead(given.enumerate().map(own))


def calling_data(
    strategy: tf.distribute.Strategy, what: str
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which messages give data that is cut this name; "": there are none."""
    if not hasattr(strategy.extended, "what_is_read"):  # a strategy that says nothing
        return contextlib.nullcontext()
    return temporarily(strategy.extended, what_is_read=what)


def _padded(local: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Return a rank's own batches, and padding rows behind them, since others have more batches.

    If count is -1 they have no end: see `replica_step.begin_step`.
    """
    nothing = slicing.zeros(local.element_spec)
    unconverted = tf.autograph.experimental.do_not_convert

    @unconverted
    def own_or_last(last: Tree, element: tuple[Tree, tf.Tensor]) -> tuple[Tree, slicing.Slices]:
        batch, is_there = element
        rows = tf.cond(is_there, lambda: batch, lambda: last)
        rows_there = tf.where(is_there, slicing.count_rows(rows), 0)
        return slicing.last_row(rows), slicing.Slices((rows,), (rows_there,), slicing.UNKNOWN)

    batches = local.enumerate().map(unconverted(lambda number, batch: (batch, True)))
    behind = tf.data.Dataset.from_tensors((nothing, False)).repeat()
    return slicing.read_ahead(batches.concatenate(behind).scan(nothing, own_or_last).take(count))


def as_own_slice(batch: Tree) -> slicing.Slices:
    """Take a batch as the rows of this rank alone."""
    return slicing.Slices((batch,), (slicing.count_rows(batch),), slicing.UNKNOWN)


def cut_batches(batches: Iterable[Tree], strategy: tf.distribute.Strategy) -> list[slicing.Slices]:
    """Cut single global batches, of tensors or arrays."""
    ranks, size = strategy.local_ranks(), strategy.num_replicas_in_sync
    return [slicing.cut_batch(as_tensors(batch), ranks, size) for batch in batches]


def as_tensors(batch: Tree) -> Tree:
    """Convert every leaf of a batch to a tensor."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
    )


def spec_of(dataset: Dataset) -> Specs:
    """Return the spec of a batch with any number of rows, from which Keras builds models."""
    spec = slicing.spec_of(tf_datasets.read_alone(dataset).element_spec)
    return keras.tree.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, spec)


# Pipelines and steps of Keras.


def pipeline_of(adapter: DataAdapter) -> tf.data.Dataset:
    """Make the pipeline of an adapter, in the order it has when `fit` begins.

    Keras 3.16 makes the pipeline once and shuffles it by the number of the present epoch.
    """
    if not isinstance(getattr(adapter, "_epoch", None), int):
        return adapter.get_tf_dataset()
    with patch(adapter, _epoch=0):
        return adapter.get_tf_dataset()


def shuffled_from(adapter: ArrayDataAdapter, seed: tf.Variable) -> tf.data.Dataset:
    """Make the pipeline of an adapter of arrays, in an order drawn from the seed in a variable.

    Keras draws the order from TensorFlow's global seed at the time the pipeline is made.
    """

    draw, asked = tf.random.experimental.stateless_shuffle, []

    def shuffle(rows: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        asked.append(rows)
        # Keras shuffles the row numbers of each batch; the first number differs by batch.
        return draw(rows, tf.stack([seed, rows[0]]))

    with (
        patch(tf.random, shuffle=shuffle),  # up to Keras 3.15
        patch(tf.random.experimental, stateless_shuffle=shuffle),
    ):
        dataset = adapter.get_tf_dataset()
    if not asked:
        raise names.gone("keras.Model.fit's call of a shuffle of tf.random", "the order of rows")
    return dataset


class CutEpochIterator(TFEpochIterator):
    """Keras's epoch iterator, which Keras makes in its place during a call of dtk's.

    Its dataset is cut once, when it is first opened.
    """

    _epoch_iterator: Generator[tuple[int, int, Iterator[Tree]]] | None
    _current_iterator: Iterator[Tree] | None
    feed: Feed | None = None  # of the `fit` whose training data it reads
    # called whenever an epoch has run all its steps; not after an epoch that ends early
    at_end: Callable[[], None] | None = None

    def __init__(self, distribute_strategy: tf.distribute.Strategy, **kwargs: object):
        EpochIterator.__init__(self, **kwargs)  # Keras's own would distribute the dataset
        self.dataset: Dataset = self.data_adapter.get_tf_dataset()
        # as Keras does: `predict` takes rows without padding, and a model may not be dtk's
        self.cut: Callable[[Dataset], Dataset] = functools.partial(
            _distributed, distribute_strategy
        )
        self._pipeline: Dataset | None = None

    def read(self, dataset: Dataset, cut: Callable[[Dataset], Dataset] | None = None) -> None:
        """Read a dataset from the next opening on, cut in this way."""
        self.dataset, self.cut, self._pipeline = dataset, cut or self.cut, None

    def _get_iterator(self) -> Iterable[Tree]:
        if self.feed is not None:
            self.feed.note_opening()
        if self._pipeline is None:
            self._pipeline = self.opened(self.dataset)
        return self._pipeline

    def opened(self, dataset: Dataset) -> Dataset:
        """Return the pipeline of a dataset; of rows from arrays there is nothing to tune."""
        cut, of_arrays = self.cut(dataset), isinstance(self.data_adapter, ArrayDataAdapter)
        return slicing.untuned(cut) if of_arrays and isinstance(cut, tf.data.Dataset) else cut

    def _enumerate_iterator(self) -> Steps:
        steps = super()._enumerate_iterator()
        yield from steps if self.feed is None else self.feed.resumed(steps)
        if self.at_end is not None:
            self.at_end()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Note the end of data after each loop, of any length, that no exception ends."""
        with super().catch_stop_iteration():
            yield
        progress.end_of_data()

    def close(self) -> None:
        """Let go of the open data, which Keras's generator of steps holds in a cycle."""
        if self._epoch_iterator is not None:
            self._epoch_iterator.close()
        self._epoch_iterator = self._current_iterator = self.feed = None


def _distributed(strategy: tf.distribute.Strategy, dataset: Dataset) -> Dataset:
    """Distribute a dataset, unless a script has done so."""
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return dataset
    return strategy.experimental_distribute_dataset(dataset)


@contextlib.contextmanager
def closing_iterators() -> Iterator[None]:
    """Return a context for a call of `fit` and its like, which leaves no data open."""
    made: list[CutEpochIterator] = []
    thread = threading.get_ident()

    def make(**kwargs: object) -> CutEpochIterator:
        iterator = CutEpochIterator(**kwargs)
        if threading.get_ident() == thread:
            made.append(iterator)
        return iterator

    try:
        with patch(keras_trainer, TFEpochIterator=make):
            yield
    finally:
        for iterator in made:
            iterator.close()


# The data of a running `fit`.


class FeedPosition(TypedDict):
    """Position of a `fit` in its data, as plain numbers."""

    iterators: int  # how often the data was opened
    seen: int  # steps read since the data was last opened
    open: bool  # whether an epoch goes on with the open data
    begun: NotRequired[bool]  # whether the epoch has begun, though perhaps with no step done
    batch_size: int | None  # rows of a global batch; None where unknown
    batches: int | None  # batches of an epoch; None where unknown
    # numbers of the items of a shuffled `PyDataset`, as the open data gives them; None where the
    # next pass over the data draws its own
    items: NotRequired[Array | None]


class Feed:
    """The data of the running `fit`."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        cut: Callable[[Dataset], Dataset] | None,
    ):
        self.model = model
        self.strategy = strategy
        self.iterator: TFEpochIterator = None  # a `CutEpochIterator`, while `fit` runs
        self._taken: weakref.WeakSet[CutEpochIterator] = weakref.WeakSet()
        self.rows_unknown = False
        self._cut = cut  # None where a single replica reads all rows
        self._callbacks: keras.callbacks.CallbackList = None
        self._given_adapter: DataAdapter = None
        self._batch_size: int | None = None
        self._openings = 0
        # how the next epoch begins where a checkpoint has said so, see `resume_at`
        self._resuming: Callable[[Steps], Steps] | None = None
        # The seed of an epoch's order of rows; None where Keras draws the order.
        self._order: tf.Variable | None = None
        # The items of a shuffled `PyDataset`.
        self._items: py_datasets.OrderedItems | None = None

    def take(
        self, iterator: CutEpochIterator, callbacks: keras.callbacks.CallbackList | None
    ) -> Specs:
        """Let an epoch iterator of Keras read cut batches; return the spec of a global batch.

        `fit` passes the same iterator of validation data in every epoch: it is cut only once.
        """
        dataset, cut = iterator.dataset, self._cut
        if tf_replicas.computes_as_one_replica():  # this rank reads all of it, without the others
            iterator.read(dataset, tf_datasets.read_alone)
        elif cut is not None and iterator not in self._taken:
            self._taken.add(iterator)
            if tf_datasets.is_per_replica(dataset):
                tf_datasets.refuse_per_replica_batches()
            if tf_datasets.is_of_this_rank(dataset):
                cut = self._as_long_as_any(iterator, dataset)
            else:
                slicing.check_rows(tf_datasets.read_alone(dataset).element_spec)
            if iterator is getattr(self.model, "_eval_epoch_iterator", None):
                cut = functools.partial(self._cut_validation, cut)
            iterator.read(dataset, cut)
        if callbacks is not None and self.iterator is None:
            self._begin(iterator, dataset, callbacks)
        return spec_of(dataset)

    def _cut_validation(self, cut: Callable[[Dataset], Dataset], dataset: Dataset) -> Dataset:
        """Cut what `fit` validates on, which messages name."""
        with calling_data(self.strategy, "validation_data"):
            return cut(dataset)

    def _as_long_as_any(
        self, iterator: CutEpochIterator, dataset: Dataset
    ) -> Callable[[Dataset], Dataset]:
        """Return how to read ranks' own batches, so that an epoch lasts while any rank has some."""
        assert self._cut is not None
        local = slicing.in_time(tf_datasets.read_alone(dataset))
        endless = tf.data.INFINITE_CARDINALITY
        unknown = tf.data.UNKNOWN_CARDINALITY
        numbers = self.strategy.world.allgather_object(int(local.cardinality()))
        if len(set(numbers)) == 1 and (unknown not in numbers or len(numbers) == 1):
            return self._cut
        most = endless if min(numbers) < 0 else max(numbers)
        if not slicing.is_dense(local.element_spec):
            if min(numbers) < 0 or iterator.steps_per_epoch is not None:
                return self._cut
            message = (
                f"ranks bring different numbers of batches of their own (by rank: {numbers}), and "
                "dtk pads no ragged or sparse ones for those that have fewer; give every rank as "
                "many, such as by .take(n), or give steps_per_epoch, or dense batches"
            )
            raise ValueError(at_rank(self.strategy.world.rank, message))
        # Keras asks for an end before each step of an execution; the padded batches have none.
        if most == endless and iterator.steps_per_execution > 1:
            return self._cut
        if len(set(numbers)) > 1:
            shown = local.filter(lambda *batch: True)  # so that their number is unknown
            shown = shown.apply(tf.data.experimental.assert_cardinality(most))
            iterator.data_adapter = TFDatasetAdapter(PerRankDataset(shown, whole=None))
            iterator.reset()  # Keras takes the number from its adapter
        return lambda own: _padded(tf_datasets.read_alone(own), most)

    def _begin(
        self, iterator: CutEpochIterator, dataset: Dataset, callbacks: keras.callbacks.CallbackList
    ) -> None:
        """Take the data of a `fit` that begins."""
        self.iterator, self._callbacks = iterator, callbacks
        self._given_adapter = iterator.data_adapter
        self.rows_unknown = tf_datasets.is_of_this_rank(dataset)
        self._batch_size, self._openings, self._order, self._resuming = None, 0, None, None
        self._items = None
        iterator.feed = self
        self._tell_steps(iterator.num_batches)
        if isinstance(self._given_adapter, PyDatasetAdapter):
            py_datasets.tell_cost(self._given_adapter, self.strategy.world)
            self._items = py_datasets.ordered(self._given_adapter)

    def end(self) -> None:
        """Forget the data of a `fit` that is over, or was left by an exception."""
        self.iterator = self._callbacks = None

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

    def _dataset_of(self, adapter: DataAdapter) -> Dataset:
        """Return the global batches of a data adapter."""
        if self._order is not None and _is_shuffled(adapter):
            return shuffled_from(adapter, self._order)
        return pipeline_of(adapter)

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
            iterator.read(self._dataset_of(iterator.data_adapter))
        if self._order is not None:
            self._order.assign(seed)

    # Batch size between epochs.

    def set_batches(self, adapter: DataAdapter) -> None:
        """Read the following epochs from another Keras data adapter."""
        iterator = self.iterator
        iterator.data_adapter = adapter
        iterator.read(self._dataset_of(adapter))
        iterator._num_batches, iterator._current_iterator = adapter.num_batches, None
        self._tell_steps(iterator.num_batches)

    def batch_size(self) -> int | None:
        """Return the global batch size of the running `fit`; None where it is unknown."""
        if self._batch_size is not None:
            return self._batch_size
        adapter = self.iterator.data_adapter
        return None if self.rows_unknown else adapter.batch_size

    def rows_between(self, first: int, end: int) -> int | None:
        """Count the rows of an epoch's batches from the first to the end, from the batch size."""
        adapter, size = self.iterator.data_adapter, self.batch_size()
        if size is None:
            return None
        partial = adapter.partial_batch_size if first < end == adapter.num_batches else None
        return (end - first) * size - (size - partial if partial else 0)

    def rows_counted(self, steps: int) -> int | None:
        """Count the rows in the first batches of this epoch, exactly."""
        iterator = self.iterator
        adapter = iterator.data_adapter
        if not isinstance(adapter, ArrayDataAdapter) or iterator.steps_per_epoch is not None:
            return None
        return self.rows_between(0, min(steps, adapter.num_batches))

    def check_rebatch(self) -> None:
        """Check that `rebatch` is possible."""
        adapter = self._given_adapter
        if isinstance(adapter, ArrayDataAdapter) or (
            isinstance(adapter, TFDatasetAdapter) and not self.rows_unknown
        ):
            return
        raise ValueError(
            f"the batch size of data from a {type(adapter).__name__} cannot be changed during fit; "
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
            self.iterator._interrupted_warning = lambda: None

    def _adapter(self, size: int) -> DataAdapter:
        """Make an adapter of the data given to `fit`, in global batches of `size` rows."""
        self.check_rebatch()
        adapter = self._given_adapter
        if isinstance(adapter, ArrayDataAdapter):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(adapter._inputs)
            return ArrayDataAdapter(x, y, sample_weight, batch_size=size, shuffle=adapter._shuffle)
        data = adapter.get_tf_dataset()
        whole: tf.data.Dataset = data.whole if isinstance(data, PerRankDataset) else data
        return TFDatasetAdapter(whole.rebatch(size))

    def peek(self, size: int, rows: int) -> tuple[Iterator[Tree], int]:
        """Return a separate iterator over the first rows in batches of `size`, and its steps."""
        adapter = self._adapter(size)
        steps = -(-rows // size)
        steps = min(steps, adapter.num_batches or steps)
        self._openings += 1  # A pipeline that shuffles draws a new order at each opening.
        return iter(self.iterator.opened(self._dataset_of(adapter).take(steps))), steps

    # Position in the data, to resume from.

    def position(self, in_epoch: bool) -> FeedPosition:
        """Return the position of the running `fit` in its data, as plain numbers."""
        iterator = self.iterator
        seen = iterator._steps_seen - (iterator.steps_per_execution if in_epoch else 0)
        order = None if self._items is None or seen == 0 else np.array(self._items.order)
        return {
            "iterators": self._openings,
            "seen": seen,
            "open": in_epoch or iterator._current_iterator is not None,
            "begun": in_epoch,
            "batch_size": self.batch_size(),
            "batches": None if self._batch_size else iterator._num_batches,
            "items": order,
        }

    def resume_at(self, step: int, position: FeedPosition) -> None:
        """Make the next epoch begin at a step, with the rows that belong there.

        A dataset shuffles anew at each opening, so the data is opened as often as before; then the
        batches already seen are passed over.
        """
        iterator = self.iterator

        def resumed(steps: Steps) -> Steps:
            if step:
                self._check_position(step, position)
            self._find_position(step, position)
            if step:
                # Where the length is unknown, Keras begins one step more than there are: a
                # checkpoint of that moment leaves no step, and Keras no logs.
                keras_models.set_next_epoch_logs(self.model)
            for begin, end, batches in steps:
                if begin >= step:
                    yield begin, end, batches
                elif iterator.steps_per_epoch is None:
                    _pass_over(batches, end - begin + 1)

        self._resuming = resumed

    def resume_after_steps(self, logs: Logs, position: FeedPosition) -> None:
        """Make the next epoch run no steps: all are done, and only its validation is left."""

        def none_left(steps: Steps) -> Steps:
            del steps
            self._find_position(0, position)
            # Keras asks for the epoch's logs after the last step.
            keras_models.set_next_epoch_logs(self.model, logs)
            yield from ()

        self._resuming = none_left

    def note_opening(self) -> None:
        """Count how often the data was opened."""
        self._openings += 1

    def resumed(self, steps: Steps) -> Steps:
        """Begin an epoch as the last checkpoint has said that was loaded since the epoch before."""
        change, self._resuming = self._resuming, None
        yield from steps if change is None else change(steps)

    def _check_position(self, step: int, position: FeedPosition) -> None:
        checks = [("batch_size", position["batch_size"], self.batch_size())]
        batches, items = (position["batches"], self.iterator._num_batches), position.get("items")
        if items is not None and self._items is not None:
            checks = [("len(PyDataset)", len(items), self._items.num_batches)]
        elif None not in batches:  # else unknown, or of another batch size
            checks.append(("batches of the data", *batches))
        for what, before, now in checks:
            if before != now:
                raise ValueError(
                    f"step {step} of an epoch was reached with {what}={before}, so {what}={now} "
                    "cannot continue the epoch; use the same, or a checkpoint from the end of an "
                    "epoch"
                )

        together = self.iterator.steps_per_execution
        if step % together:
            raise ValueError(
                f"step {step} of an epoch lies within an execution of steps_per_execution="
                f"{together}, which would pass over steps; compile with one that divides {step}, "
                "or use a checkpoint from the end of an epoch"
            )

    def _find_position(self, step: int, position: FeedPosition) -> None:
        iterator = self.iterator
        is_stream = iterator.steps_per_epoch is not None
        is_inside = position["open"] if is_stream else position.get("begun", step > 0)
        if iterator._num_batches is None and not self._batch_size:
            iterator._num_batches = position["batches"]
        if is_inside and self._items is not None:
            self._items.next_order = position.get("items")
        if not isinstance(iterator.data_adapter, ArrayDataAdapter):
            while self._openings < position["iterators"] - is_inside:
                iter(iterator._get_iterator())
        if is_stream and is_inside:
            opened = iterator._current_iterator = iter(iterator._get_iterator())
            _pass_over(opened, position["seen"])
            iterator._steps_seen = position["seen"] - step


def _is_shuffled(adapter: DataAdapter) -> bool:
    return isinstance(adapter, ArrayDataAdapter) and bool(adapter._shuffle)


def _pass_over(batches: Iterator[Tree], count: int) -> None:
    for _ in range(count):
        next(batches, None)
