"""Block updates on parameter servers: one process's numbers at tau=0, the same minimum later.

The reference is a serial block proximal gradient in NumPy, of four lines.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as draw

from dtk.parameter_server import scheduler
from dtk.parameter_server.dispatcher import Result, TaskQueue
from dtk.parameter_server.proximal import soft_threshold
from dtk.strategies import (
    MirroredStrategy,
    block_minimization,
    least_squares_smoothness,
    minimize_blocks,
    rate_bound,
)

from support.bodies import served_with
from support.served_bodies import check_mistake

pytestmark = pytest.mark.command

BLOCKS, L1, STEPS = 5, 6.0, 60
# float64, sums in another order
TOLERANCE = 1e-12
# 24 entries in 5 blocks: the first four have one more
SPANS = [(0, 5), (5, 10), (10, 15), (15, 20), (20, 24)]


def problem(dtype="float64", columns=None):
    """Rows, targets and first weights; a sixth of the true weights is not zero.

    With `columns`, weights are a matrix and targets have so many columns.
    """
    random = np.random.default_rng(4)
    x = random.normal(size=(103, 24)) + 0.3 * random.normal(size=(103, 1))
    true = random.normal(size=(24, columns or 1)) * (random.random((24, 1)) < 1 / 6)
    y = x @ true + 0.1 * random.normal(size=(103, columns or 1))
    start = 0.1 * random.normal(size=(24, columns or 1))
    if columns is None:
        y, start = y[:, 0], start[:, 0]
    return x.astype(dtype), y.astype(dtype), start.astype(dtype)


def squares(weights, x, y):
    """Half the squared error of each row; weights are a vector or a matrix."""
    whole = tf.reshape(weights, (weights.shape[0], -1))
    error = tf.matmul(x, whole) - tf.reshape(y, (-1, whole.shape[1]))
    return tf.reduce_sum(error**2, 1) / 2


def shrink(v, t):
    return np.sign(v) * np.maximum(np.abs(v) - t, 0)


def value(x, y, w, l1):
    return ((x @ w - y) ** 2).sum() / 2 + l1 * np.abs(w).sum()


def serial(x, y, w, order, rate, l1):
    """One process, one block after the other: the weights, and the objective after each step."""
    w, objective = w.copy(), [value(x, y, w, l1)]
    for block in order:
        mine = slice(*SPANS[block])
        gradient = x[:, mine].T @ (x @ w - y)
        w[mine] = shrink(w[mine] - rate[block] * gradient, rate[block] * l1)
        objective.append(value(x, y, w, l1))
    return w, objective


def cyclic(steps):
    return [step % BLOCKS for step in range(steps)]


@functools.cache
def smoothness():
    return least_squares_smoothness(problem()[0], BLOCKS)


@functools.cache
def minimum(l1=L1):
    """The weights at the minimum, and the objective there."""
    weights, objective = serial(*problem(), cyclic(10_000), rate_bound(smoothness(), 0), l1)
    assert objective[-1] == pytest.approx(objective[-1000], rel=1e-14), "not at the minimum yet"
    return weights, objective[-1]


def distance(mine, other):
    return np.linalg.norm(mine - other) / np.linalg.norm(other)


two_workers = pytest.mark.worlds(("served", 2))


# Equal to one process.


def minimize(given, dtype="float64", columns=None):
    """What `minimize_blocks` finds on the problem."""
    strategy = served_with("async")
    x, y, start = problem(dtype, columns)
    return minimize_blocks(
        strategy, squares, start, (x, y), **{"blocks": BLOCKS, "l1": L1, **given}
    )


@pytest.mark.full("a cheaper test holds its rule")
@two_workers
def test_without_delay_it_is_one_process(pool):
    """A part's gradient that is lost, counted twice, late, or of another block would show."""
    (found,) = pool.run(minimize, {"steps": STEPS, "smoothness": smoothness()})
    weights, objective = serial(*problem(), cyclic(STEPS), rate_bound(smoothness(), 0), L1)
    assert distance(found.weights, weights) <= TOLERANCE
    assert sorted(found.objective) == list(range(0, STEPS + 1, BLOCKS))
    for step, mine in found.objective.items():
        assert mine == pytest.approx(objective[step], rel=TOLERANCE)
    assert found.staleness.histogram == {0: STEPS} and found.staleness.lag == 0


