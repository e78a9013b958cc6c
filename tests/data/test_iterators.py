"""The same batches on every rank, and nobody waits for batches that do not come."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.data import broadcast_iterator, synchronized_iterator
from dtk.data.sharing import permutation

from strategies import bodies

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
