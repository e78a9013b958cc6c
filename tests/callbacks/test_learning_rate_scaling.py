"""The rate rises as Goyal et al. say, once, and momentum follows it."""

from __future__ import annotations

import numpy as np
import pytest

from callbacks import bodies

two_ranks = pytest.mark.worlds(("collective", 2))

WARM_UP = [0.1 * (1 + 3 * min(1, step / 6)) for step in range(12)]


@two_ranks
@pytest.mark.parametrize("corrected", [True, False])
def test_warm_up_equals_the_paper_written_out(pool, corrected):
    for rates, difference in pool.run(bodies.warming, "world", False, corrected):
        np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
        assert difference <= 1e-5


def test_warm_up_under_mirrored(alone):
    [(rates, difference)] = alone.run(bodies.warming, "mirrored")
    np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
    assert difference <= 1e-5


@two_ranks
def test_a_schedule_is_multiplied(pool):
    scheduled = [rate / (1 if step < 4 else 2) for step, rate in enumerate(WARM_UP)]
    for rates, _ in pool.run(bodies.warming, "world", True):
        # Read after the step, when the schedule's own count has gone on by one.
        np.testing.assert_allclose(rates[:3] + rates[5:], scheduled[:3] + scheduled[5:], rtol=1e-5)


@two_ranks
def test_scaled_once_whatever_happens(pool, tmp_path):
    first, second = pool.run(bodies.scaled_once, str(tmp_path), timeout=90)
    assert first[0] == second[0] == [0.2, 0.2, 0.2, 0.2, 0.2, 0.03]
    lines = [line for line in first[1].splitlines() if line.startswith("LearningRateScaling")]
    line = "LearningRateScaling: 2 workers, global batch 8 (4 per worker), learning rate 0.1 -> 0.2"
    assert lines == [line, line], "once for each optimizer"
    assert second[1] == "", "rank 0 alone prints"


@two_ranks
def test_a_rate_that_is_a_function_is_refused(pool):
    for kind, text in pool.run(bodies.rate_function_refused):
        assert kind == "ValueError"
        assert "give it a number or a LearningRateSchedule" in text


@pytest.mark.parametrize(
    "rule, workers, factor", [("linear", 4, 4.0), ("sqrt", 4, 2.0), (0.5, 4, 0.5), ("sqrt", 1, 1.0)]
)
def test_what_a_rule_makes_of_a_number_of_workers(rule, workers, factor):
    from dtk.callbacks.learning_rate_scaling import factor_for

    assert factor_for(rule, workers) == factor


def test_a_warm_up_ends_at_the_whole_factor():
    """Breaks as a rate that goes on rising where warm-up ends in the middle of an epoch."""
    from dtk.callbacks.learning_rate_scaling import warm_up

    assert [warm_up(4.0, progress) for progress in (0.0, 0.5, 1.0, 1.5)] == [1.0, 2.5, 4.0, 4.0]


@pytest.mark.parametrize("arguments", [{"rule": "cubic"}, {"rule": 0}, {"warmup_epochs": -1}])
def test_arguments(arguments):
    from dtk.callbacks import LearningRateScaling

    with pytest.raises(ValueError, match="must be"):
        LearningRateScaling(**arguments)


def test_the_scaled_schedule_survives_saving():
    import keras

    from dtk.callbacks.hyperparameters.rate import ScaledSchedule

    inner = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    schedule = ScaledSchedule(inner, 3.0)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert float(again(10)) == pytest.approx(0.15)


@pytest.mark.parametrize("name, buffers", [("LARS", 1), ("LAMB", 0), ("RMSpropWarmup", 0)])
def test_which_of_dtks_optimizers_have_the_rate_in_their_momentum(name, buffers):
    import keras

    import dtk
    from dtk.callbacks.hyperparameters.rate import momentum_buffers

    more = {"steps_per_epoch": 10} if name == "RMSpropWarmup" else {}
    optimizer = getattr(dtk.optimizers, name)(learning_rate=0.1, **more)
    optimizer.build([keras.Variable([[1.0]])])
    assert len(momentum_buffers(optimizer)) == buffers