@pytest.mark.full("the equations are tested in one process")
@two_workers
def test_a_matrix_of_float32_in_random_order(pool):
    """Cut along another axis, cast, or in an order that the seed does not give, it would differ."""
    x, y, start = problem(columns=3)
    (found,) = pool.run(
        minimize,
        {"steps": STEPS, "rate": rate_bound(smoothness(), 0), "order": "random", "seed": 3},
        "float32",
        3,
    )
    order = np.random.default_rng(3).integers(0, BLOCKS, STEPS)
    weights, _ = serial(x, y, start, order, rate_bound(smoothness(), 0), L1)
    assert found.weights.dtype == np.float32 and found.weights.shape == (24, 3)
    assert distance(found.weights, weights) <= 1e-5


# Late gradients.


@pytest.mark.full("the equations are tested in one process")
@two_workers
def test_late_gradients_reach_the_same_minimum(pool, tau=4):
    """Relative 1e-6 after 500 steps; steps applied twice, never, or later would end elsewhere."""
    (found,) = pool.run(minimize, {"steps": 500, "smoothness": smoothness(), "tau": tau})
    assert found.objective[500] == pytest.approx(minimum()[1], rel=1e-6)
    assert 1 <= found.staleness.max <= tau and found.staleness.lag <= tau
    assert found.staleness.steps == 500


class Late:
    """The algorithm without processes: newest gradients first, each as late as tau allows."""

    def __init__(self, tau, steps):
        self.schedule = scheduler.Schedule(tau, slices=2)
        self.steps = TaskQueue(self.schedule, own_parts=True)
        for _ in range(steps):
            self.steps.add(None)
        # One worker for every piece that may be under way.
        self.idle, self.running = list(range(2 * (tau + 1))), []

    def minimize(self, x, y, w, spans, rate):
        parts = [slice(0, len(x) // 2), slice(len(x) // 2, None)]
        while self.schedule.unfinished:
            while self.idle and (task := self.steps.take(self.idle[-1])):
                rows, mine = parts[task.part], slice(*spans[task.piece.step % len(spans)])
                gradient = x[rows, mine].T @ (x[rows] @ w - y[rows])
                self.running.append((task, self.idle.pop(), gradient))
            task, worker, gradient = self.running.pop()
            self.steps.finished(task, worker, Result(gradient))
            self.idle.append(worker)
            if found := self.steps.next_complete():
                block = found.number % len(spans)
                w[slice(*spans[block])] -= rate[block] * sum(r.outputs for r in found.in_order())
                self.schedule.applied(found.number)
        return value(x, y, w, 0)


@pytest.mark.parametrize("tau", [1, 3])
def test_the_bound_on_the_rate_is_neither_too_high_nor_idle(tau):
    """Blocks that are nearly the same feature are the worst case: 2 + 2 tau times it diverges."""
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 1)) + 0.01 * random.normal(size=(40, 4))
    y, spans = x @ np.ones(4), [(0, 1), (1, 2), (2, 3), (3, 4)]
    start = value(x, y, np.zeros(4), 0)
    rate = rate_bound(least_squares_smoothness(x, 4), tau)
    assert Late(tau, 400).minimize(x, y, np.zeros(4), spans, rate) < 1e-3 * start
    too_high = (2 + 2 * tau) * rate
    assert not Late(tau, 400).minimize(x, y, np.zeros(4), spans, too_high) < 10 * start


# Sparse weights, little traffic.


@pytest.mark.full("a cheaper test holds its rule")
@two_workers
def test_the_norm_gives_exact_zeros(pool):
    """Applied as a subgradient, or to another block, it would leave tiny numbers instead."""
    (found,) = pool.run(minimize, {"steps": 150, "smoothness": smoothness(), "record_every": 50})
    weights, _ = minimum()
    np.testing.assert_array_equal(found.weights != 0, weights != 0)
    assert np.count_nonzero(weights) == 8
    np.testing.assert_allclose(found.weights, weights, atol=1e-6)


