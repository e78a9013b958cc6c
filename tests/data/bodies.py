"""What the data tests run on every rank."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtk.communicators import LocalCommunicator
from dtk.strategies import undistributed

from strategies import bodies, cases


class Twin(LocalCommunicator):
    """One of `size` ranks that all say the same: what it hears from others is what it said."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size

    def broadcast_object(self, value=None, root=0):
        return value

    def allgather_object(self, value):
        return [value] * self.size


def elements_of(files, batch_size, steps=None):
    """Rows each step of this rank reads, as numbers."""
    import dtk

    strategy = bodies.strategy()  # before TensorFlow's first operation
    if files is None:
        source, read = tf.data.Dataset.range(23), None
    else:
        source, read = files, lambda name: tf.data.TextLineDataset(name).map(_number)
    dataset = dtk.data.shard(source, strategy, batch_size, read=read, steps=steps)
    return [batch.numpy().tolist() for batch in dataset]


def said_about(files, batch_size):
    """What is printed while the files are divided."""
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        elements_of(files, batch_size)
    return told.getvalue()


def refused(files, batch_size, steps):
    """What a rank says about its number of steps, given per rank."""
    rank = bodies.strategy().rank
    try:
        elements_of(files, batch_size, steps[rank])
    except ValueError as error:
        return str(error)
    return None


def no_end_no_start():
    import dtk

    strategy, said = bodies.strategy(), []
    for dataset in (tf.data.Dataset.range(4).repeat(), tf.data.Dataset.range(1)):
        try:
            dtk.data.shard(dataset, strategy, 2)
        except ValueError as error:
            said.append(str(error))
    return said


def _number(line):
    return tf.strings.to_number(line, tf.int64)


def trained_on_shards(whole_first=False):
    """`fit` on shards of a dataset, and the plain fit on the same global batches."""
    import dtk

    strategy = bodies.strategy()
    x, y = cases.rows(45)
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    model = cases.compiled(strategy, metrics=["accuracy"])
    if whole_first:
        model.fit(whole.batch(15), verbose=0, shuffle=False)
    dataset = dtk.data.shard(whole, strategy, 15)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)

    order = []  # step by step: rank 0's eight rows, then rank 1's seven
    queues = [list(range(45))[rank::2] for rank in range(2)]
    for _ in range(3):
        for queue, count in zip(queues, (8, 7), strict=True):
            order += queue[:count]
            del queue[:count]
    plain = cases.compiled(None, metrics=["accuracy"])
    if whole_first:
        with undistributed():
            plain.fit(whole.batch(15), verbose=0, shuffle=False)
    batches = [len(order[i * 15 : i * 15 + 15]) for i in range(3)]
    assert batches[:2] == [15, 15]
    with undistributed():
        expected = plain.fit(
            tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(15),
            epochs=3,
            verbose=0,
            shuffle=False,
        )
    weights = [bodies.flat(m.get_weights()) for m in (model, plain)]
    return weights, history.history, expected.history


def seeds():
    import dtk

    own = dtk.data.set_seed(7, bodies.strategy())
    return own, np.random.rand()


# Scattering, minibatches and iterators.

KINDS = ("array", "arrays", "tensor", "samples", "strings", "dataset")


def dataset(kind, count):
    """`count` rows that `rows_of` can tell."""
    numbers = np.arange(count)
    if kind == "arrays":
        return {"x": numbers.astype("float32")[:, None], "y": (numbers, numbers + 1)}
    if kind == "dataset":
        return tf.data.Dataset.from_tensor_slices((numbers, numbers + 1))
    return {
        "array": numbers,
        "tensor": tf.constant(numbers),
        "samples": [(number, np.full(number, 1.5)) for number in numbers.tolist()],
        "strings": np.array([str(number) for number in numbers]),
    }[kind]


def rows_of(kind, part):
    """Row numbers of a part of `dataset(kind, ...)`, which must be of its kind still."""
    if kind == "arrays":
        (first, second), x = part["y"], part["x"]
        assert x.shape == (len(first), 1) and x[:, 0].tolist() == first.tolist()
        assert (second - first == 1).all()
        return first.tolist()
    if kind == "samples":
        assert all(values.tolist() == [1.5] * number for number, values in part)
        return [number for number, _ in part]
    if kind == "dataset":
        assert part.element_spec == dataset(kind, 1).element_spec
        elements = [(int(number), int(other)) for number, other in part]
        assert all(other == number + 1 for number, other in elements)
        return [number for number, _ in elements]
    assert isinstance(part, tf.Tensor if kind == "tensor" else np.ndarray)
    return [int(row) for row in (part.numpy() if kind == "tensor" else part)]


