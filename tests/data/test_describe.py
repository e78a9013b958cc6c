"""What each rank reads is what `describe` says."""

from __future__ import annotations

import contextlib
import io
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.even_division import even_bounds

from support import bodies

KINDS = ["arrays", "dataset", "distributed", "PyDataset", "shard"]


class Numbers:
    """Rows 0 to 9, in three batches."""

    @staticmethod
    def dataset(endless=False):
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
    strategy = bodies.strategy(devices)
    told = {}
    for name, (data, batch_size) in kinds_of_data(strategy).items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = dtk.data.describe(data, strategy, batch_size)
        told[name] = found, printed.getvalue()
    return told


@pytest.mark.parametrize("backend, size", [("local", 1), ("collective", 2), ("mirrored", 2)])
def test_every_kind_of_data(world, backend, size):
    processes = 1 if backend == "mirrored" else size
    mirrored = backend == "mirrored"
    start = "local" if mirrored else backend
    ranks = world(start, processes).run(described, size if mirrored else 0)
    assert list(ranks[0]) == (KINDS[:-1] if mirrored else KINDS)
    for name, (found, printed) in ranks[0].items():
        assert str(found) + "\n" == printed, "rank 0 prints the table"
        for other in ranks[1:]:
            assert other[name] == (found, ""), "the others return the same, and print nothing"
        assert found.notes == ()
        assert [share.rank for share in found.shares] == list(range(size))
        for share in found.shares:
            assert share.batches == 3
            assert share.types[0] == "float32[]"
            for batch, (part, rows) in enumerate(zip(share.parts, (4, 4, 2), strict=True)):
                first, end = even_bounds(rows, share.rank, size)
                assert (part.taken, part.rows) == (end - first, rows)
                if name == "shard" and size > 1:  # every rank takes every second row
                    assert (part.first, part.sample) == (None, str(4 * batch + share.rank))
                else:  # rows are told by their numbers
                    assert (part.first, part.sample) == (first, str(4 * batch + first))
        hashes = [part.hash for share in found.shares for part in share.parts]
        assert len(set(hashes)) == 3 * size
    assert ranks[0]["arrays"][0].shares[0].types[1].endswith("[2, 3]")


def odd():
    """What is endless, uncounted, ragged, or not the same where it should be."""
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


ENDLESS = math.inf


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_what_does_not_look_right_is_noted(world, backend, size):
    ranks = world(backend, size).run(odd)
    assert ranks[0] == ranks[1]
    told = ranks[0]
    batches = {name: [share.batches for share in shares] for name, (shares, _) in told.items()}
    assert batches["endless"] == batches["endless PyDataset"] == [ENDLESS] * 2
    assert batches["uncounted"] == [None, None]
    samples = [share.parts[0].sample for share in told["endless"][0]]
    assert samples == ["a", "d"]
    assert all(share.parts[0].hash for share in told["ragged"][0])
    notes = {name: noted for name, (_, noted) in told.items() if noted}
    assert set(notes) == {"differs", "repeats", "uneven"}
    assert notes["differs"][0].startswith("ranks 0 and 1 were given different rows in batch 0; ")
    assert notes["repeats"][0].startswith("ranks 0 and 1 read the same rows in batch 0; ")
    assert notes["uneven"][0].startswith("rank 0 has 1 batch, rank 1 2 batches; every rank must")


def refused():
    """What `describe` says to what it cannot describe."""
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


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_what_cannot_be_described_is_refused(world, backend, size):
    for said in world(backend, size).run(refused):
        assert said["generator"].startswith("TypeError: cannot describe a generator; expected")
        assert said["list"].startswith("TypeError: cannot describe a list; expected")
        assert said["strategy"].startswith("ValueError: strategy is a _DefaultDistributionStrategy")
        assert said["batch size"].startswith("ValueError: batch_size=2 with a _BatchDataset, which")
        assert said["none"] == "ValueError: batches=0, expected 1 or more"