@two_workers
def test_a_step_moves_one_block_and_no_rows(pool):
    """Whole gradients, whole weights, or rows sent again in each step would be many times that."""
    x, y, start = problem()
    (found,) = pool.run(
        minimize,
        {"steps": 120, "smoothness": least_squares_smoothness(x, 6), "blocks": 6},
    )
    whole, rows = start.nbytes, x.nbytes + y.nbytes
    assert sum(worker["steps"] for worker in found.traffic) == 240
    for worker in found.traffic:
        assert worker["pushed"] == worker["steps"] * whole / 6
        # all of it at first, then in each step the block of the step before
        assert worker["pulled"] <= whole + 120 * whole / 6
        assert rows / 2 - x[0].nbytes <= worker["copied"] <= rows


# Which part a worker gets.


@settings(max_examples=30)
@given(draw.data())
def test_every_part_of_a_step_is_computed_once(data):
    """A part that two slices share, or that a lost slice leaves, would be missing or double."""
    tau, parts = data.draw(draw.integers(0, 3)), data.draw(draw.integers(1, 4))
    schedule = scheduler.Schedule(tau, slices=parts)
    steps = TaskQueue(schedule, own_parts=True)
    for _ in range(5):
        steps.add(None)
    running, losses = {}, 3
    while schedule.unfinished:
        worker = data.draw(draw.integers(0, parts))
        if worker not in running:
            if task := steps.take(worker):
                running[worker] = task
            elif not running:
                raise AssertionError("nobody works, and nobody may")
            continue
        task = running.pop(worker)
        if losses and data.draw(draw.booleans()):
            losses -= 1
            steps.lost(task, worker)
        else:
            steps.finished(task, worker, Result((task.piece.step, task.part)))
        while found := steps.next_complete():
            step, results = found.number, [result.outputs for result in found.in_order()]
            assert results == [(step, part) for part in range(parts)]
            schedule.applied(step)
    assert schedule.statistics.max <= tau


def test_a_worker_computes_its_own_part():
    """Handed out in turn, every part's rows would end on every worker."""
    schedule = scheduler.Schedule(0, slices=2)
    steps = TaskQueue(schedule, own_parts=True)
    for _ in range(4):
        steps.add(None)
    for first in (1, 0, 1, 1):
        tasks = {worker: steps.take(worker) for worker in (first, 1 - first)}
        assert {worker: task.part for worker, task in tasks.items()} == {0: 0, 1: 1}
        for worker, task in tasks.items():
            steps.finished(task, worker, Result(worker))
        schedule.applied(steps.next_complete().number)


# The proximal operator.

# TensorFlow takes subnormal numbers for zero.
numbers = draw.floats(-1e6, 1e6, allow_subnormal=False)
thresholds = draw.floats(0, 1e6, allow_subnormal=False)


@given(numbers, thresholds)
def test_soft_threshold_shrinks_by_as_much_and_to_nothing(v, t):
    """A wrong sign, or a threshold of the wrong side, is no proximal operator."""
    x = float(soft_threshold(np.float64(v), t))
    assert x == shrink(v, t)
    assert (x == 0) == (abs(v) <= t)
    assert float(soft_threshold(np.float64(-v), t)) == -x


# Mistakes.


def _with_loss(loss):
    x, y, start = problem()
    minimize_blocks(served_with("sync"), loss, start, (x, y), blocks=2, steps=2, rate=0.1)


def _in_scope():
    with served_with("sync").scope():
        minimize({"steps": 2, "rate": 0.1})


def _in_rows():
    x, y, start = problem()
    x[50, 3] = np.nan
    minimize_blocks(served_with("sync"), squares, start, (x, y), blocks=2, steps=2, rate=0.1)


