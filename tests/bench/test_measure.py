"""What is measured are steps; variants take turns."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.bench.bench_jobs import JobLost, Places
from dtk.bench.models import PROBLEMS, Problem
from dtk.bench.results import Reading, Setting
from dtk.bench.turns import BenchRun
from dtk.bench.variant import LocalFit, Stopwatch, allreduce, distributed_fit
from dtk.bench.worker import clock
from dtk.communicators import LocalCommunicator
from dtk.strategies import AllReduceStrategy

SMALL = Problem(
    lambda keras: keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)]),
    lambda random, count: random.standard_normal((count, 4), dtype="float32"),
)


class Counting(LocalCommunicator):
    """Sends what a test says it sends."""

    sent, seconds = 0, 0.0
    bytes_sent = property(lambda self: self.sent)
    seconds_communicating = property(lambda self: self.seconds)


def test_the_first_step_and_what_surrounds_the_others_is_left_out():
    communicator = Counting()

    def turn(tick):
        watch = Stopwatch(communicator, 2, tick)
        for batch in range(3):
            watch.on_train_batch_begin(batch)
            communicator.sent += 10 if batch else 1000
            communicator.seconds += 0.01 if batch else 1.0
            time.sleep(0.02 if batch else 0.5)
            watch.on_train_batch_end(batch)
            time.sleep(0 if batch else 0.5)
        communicator.sent += 1000
        time.sleep(0.5)
        return watch.counts()

    reading = clock(turn)
    assert reading["sent"] == 10
    assert 0.02 <= reading["seconds"] < 0.25
    assert reading["communicating"] == pytest.approx(0.01 / reading["seconds"], rel=0.1)
    assert reading["fit"] > 1.0


class Played:
    """A job that notes when it had its turn, and is lost when it is told to be."""

    def __init__(self, name, variants, noted, essential=True, lost_at=None, parameters=7):
        self.name, self.essential = name, essential
        self._variants, self._noted, self._lost_at = variants, noted, lost_at
        self._parameters = parameters

    def build(self, task):
        return self._parameters, [*self._variants], {"3": "it is odd"}

    def measure(self, name):
        self._noted.append(name)
        if len(self._noted) == self._lost_at:
            raise JobLost("it is gone", code=9)
        return [Reading(*[len(self._noted)] * 4)] * 2

    def close(self, hurry):
        self._noted.append("closed")


def measured(*jobs):
    run = BenchRun(Setting(models=("mlp",), rounds=2), Places(2), jobs=list(jobs))
    run.results.setting["rounds"] = 2
    run.take_turns()
    return run.results


def test_variants_of_all_jobs_begin_at_either_end_and_the_first_round_does_not_count():
    noted = []
    results = measured(Played("limit", ["limit"], noted), Played("w", "ab", noted))
    assert "".join(noted).replace("limit", "l") == "bal" + "lab" + "bal"
    turns = results.turns["mlp"]
    assert list(turns) == ["limit", "w a", "w b"]
    assert [[turn[0].seconds for turn in one] for one in turns.values()] == [[4, 9], [5, 8], [6, 7]]
    assert results.parameters == {"mlp": 7}
    assert results.absent == {"limit 3, mlp": "it is odd", "w 3, mlp": "it is odd"}


@pytest.mark.parametrize("lost_at", range(1, 10))
def test_a_peer_that_is_lost_is_named_with_the_reason_and_the_rest_goes_on(lost_at):
    noted = []
    results = measured(
        Played("limit", ["limit"], noted), Played("baseline", "ab", noted, False, lost_at)
    )
    whole = {"limit": 2}
    if noted[lost_at - 1] != "limit":
        assert results.absent["baseline"] == "it is gone"
        assert noted[lost_at] == "closed" and {*noted[lost_at + 1 :]} <= {"limit"}
    else:
        whole |= {"baseline a": 2, "baseline b": 2}
    assert {name: len(turns) for name, turns in results.turns["mlp"].items()} == whole


def test_another_model_is_not_compared_and_a_job_that_is_needed_ends_all_with_its_code():
    other = Played("baseline", "ab", [], False, parameters=8)
    results = measured(Played("limit", ["limit"], []), other)
    assert list(results.turns["mlp"]) == ["limit"]
    assert results.absent["baseline, mlp"] == "its model has 8 parameters, expected 7"
    with pytest.raises(JobLost, match="it is gone") as lost:
        measured(Played("limit", ["limit"], [], lost_at=2))
    assert lost.value.code == 9


def test_a_turn_is_so_many_steps_and_one_more_by_the_limit_without_a_strategy():
    strategy, setting = AllReduceStrategy(communicator="local"), Setting(batch_size=3, steps=4)
    limit = LocalFit(SMALL, setting, strategy.communicator, "/cpu:0")
    together = distributed_fit(SMALL, setting, strategy, "8bit")
    assert limit.model.distribute_strategy is not strategy
    assert together.model.distribute_strategy is strategy
    assert (limit.name, together.name) == ("limit", "8bit")
    assert repr(strategy.exchange) == "Quantized(bits=8)"
    for mine, its in zip(limit.model.get_weights(), together.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)
    for variant in (limit, together):
        reading = clock(variant.measure)
        assert variant.model.optimizer.iterations.numpy() == 5
        assert len(reading["steps"]) == 4 and 0 < 4 * reading["seconds"] < reading["fit"]
    ticks, measure = [], allreduce(4000, setting, strategy)
    assert measure(lambda: ticks.append(1)) == {"sent": 0.0} and len(ticks) == 5


MILLIONS = {"resnet20": 0.27, "mlp": 10.51, "embedding": 12.8, "transformer": 0.79}


@pytest.mark.parametrize("name", MILLIONS)
def test_models_are_as_large_as_the_table_says_and_read_their_rows(name):
    problem = PROBLEMS[name]
    model = problem.build(keras)
    assert model.count_params() / 1e6 == pytest.approx(MILLIONS[name], abs=0.01)
    x, y = problem.data(3)
    with tf.GradientTape() as tape:
        out = model(x)
    assert out.shape == (3, 10) and y.shape == (3,) and set(y) <= set(range(10))
    np.testing.assert_array_equal(x, problem.data(3)[0])
    if name == "embedding":  # of whose gradient are the rows that it touches
        table = tape.gradient(out, model.trainable_variables[0].value)
        assert isinstance(table, tf.IndexedSlices) and table.values.shape == (24, 64)