def scattered_from(root):
    """Row numbers by kind, of data that `root` alone has."""
    from unittest import mock

    from dtk.data import scatter

    strategy = bodies.strategy()
    parts = {}
    with mock.patch.object(scatter, "_MESSAGE", 100), strategy.scope():
        for kind in KINDS:
            whole = dataset(kind, 11) if strategy.rank == root else None
            parts[kind] = rows_of(kind, scatter.scatter_dataset(whole, None, root, True, 4))
    return parts


class _Unreadable(list):
    def __getitem__(self, index):
        raise OSError("no such image")


def scattered_apart():
    """What the ranks get that ask for different orders, and what they hear that gave wrong data."""
    from dtk.data import scatter_dataset

    strategy = bodies.strategy()
    rank = strategy.rank
    mine = scatter_dataset(np.arange(8), strategy, 0, rank == 0, 1 + rank)
    said = []
    for given, root in (
        (np.arange(8 + rank), 0),
        (_Unreadable("ab") if rank == 0 else None, 0),
        (np.arange(8) if rank == 0 else None, 1),
    ):
        try:
            scatter_dataset(given, strategy, root)
        except (ValueError, OSError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return mine.tolist(), said


SIZES = (5, 1, 4, 9, 2, 8)


def read_alone():
    """All rows that one process reads."""
    from dtk.communicators import create
    from dtk.data import PartitionedMinibatches

    reader = PartitionedMinibatches(np.arange(13), create("local"), seed=3)
    return [row for size in SIZES for row in reader.next_minibatch(size).data.tolist()]


def read_minibatches():
    """This rank's rows by minibatch, and what is said where seeds differ."""
    from dtk.data import PartitionedMinibatches
    from dtk.errors import DisagreementError

    strategy = bodies.strategy()
    with strategy.scope():
        reader = PartitionedMinibatches(np.arange(13), seed=3)
    mine = [reader.next_minibatch(size).data.tolist() for size in SIZES]
    try:
        PartitionedMinibatches(np.arange(13), strategy, seed=strategy.rank)
    except DisagreementError as error:
        return mine, str(error)
    return mine, None


def fitted_on_minibatches():
    """Weights of `fit`, and of a plain loop over the same minibatches in one process."""
    from dtk.communicators import create
    from dtk.data import PartitionedMinibatches

    strategy = bodies.strategy()
    data = cases.rows(45)
    reader = PartitionedMinibatches(data, strategy, seed=2)
    model = cases.compiled(strategy)
    model.fit(reader.dataset(16), epochs=2, steps_per_epoch=reader.steps(16), verbose=0)
    alone = PartitionedMinibatches(data, create("local"), seed=2)
    plain = cases.compiled(None)
    for _ in range(2 * reader.steps(16)):
        with undistributed():
            plain.train_on_batch(*alone.next_minibatch(16).data)
    return [bodies.flat(m.get_weights()) for m in (model, plain)]


def broadcast_batches(root):
    """(types, values) of every batch that `root` reads."""
    from dtk.data import broadcast_iterator

    strategy = bodies.strategy()

    def batches():
        for begin in range(0, 5, 2):
            rows = np.arange(begin, min(begin + 2, 5))
            yield {"x": tf.constant(rows), "y": rows / 2}

    source = batches() if strategy.rank == root else None
    return [
        (
            tuple(type(batch[name]).__name__ for name in "xy"),
            [batch["x"].numpy().tolist(), batch["y"].tolist()],
        )
        for batch in broadcast_iterator(source, strategy, root)
    ]


class Peculiar(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, done, of):
        super().__init__(f"{done} of {of}")


def broken_batches(how):
    """Batches seen, and the error: its type, its words and its notes."""
    from dtk.data import broadcast_iterator

    def batches():
        if how == "cannot be sent":
            yield lambda: None
        yield np.arange(2)
        raise Peculiar(3, 4) if how == "raises its own" else OSError("shard 2 is broken")

    strategy, seen = bodies.strategy(), 0
    source = None if how == "is nothing" else batches()
    try:
        for _ in broadcast_iterator(source, strategy):
            seen += 1
    except Exception as error:
        # Everyone can go on.
        strategy.communicator.barrier()
        return seen, type(error).__name__, str(error), getattr(error, "__notes__", [])
    return seen, None, None, None


def synchronized():
    """Row orders: of seeds that differ by rank, and of one that is drawn."""
    from dtk.data import synchronized_iterator

    strategy = bodies.strategy()
    np.random.seed(strategy.rank)

    def order(seed):
        return np.random.RandomState(seed).permutation(8)

    def of_tensorflow(seed):
        return tf.data.Dataset.range(8).shuffle(8, seed=seed)

    first = synchronized_iterator(order, strategy, 1 + strategy.rank)
    second = synchronized_iterator(of_tensorflow, strategy)
    return [int(row) for row in first], [int(row) for row in second]
