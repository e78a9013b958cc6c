"""How often `Checkpoint` saves: by samples it is as often whatever the batch."""

from __future__ import annotations

import itertools
import types

import keras
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import checkpoint
from dtk.callbacks.checkpoint import Frequency

from callbacks.bodies import compiled, data, strategy

# As a `Feed` counts them: 37 rows in batches of 8; what a generator does not tell.
ARRAYS = types.SimpleNamespace(rows_counted=lambda steps: min(steps * 8, 37))
GENERATOR = types.SimpleNamespace(rows_counted=lambda steps: None)


def test_rows_are_looked_up_seldom(monkeypatch):
    """Steps of 10 rows, a thousand of them to a checkpoint: a look for each halving."""
    looks = []
    monkeypatch.setattr(checkpoint, "count_rows", lambda step: looks.append(step) or 10 * step)
    counted = Frequency(save_every_samples=10_000)
    saved = []
    for step in range(1, 3001):
        counted.count(step, GENERATOR, step)
        if counted.due:
            saved.append(step)
            counted.saved()
    assert saved == [1000, 2000, 3000]
    assert len(looks) < 60


def test_rows_that_were_not_looked_up_before_a_checkpoint_count_only_once(monkeypatch):
    """The last steps of an epoch count by those before; they are no part of what comes next."""
    monkeypatch.setattr(checkpoint, "count_rows", lambda step: 10 * step)
    counted = Frequency(save_every_samples=100)
    for step in range(1, 9):
        counted.count(step, GENERATOR, step)
    counted.count(10, GENERATOR, None)
    assert counted.due and counted.samples == 100
    counted.saved()
    counted.count(11, GENERATOR, 11)
    assert counted.samples == 10


def test_batches_that_grow_are_counted_as_they_are(monkeypatch):
    monkeypatch.setattr(checkpoint, "count_rows", lambda step: 8 * step if step < 9 else 64 * step)
    counted = Frequency(save_every_samples=1000)
    for step in range(1, 17):
        counted.count(step, GENERATOR, step)
    assert counted.due and counted.samples == 16 * 64


def test_a_last_smaller_batch_counts_its_own_rows():
    counted = Frequency(save_every_samples=30)
    for done in range(6):
        counted.count(done, ARRAYS)
    assert (counted.steps, counted.samples) == (5, 37)
    counted.saved()
    # A model is not asked: one with a train_step of its own was refused when it was resumed here.
    counted.begin_epoch(3, ARRAYS, None)
    counted.count(4, ARRAYS)
    assert (counted.samples, counted.due) == (8, False)


def saved_at(directory, samples, form, schedule):
    """Where a fit of three epochs of 40 rows in batches of 8 saves: (epoch, step) of each."""
    strategy()
    x, y = data(40)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    given = {"x": x, "y": y, "batch_size": 8} if form == "arrays" else {"x": rows}
    place = dtk.callbacks.Checkpoint(directory, save_every_samples=samples, max_to_keep=None)
    more = [dtk.callbacks.BatchSizeSchedule([8, 16, 40])] if schedule else []
    compiled(keras.optimizers.SGD(0.01)).fit(**given, epochs=3, verbose=0, callbacks=[*more, place])
    states = [place.files.read(name)[0] for name in reversed(place.files.names())]
    return [(state["epoch"], state["step"]) for state in states]


CASES = [
    # After 24, 48, 72, 96 and 120 of 120 samples.
    ("arrays", False, [(0, 3), (1, 1), (1, 4), (2, 2), (3, 0)]),
    ("dataset", False, [(0, 3), (1, 1), (1, 4), (2, 2), (3, 0)]),
    # Batches of 8; of 16, 16 and 8; of 40: 24, then 48 = 40 + 16 + 16 - 24, 80 and 120.
    ("arrays", True, [(0, 3), (1, 1), (2, 0), (3, 0)]),
]


@pytest.mark.worlds(("local", 1), pytest.param(("collective", 2), marks=pytest.mark.full))
@pytest.mark.parametrize("form, schedule, expected", CASES)
def test_samples_are_counted_over_epochs_and_batch_sizes(pool, tmp_path, form, schedule, expected):
    for found in pool.run(saved_at, str(tmp_path), 24, form, schedule):
        assert found == expected


def untold(directory):
    """Batches of a generator, three epochs of five with 8 rows each."""
    strategy()
    x, y = data(40)

    def batches():
        for start in itertools.cycle(range(0, 40, 8)):
            yield x[start : start + 8], y[start : start + 8]

    specs = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1)))
    rows = tf.data.Dataset.from_generator(batches, output_signature=specs)
    place = dtk.callbacks.Checkpoint(directory, save_every_samples=24, max_to_keep=None)
    compiled("sgd").fit(
        rows,
        epochs=3,
        steps_per_epoch=5,
        verbose=0,
        callbacks=[place],
        validation_data=(x, y),
    )
    return place.files.names()


@pytest.mark.worlds(("local", 1))
def test_data_that_does_not_tell_its_batch_size(pool, tmp_path):
    ((names),) = pool.run(untold, str(tmp_path))
    assert len(names) == 5
