"""Sharded pipelines: each rank reads its own part of data that is too heavy to read everywhere.

Normally `fit` reads every global batch on every rank and keeps a slice, which is exact and simple.
If decoding is the bottleneck, `shard` gives each rank its own files or elements:

    files   --list--> [a b c d e]   --rank 0 of 2-->  a c e      every second file
                                    --rank 1 of 2-->  b d
    A rank with fewer rows ends first, so ranks agree on the number of steps beforehand, and rank 0
    prints how many rows of other ranks are left out.

A global batch then consists of all ranks' local batches. Each rank's loss counts with its share of
the rows, so uneven local batches are weighted exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat import keras_data, py_datasets, tf_datasets
from dtk.errors import DisagreementError, at_rank
from dtk.even_division import even_sizes
from dtk.input.slicing import read_ahead
from dtk.nests import Tree
from dtk.pipelines import operations
from dtk.strategies.dtk_strategy import DtkStrategy

_NO_BATCHES = (
    "of a dataset of single elements; give the global batch, or batches of it: .batch(n) before"
)


def shard(
    source: Sequence[str] | tf.data.Dataset | keras.utils.PyDataset,
    strategy: DtkStrategy,
    batch_size: int | None = None,
    *,
    read: Callable[[tf.Tensor], tf.data.Dataset] | None = None,
    steps: int | None = None,
) -> tf.data.Dataset:
    """Give every rank its own part of the data, with the same number of steps on all ranks.

    Args:
        source: File names: rank r takes every `size`-th, from the r-th on. Or a dataset of single
            elements: rank r takes elements the same way. With fewer files than ranks every rank
            reads all files and takes every `size`-th element. Every rank runs a dataset's own `map`
            on all elements, so decode in `read`, or in a `map` on the result. Or, without
            `batch_size`, a dataset of global batches, such as Keras's utilities make: rank r takes
            its rows of each, as `fit` does, and a `map` on the result is given these alone. Or a
            `keras.utils.PyDataset`: rank r makes items r, r + size, ..., and the items of all ranks
            in one step are the global batch. If it shuffles itself when an epoch ends, it must do
            so alike on all ranks.
        strategy: The strategy whose ranks share the data.
        batch_size: The global batch; in each step a rank reads the rows of its slice. None for a
            `PyDataset` or a dataset that has batches.
        read: Turns a file name (a string tensor) into a dataset of elements, such as
            `tf.data.TFRecordDataset`; only needed for file names.
        steps: Steps of an epoch, the same on all ranks; every rank must have data for them. None:
            each rank counts its elements once, by reading them if TensorFlow does not know their
            number, and all take the steps of the shortest rank, so that no rank waits at the end.
            Rows of other ranks beyond these steps are left out of every epoch, and rank 0 prints
            how many. A dataset is dealt out element by element and leaves out hardly any.

    Returns:
        A dataset of this rank's batches. `fit` cuts neither it nor what is made of it, such as
        `shard(...).map(decode, num_parallel_calls=8)`. Where ranks have different numbers of
        batches, as after a filter, an epoch lasts as long as any rank has rows; `predict` needs
        equal numbers.

    Raises:
        ValueError: The batch is smaller than the number of workers, given for a `PyDataset`, or
            missing for anything else; `read` is missing; or a rank has too few elements for
            `steps`, or for a single step. If TensorFlow does not know the number of elements,
            `steps` is not checked, and a rank that runs out of data raises TensorFlow's error in
            that step.
        DisagreementError: The dataset shuffles in another order on each rank.

    Example:
        >>> import dtk, tensorflow as tf
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> numbers = tf.data.Dataset.range(10)
        >>> [len(batch) for batch in dtk.data.shard(numbers, strategy, batch_size=4)]
        [4, 4, 2]
    """
    communicator = strategy.communicator
    rank, size = communicator.rank, communicator.size
    if strategy.num_replicas_in_sync != size:
        raise ValueError(
            "shard divides data between processes, and a mirrored strategy has one; give its fit "
            "the whole dataset"
        )
    if isinstance(source, tf.data.Dataset) and size > 1:
        _check_same_order(source, communicator)
    if isinstance(source, keras.utils.PyDataset) and batch_size is None:
        return _shared_items(source, strategy, steps)
    if batch_size is None and isinstance(source, tf.data.Dataset):
        if not tf_datasets.has_batches(source):
            raise ValueError(at_rank(rank, f"batch_size=None {_NO_BATCHES}"))
        batches = source if steps is None else source.take(steps)
        with keras_data.calling_data(strategy, ""):
            return tf_datasets.own_dataset(strategy.experimental_distribute_dataset(batches))
    if isinstance(source, keras.utils.PyDataset) or batch_size is None:
        raise ValueError(
            at_rank(
                rank,
                f"batch_size={batch_size} of a {type(source).__name__}; give the global "
                "batch of files and elements, and none for a PyDataset, whose items are batches",
            )
        )
    if batch_size < size:
        raise ValueError(
            at_rank(rank, f"batch_size={batch_size} is smaller than {size} workers; use {size} up")
        )
    elements = _elements(source, read, rank, size)
    mine = even_sizes(batch_size, size)[rank]
    local = elements.batch(mine)
    if size > 1 or steps is not None:
        steps = _agreed_steps(steps, _count(elements, steps), mine, communicator)
    return _of_this_rank(local, size, steps)


def _check_same_order(source: tf.data.Dataset, communicator: Communicator) -> None:
    """Raise on every rank when ranks shuffle in different orders: some rows would come twice."""
    everyone = communicator.allgather_object(operations.shuffle_seeds(source))
    if any(seeds != everyone[0] or None in seeds for seeds in everyone):
        raise DisagreementError(
            at_rank(
                communicator.rank,
                "the dataset that shard was given shuffles in another order on each rank, so some "
                "rows would come twice and others never; make it after the strategy, or give its "
                "shuffle a seed: .shuffle(n, seed=7)",
            )
        )


def _of_this_rank(local: tf.data.Dataset, size: int, steps: int | None) -> tf.data.Dataset:
    if steps is not None:
        local = local.take(steps).apply(tf.data.experimental.assert_cardinality(steps))
    ahead = read_ahead(local)
    return ahead if size == 1 else tf_datasets.mark_of_this_rank(ahead)


class _OwnItems(keras.utils.PyDataset):
    """The items of a `PyDataset` that one of several ranks makes."""

    def __init__(self, source: keras.utils.PyDataset, rank: int, size: int, steps: int):
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self._source = source
        self._rank, self._size, self._steps = rank, size, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Tree:
        return self._source[index * self._size + self._rank]


def _shared_items(
    source: keras.utils.PyDataset, strategy: DtkStrategy, steps: int | None
) -> tf.data.Dataset:
    communicator = strategy.communicator
    rank, size = communicator.rank, communicator.size
    items = source.num_batches
    count = tf.data.INFINITE_CARDINALITY if items is None else len(range(rank, items, size))
    steps = _agreed_steps(steps, count, 1, communicator, "batches")
    adapter = py_datasets.PyDatasetAdapter(_OwnItems(source, rank, size, steps))

    def epoch() -> Iterator[Tree]:
        source.on_epoch_begin()
        batches = adapter.get_numpy_iterator()
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        source.on_epoch_end()  # before the last: nobody asks for more
        yield batch

    spec = adapter.get_tf_dataset().element_spec
    made = tf.data.Dataset.from_generator(epoch, output_signature=spec)
    return _of_this_rank(made, size, steps)


def _elements(
    source: Sequence[str] | tf.data.Dataset,
    read: Callable[[tf.Tensor], tf.data.Dataset] | None,
    rank: int,
    size: int,
) -> tf.data.Dataset:
    if isinstance(source, tf.data.Dataset):
        return source.shard(size, rank)
    if read is None:
        raise ValueError(
            "shard got file names but not how to read them; give read=tf.data.TFRecordDataset or a "
            "function from a file name to a dataset of elements"
        )
    names = sorted(source)
    if not names:
        raise ValueError("shard got no file names; check the pattern that should have found them")
    if len(names) < size:
        return tf.data.Dataset.from_tensor_slices(names).flat_map(read).shard(size, rank)
    return tf.data.Dataset.from_tensor_slices(names[rank::size]).flat_map(read)


def _count(elements: tf.data.Dataset, asked: int | None) -> int:
    rows = int(elements.cardinality())
    if asked is None and rows == tf.data.UNKNOWN_CARDINALITY:
        rows = int(elements.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))
    return rows


def _agreed_steps(
    asked: int | None, rows: int, mine: int, communicator: Communicator, unit: str = "rows"
) -> int:
    """Return the steps that every rank takes; `mine` is this rank's batch size. Raise on all."""
    held = communicator.allgather_object((asked, rows, mine))
    wrong = _wrong_steps(asked, [each[0] for each in held], [each[1:] for each in held])
    if wrong:
        raise ValueError(at_rank(communicator.rank, wrong))
    if asked is not None:
        return asked
    steps = min(-(-rows // batch) for _, rows, batch in held)
    left_out = sum(max(0, rows - steps * batch) for _, rows, batch in held)
    if left_out and communicator.rank == 0:
        counts = [rows for _, rows, _ in held]
        print(
            f"shard: {left_out} of {sum(counts)} {unit} are left out of every epoch, because ranks "
            f"hold {counts} {unit} and all take the {steps} steps of the shortest; spread the rows "
            "more evenly over files, or give shard a dataset of all of them",
            flush=True,
        )
    return steps


def _wrong_steps(
    asked: int | None, everyone: list[int | None], held: list[tuple[int, int]]
) -> str | None:
    """Return an error message for the steps, given (rows, rows of a batch) by rank; else None."""
    if len(set(everyone)) > 1:
        return f"steps={asked}, but it must be the same on all ranks (by rank: {everyone})"
    if asked is not None and asked < 1:
        return f"steps={asked}, but it must be 1 or more"
    counts = [rows for rows, _ in held]
    if asked is None and tf.data.INFINITE_CARDINALITY in counts:
        return "shard of an endless dataset needs steps=..., the steps of an epoch"
    if 0 in counts:
        return (
            f"rank {counts.index(0)} has no data at all (rows by rank: {counts}); use fewer "
            "workers, or a dataset with more elements"
        )
    batches = {rank: -(-rows // batch) for rank, (rows, batch) in enumerate(held) if rows > 0}
    short = next((rank for rank in batches if batches[rank] < (asked or 0)), None)
    if short is None:
        return None
    return (
        f"steps={asked}, but rank {short} has data for {batches[short]}; give at most that, repeat "
        "the source, or leave steps out for what every rank has"
    )