MISTAKES = {
    "a mean": (
        lambda: _with_loss(lambda w, x, y: tf.reduce_mean(squares(w, x, y))),
        *(ValueError, "returned shape ()", "one number per row"),
    ),
    "another axis": (
        lambda: _with_loss(lambda w, x, y: tf.reduce_sum(x, 0) * w),
        *(ValueError, "returned 24 numbers for 52 rows", "one number per row"),
    ),
    "no gradient": (
        lambda: _with_loss(lambda w, x, y: y),
        *(ValueError, "no gradient with respect to the weights"),
    ),
    "in the scope": (_in_scope, ValueError, "inside strategy.scope()", "outside"),
    "rate too high": (
        lambda: minimize({"steps": 300, "rate": 1.0}),
        *(FloatingPointError, "steps at rates up to 1", "smaller"),
    ),
    "rows not finite": (_in_rows, FloatingPointError, "nan at the weights given", "data"),
}


@pytest.mark.full_for("served-2-rate too high")
@two_workers
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_loss_and_the_numbers(pool, name):
    check_mistake(pool, __name__, name)


@pytest.mark.parametrize(
    "given, parts",
    [
        ({"weights": np.zeros(4, int)}, ["int64", "float32 or float64"]),
        ({"weights": 0.0}, ["shape ()", "at least one axis"]),
        ({"blocks": 0}, ["blocks=0", "expected 1 to 4"]),
        ({"blocks": 5}, ["blocks=5", "4 entries", "expected 1 to 4"]),
        ({"tau": -1}, ["tau=-1", "0 or more"]),
        ({"tau": 0.5}, ["tau=0.5"]),
        ({"steps": 0}, ["steps=0", "1 or more"]),
        ({"record_every": 0}, ["record_every=0", "1 or more"]),
        ({"l1": -1.0}, ["l1=-1.0", "0 or more"]),
        ({"l1": np.nan}, ["l1=nan"]),
        ({"rate": None}, ["rate=None", "least_squares_smoothness(x, blocks=2)"]),
        ({"rate": 0}, ["rate=[0.0, 0.0]", "above 0"]),
        ({"rate": [1, 2, 3]}, ["rate of shape (3,)", "2 blocks"]),
        ({"rate": 0.3, "smoothness": 2.0, "tau": 1}, ["rate=0.3", "above 0.25", "tau=1"]),
        ({"smoothness": 0}, ["smoothness=0.0", "above 0"]),
        ({"order": "reversed"}, ["order='reversed'", '"cyclic"']),
        ({"order": [0, 2]}, ["step 1 is block 2", "expected 0 to 1"]),
        ({"order": lambda step: -step}, ["step 1 is block -1"]),
        ({"order": []}, ["order=[]", "at least one block"]),
        ({"data": ()}, ["shapes none", "arrays of rows"]),
        ({"data": (np.zeros((3, 4)), np.zeros(2))}, ["(3, 4), (2,)", "same number of rows"]),
        ({"data": np.zeros((0, 4))}, ["(0, 4)", "at least one"]),
    ],
)
def test_arguments_that_cannot_be(monkeypatch, given, parts):
    """Each is refused before anything is placed on a server."""
    monkeypatch.setattr(block_minimization, "_check_strategy", lambda strategy: None)
    good = {"weights": np.zeros(4), "data": np.zeros((3, 4)), "blocks": 2, "steps": 2, "rate": 0.1}
    with pytest.raises(ValueError) as caught:
        minimize_blocks(None, None, **{**good, **given})
    for part in parts:
        assert part in str(caught.value)


def test_a_strategy_without_servers():
    with pytest.raises(ValueError, match="MirroredStrategy; .*ParameterServerStrategy"):
        minimize_blocks(MirroredStrategy(), None, np.zeros(2), np.zeros(2), blocks=1, steps=1)


def test_rows_and_entries_of_the_smoothness():
    with pytest.raises(ValueError, match="shape .3,.; expected .rows, entries."):
        least_squares_smoothness(np.zeros(3))
    with pytest.raises(ValueError, match="blocks=3 for weights of 2 entries"):
        least_squares_smoothness(np.zeros((4, 2)), 3)
