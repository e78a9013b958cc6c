"""What tests of `dtk.data.describe` run on every rank."""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import tensorflow as tf

from strategies import bodies


class Numbers:
    """Rows 0 to 9, in three batches."""

    @staticmethod
    def dataset(endless=False):
        import keras

        class Batches(keras.utils.PyDataset):
            @property
            def num_batches(self):
                return None if endless else 3

            def __getitem__(self, index):
                return _rows()[4 * index : 4 * index + 4], np.zeros((min(4, 10 - 4 * index), 1))

        return Batches()


def _rows():
    return np.arange(10, dtype="float32")


def kinds_of_data(strategy):
    """The rows 0 to 9 in batches of 4, as all that `describe` takes."""
    import dtk

    numbers = tf.data.Dataset.from_tensor_slices(_rows())
    return {
        "arrays": ((_rows(), np.zeros((10, 2, 3))), 4),
        "dataset": (numbers.batch(4), None),
        "distributed": (strategy.experimental_distribute_dataset(numbers.batch(4)), None),
        "PyDataset": (Numbers.dataset(), None),
        **(
            {"shard": (dtk.data.shard(numbers, strategy, 4), None)}
            if strategy.size == strategy.communicator.size
            else {}
        ),
    }


def described(devices=0):
    """By kind of data: what was returned for every rank, and what was printed here."""
    import dtk

    strategy = bodies.strategy(devices)
    told = {}
    for name, (data, batch_size) in kinds_of_data(strategy).items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = dtk.data.describe(data, strategy, batch_size)
        told[name] = found, printed.getvalue()
    return told


def odd():
    """What is endless, uncounted, ragged, or not the same where it should be."""
    import dtk

    strategy = bodies.strategy()
    words = tf.data.Dataset.from_tensor_slices(["a", "bc", "d"]).batch(3)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2)
    mine = np.arange(8.0) + 100 * strategy.rank
    same = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(4).batch(2))
    cases = {
        "endless": words.repeat(),
        "uncounted": words.filter(lambda batch: True),
        "ragged": ragged,
        "endless PyDataset": Numbers.dataset(endless=True),
        "differs": tf.data.Dataset.from_tensor_slices(mine).batch(4),
        "repeats": same,
        "uneven": tf.data.Dataset.range(4 + 4 * strategy.rank).batch(4),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        told = {name: dtk.data.describe(data, strategy, batches=1) for name, data in cases.items()}
    return {name: (found.shares, found.notes) for name, found in told.items()}


def refused():
    """What `describe` says to what it cannot describe."""
    import dtk

    strategy = bodies.strategy()
    x = np.zeros((8, 2))
    calls = {
        "generator": ((row for row in x), strategy),
        "list": ([x, x], strategy),
        "strategy": (x, tf.distribute.get_strategy()),
        "batch size": (tf.data.Dataset.range(4).batch(2), strategy, 2),
        "none": (x, strategy, 4, 0),
    }
    said = {}
    for name, arguments in calls.items():
        try:
            dtk.data.describe(*arguments)
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


ENDLESS = math.inf
