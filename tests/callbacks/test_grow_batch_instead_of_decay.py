"""A batch that grows instead of the rate falling: the noise, rate / batch, is the schedule's."""

from __future__ import annotations

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtk
from dtk.callbacks import GrowBatchInsteadOfDecay
from dtk.callbacks.grow_batch_instead_of_decay import grow, rates_of

from callbacks.batch_size_bodies import BATCH, train
from callbacks.bodies import (
    difference,
    fails,
    strategy,
)

two_ranks = pytest.mark.worlds(("collective", 2))
rates = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=20)


@pytest.mark.parametrize(
    "given, largest, plan",
    [
        ([1.0, 0.2, 0.04], None, [(128, 1.0), (640, 1.0), (3200, 1.0)]),  # a = 5, as in the paper
        ([1.0, 0.2, 0.04], 640, [(128, 1.0), (640, 1.0), (640, 0.2)]),
        ([0.5, 1.0, 0.5, 1.0], None, [(128, 0.5), (128, 1.0), (256, 1.0), (128, 1.0)]),
    ],
)
def test_plans(given, largest, plan):
    assert grow(given, 128, largest) == [(size, pytest.approx(rate)) for size, rate in plan]


@given(rates, st.integers(1, 4096), st.none() | st.integers(0, 4096))
def test_noise_is_that_of_the_schedule(schedule, batch_size, more):
    largest = None if more is None else batch_size + more
    for (size, rate), wanted in zip(grow(schedule, batch_size, largest), schedule, strict=True):
        assert rate / size == pytest.approx(wanted / batch_size)
        assert batch_size <= size <= (largest or size)


@given(rates, st.integers(1, 4096))
def test_without_a_limit_only_rounding_reaches_the_rate(schedule, batch_size):
    for epoch, (_, rate) in enumerate(grow(schedule, batch_size)):
        half_a_row = 0.51 * schedule[epoch] / batch_size
        assert rate == pytest.approx(max(schedule[: epoch + 1]), abs=half_a_row)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1e-6, 10.0)), min_size=1, max_size=5))
def test_a_function_is_as_good_as_a_list(pairs):
    flat = [rate for count, rate in pairs for _ in range(count)]
    assert rates_of(pairs, len(flat)) == rates_of(flat.__getitem__, len(flat)) == flat
    assert rates_of(pairs, len(flat) + 2) == [*flat, flat[-1], flat[-1]]


@pytest.mark.parametrize(
    "schedule", [[], 0.1, "0.1", [0.0], [-1.0], [True], [None], [(0, 0.1)], [float("nan")]]
)
def test_malformed_schedules_are_refused(schedule):
    with pytest.raises(ValueError, match="learning rate schedule"):
        GrowBatchInsteadOfDecay(schedule)


def test_arguments():
    with pytest.raises(ValueError, match="max_batch_size must be at least 1"):
        GrowBatchInsteadOfDecay([0.1], max_batch_size=0)


def grown(max_batch_size=None, form="arrays", kind="world"):
    strategy(kind)  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    growing = dtk.callbacks.GrowBatchInsteadOfDecay(
        [0.1, 0.05, 0.025, 0.0125], max_batch_size, batch_size=given
    )
    return train([growing], keras.optimizers.SGD(1.0, momentum=0.9), form=form, kind=kind)


# 96 rows at 8, 16, 32, 64, or no more than 32.
@two_ranks
def test_two_ranks_train_as_one_process(pool, alone):
    first, second = pool.run(grown, 32, "dataset")
    steps, seen, weights, _ = first
    assert steps == [12, 6, 3, 3]
    assert seen == pytest.approx([0.1, 0.1, 0.1, 0.05])
    assert second[:2] == first[:2]
    [(_, _, whole, _)] = alone.run(grown, 32, "dataset")
    assert difference(weights, whole) <= 1e-5


def test_one_process_has_no_limit_but_its_rows(alone):
    [(steps, seen, _, _)] = alone.run(grown)
    assert steps == [12, 6, 3, 2]
    assert seen == pytest.approx([0.1] * 4)


def growing_refused():
    strategy()  # before the optimizer: TensorFlow's collectives come first
    grow = dtk.callbacks.GrowBatchInsteadOfDecay
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    beside = [grow([0.1]), dtk.callbacks.BatchSizeSchedule([8])]
    scaled = [grow([0.1]), dtk.callbacks.LearningRateScaling()]
    return [
        fails(train, [grow([0.1], max_batch_size=4)], "sgd"),
        fails(train, [grow([0.1])], "sgd", form="dataset"),
        fails(train, [grow([0.1])], keras.optimizers.SGD(decay)),
        fails(train, beside, "sgd"),
        fails(train, scaled, "sgd"),
        fails(train, [grow(lambda epoch: 0.1 - 0.1 * epoch)], "sgd"),
    ]


@two_ranks
def test_what_cannot_work_is_refused_before_the_first_step(pool):
    for answers in pool.run(growing_refused):
        assert [kind for kind, _ in answers] == ["ValueError"] * len(answers)
        for (_, text), told in zip(
            answers,
            [
                "max_batch_size=4 is smaller than the batch to begin with, 8",
                "give batch_size=",
                "computes its own",
                "GrowBatchInsteadOfDecay and BatchSizeSchedule would set the same batch size",
                "GrowBatchInsteadOfDecay and LearningRateScaling would set the same learning rate",
                "the learning rate of epoch 1 must be above 0",
            ],
            strict=True,
        ):
            assert told in text
