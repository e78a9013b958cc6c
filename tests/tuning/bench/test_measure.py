"""What is measured are steps; contenders take turns."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators import LocalCommunicator
from dtk.strategies import AllReduceStrategy
from dtk.tuning.bench.contender import Alone, Stopwatch, Together
from dtk.tuning.bench.measure import allreduces, take_turns
from dtk.tuning.bench.models import PROBLEMS, Problem
from dtk.tuning.bench.results import Reading
from dtk.tuning.bench.setting import Setting

SMALL = Problem(
    lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)]),
    lambda random, count: random.standard_normal((count, 4), dtype="float32"),
)


class Counting(LocalCommunicator):
    """Sends what a test says it sends."""

    sent, seconds = 0, 0.0
    bytes_sent = property(lambda self: self.sent)
    seconds_communicating = property(lambda self: self.seconds)


def test_the_stopwatch_leaves_out_the_first_step_and_what_surrounds_the_others():
    communicator = Counting()
    watch = Stopwatch(communicator, steps=2)
    for batch in range(3):
        watch.on_train_batch_begin(batch)
        communicator.sent += 10 if batch else 1000
        communicator.seconds += 0.01 if batch else 1.0
        time.sleep(0.02 if batch else 0.5)
        watch.on_train_batch_end(batch)
    communicator.sent += 1000
    reading = watch.reading(fit=7.0)
    assert reading.sent == 10
    assert 0.02 <= reading.seconds < 0.25
    assert reading.communicating == pytest.approx(0.01 / reading.seconds)
    assert reading.fit == 7.0


class Noting:
    """Notes when it had its turn."""

    def __init__(self, name, noted):
        self.name, self._noted = name, noted

    def turn(self):
        self._noted.append(self.name)
        return Reading(float(len(self._noted)), 0.0, 0.0, 0.0)


def test_contenders_begin_at_either_end_and_the_first_round_does_not_count():
    noted = []
    contenders = [Noting(name, noted) for name in "abc"]
    told = list(take_turns(contenders, 2, LocalCommunicator()))
    assert "".join(noted) == "cba" + "abc" + "cba"
    assert [one["contender"] for one in told] == list("abccba")
    assert [one["turn"][0]["seconds"] for one in told] == [4, 5, 6, 7, 8, 9]


class Slow(LocalCommunicator):
    """Takes its time, more the first time; notes what it was given."""

    def __init__(self):
        super().__init__()
        self.given, self.met = [], 0

    def allreduce(self, value, op="sum"):
        self.given.append((value.dtype.size * value.shape.num_elements(), self.met))
        return tf.numpy_function(lambda v: (time.sleep(0.02), v)[1], [value], value.dtype)

    def barrier(self):
        self.met += 1


def test_allreduces_are_of_so_many_bytes_and_begin_together():
    communicator = Slow()
    seconds = allreduces(4096, communicator)
    assert communicator.given == [(4096, 1)]  # traced once, after ranks had met
    assert communicator.met == len(seconds) + 1
    assert all(0.02 <= one < 0.25 for one in seconds)


@pytest.mark.parametrize("make", [Alone, lambda *given: Together(*given, "1bit")])
def test_a_turn_is_so_many_steps_of_so_many_rows_and_one_more(make):
    strategy = AllReduceStrategy(communicator="local")
    contender = make(SMALL, Setting(batch_size=3, steps=4), strategy)
    seen = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(1))
    reading = contender.turn()
    assert contender.model.optimizer.iterations.numpy() == 5
    assert 0 < 4 * reading.seconds < reading.fit
    contender.model.fit(*contender._data, batch_size=3, verbose=0, callbacks=[noting])
    assert len(seen) == 5


def test_the_limit_trains_without_a_strategy_and_the_others_with_it():
    strategy = AllReduceStrategy(communicator="local")
    limit = Alone(SMALL, Setting(), strategy)
    together = Together(SMALL, Setting(), strategy, "8bit")
    assert limit.model.distribute_strategy is not strategy
    assert together.model.distribute_strategy is strategy
    assert (limit.name, together.name) == ("limit", "8bit")
    assert repr(strategy.exchange) == "Quantized(bits=8)"
    for mine, its in zip(limit.model.get_weights(), together.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet20", 0.27), ("mlp", 10.51), ("embedding", 12.8), ("transformer", 0.79)],
)
def test_models_are_as_large_as_the_table_says_and_read_their_rows(name, millions):
    problem = PROBLEMS[name]
    model = problem.build()
    assert model.count_params() / 1e6 == pytest.approx(millions, abs=0.01)
    x, y = problem.data(3)
    assert model(x).shape == (3, 10)
    assert y.shape == (3,) and set(y) <= set(range(10))
    np.testing.assert_array_equal(x, problem.data(3)[0])


def test_the_embeddings_gradient_is_the_rows_it_touches():
    problem = PROBLEMS["embedding"]
    model = problem.build()
    x, _ = problem.data(2)
    with tf.GradientTape() as tape:
        out = model(x)
    table = tape.gradient(out, model.trainable_variables[0].value)
    assert isinstance(table, tf.IndexedSlices)
    assert table.values.shape == (16, 64)
