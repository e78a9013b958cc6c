"""The same batches on every rank, and nobody waits for batches that do not come."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.data import broadcast_iterator, synchronized_iterator
from dtk.data.sharing import permutation

from support import bodies

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


def broadcast_batches(root):
    """(types, values) of every batch that `root` reads."""
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


def test_what_root_reads_everyone_gets_and_all_end_together(world, backend, size):
    first, second = world(backend, size).run(broadcast_batches, 1)
    assert first == second
    kinds, values = zip(*first, strict=True)
    assert kinds == (("EagerTensor", "ndarray"),) * 3
    assert values == ([[0, 1], [0.0, 0.5]], [[2, 3], [1.0, 1.5]], [[4], [2.0]])


class Peculiar(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, done, of):
        super().__init__(f"{done} of {of}")


def broken_batches(how):
    """Batches seen, and the error: its type, its words and its notes."""

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


@pytest.mark.parametrize(
    "how, kinds, message",
    [
        ("raises", ["OSError"] * 2, "shard 2 is broken"),
        ("cannot be sent", ["AttributeError"] * 2, "pickle"),
        ("is nothing", ["TypeError"] * 2, "'NoneType' object is not iterable"),
        # An error that cannot be pickled says what it is all the same.
        ("raises its own", ["Peculiar", "RuntimeError"], "3 of 4"),
    ],
)
def test_what_breaks_on_root_breaks_on_all(world, backend, size, how, kinds, message):
    """Breaks as a rank that waits for a batch for ever."""
    root, other = world(backend, size).run(broken_batches, how)
    assert root[0] == other[0] == how.startswith("raises")
    assert [root[1], other[1]] == kinds
    assert message in root[2] and message in other[2]
    assert root[3] == [] and other[3] == ["rank 1: this happened on rank 0"]


def synchronized():
    """Row orders: of seeds that differ by rank, and of one that is drawn."""
    strategy = bodies.strategy()
    np.random.seed(strategy.rank)

    def order(seed):
        return np.random.RandomState(seed).permutation(8)

    def of_tensorflow(seed):
        return tf.data.Dataset.range(8).shuffle(8, seed=seed)

    first = synchronized_iterator(order, strategy, 1 + strategy.rank)
    second = synchronized_iterator(of_tensorflow, strategy)
    return [int(row) for row in first], [int(row) for row in second]


def test_every_rank_draws_the_same_order(world, backend, size):
    given, drawn = zip(*world(backend, size).run(synchronized), strict=True)
    assert list(given) == [permutation(8, 1).tolist()] * 2
    assert drawn[0] == drawn[1] != list(range(8))
    assert np.sort(drawn[0]).tolist() == list(range(8))


# What the tests of ChainerMN's iterators say: chainer/chainer, in tests/chainermn_tests/
# iterators_tests, test_multi_node_iterator.py and test_synchronized_iterator.py. Theirs read 100
# rows in batches of 4, and of 7, which leaves a tail; from rank 0 and 1; rows, and pairs of them.


def passes(seed, batch):
    """Batches of three passes, each in another order drawn from one generator."""
    random = np.random.RandomState(seed)
    for _ in range(3):
        order = random.permutation(100)
        yield from np.split(order, range(batch, 100, batch))


def broadcast_passes(root, batch, paired):
    """Batches, and what comes after their end, which a rank may ask for more often than others."""
    strategy = bodies.strategy()

    def batches():
        for rows in passes(strategy.rank, batch):
            values = rows.astype("float32")
            yield list(zip(values, rows / 2, strict=True)) if paired else list(values)
        yield ["text"]

    mine = broadcast_iterator(batches() if strategy.rank == root else None, strategy, root)
    return list(mine), [next(mine, "over") for _ in range(1 + strategy.rank)]


@pytest.mark.parametrize("root, batch, paired", [(0, 4, False), (1, 7, True)])
def test_every_rank_gets_the_batches_of_chainermn_s_master(
    world, backend, size, root, batch, paired
):
    """Other than there a pair keeps its types, and text is sent, too."""
    first, second = world(backend, size).run(broadcast_passes, root, batch, paired)
    assert first[0] == second[0]
    assert [first[1], second[1]] == [["over"], ["over"] * 2]
    expected = [rows.tolist() for rows in passes(root, batch)]
    if paired:
        expected = [[(row, row / 2) for row in rows] for rows in expected]
        kinds = {tuple(map(type, pair)) for pair in first[0][0] + second[0][0]}
        assert kinds == {(np.float32, np.float64)}
    assert second[0] == [*expected, ["text"]]


def synchronized_passes(batch):
    """Rows of two iterators, of numpy and of TensorFlow, made one after the other."""
    strategy = bodies.strategy()
    keras.utils.set_random_seed(strategy.rank)

    def of_tensorflow(seed):
        rows = tf.data.Dataset.range(100).shuffle(100, seed=seed)
        return rows.batch(batch).repeat(3).as_numpy_iterator()

    makes = [lambda seed: passes(seed, batch), of_tensorflow] * 2
    iterators = [synchronized_iterator(make, strategy) for make in makes]
    return [[rows.tolist() for rows in iterator] for iterator in iterators]


@pytest.mark.parametrize("batch", [4, 7])
def test_ranks_have_one_order_in_each_pass_and_another_in_the_next(world, backend, size, batch):
    """Where ChainerMN's iterator is reset for another pass, dtk makes another iterator."""
    first, second = world(backend, size).run(synchronized_passes, batch)
    assert first == second
    rows = np.concatenate([sum(batches, []) for batches in first]).reshape(4 * 3, 100)
    assert (np.sort(rows) == np.arange(100)).all()
    assert len({tuple(order) for order in rows}) == 4 * 3
