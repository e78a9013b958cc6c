"""exchange="auto" takes what the link needs, on all ranks alike, and keeps to it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.costs import Costs
from dtk.communicators.null import NullCommunicator
from dtk.exchange import Auto, Dense, Quantized, parse
from dtk.exchange.auto import CANDIDATES, Observed, choose
from exchange import chosen

KERNELS = [tf.TensorSpec([512, 512]), tf.TensorSpec([512])]
SIZE = 4 * (512 * 512 + 512)


def choice(step, sending, byte, workers=4):
    observed = Observed(step, sending, SIZE, KERNELS)
    return choose(observed, NullCommunicator(0, workers), Costs(workers, 1e-4, byte, 1e-11))


def test_a_slow_link_wants_few_bits():
    told = choice(step=3.1, sending=3.0, byte=2e-6)
    assert told.exchange == Quantized(1)
    seconds = list(told.predicted.values())
    assert seconds == sorted(seconds, reverse=True)
    assert list(told.predicted) == list(CANDIDATES)


def test_a_middling_link_wants_what_changes_least_and_is_nearly_as_fast():
    # Half the bytes save 0.45 of 10 seconds, a thirtieth would save 0.9 of them.
    assert choice(step=10.0, sending=0.9, byte=6e-7).exchange == Dense()
    assert choice(step=1.0, sending=0.2, byte=0.9e-7).exchange == Dense("float16")


def test_a_fast_link_wants_nothing():
    assert choice(step=0.1, sending=0.05, byte=1e-12).exchange == Dense()


def test_what_the_backward_pass_hides_cannot_be_saved():
    assert choice(step=3.1, sending=0.01, byte=2e-6).exchange == Dense()


def test_factors_are_few_bytes_already():
    sent = 16 * (512 + 512) * 4
    costs = Costs(2, 1e-4, 1e-7, 1e-11)
    told = choose(Observed(0.1, 0.02, sent, KERNELS, factors=True), NullCommunicator(0, 2), costs)
    assert told.exchange == Dense()


def test_the_choice_is_told_with_its_reason():
    text = str(choice(step=3.1, sending=3.0, byte=2e-6))
    for part in ("Quantized(bits=1)", "3100.0 ms", "3000.0", "1.05 MB", "expected:"):
        assert part in text


def test_its_short_name():
    assert parse("auto") == Auto()


@pytest.mark.worlds(("collective", 2))
def test_from_the_second_epoch_on_half_the_bytes_travel(pool):
    (weights, sent, _), (others, *_) = pool.run(chosen.fit, 1e-5, 3)
    assert np.array_equal(weights, others)
    assert sent[1] < 0.6 * sent[0] and sent[2] == pytest.approx(sent[1], rel=0.01)


@pytest.mark.worlds(("collective", 2))
def test_where_nothing_can_be_saved_it_is_whole_gradients_to_the_bit(pool):
    auto = pool.run(chosen.fit, 1e-13, 2)
    plain = pool.run(chosen.fit, 1e-13, 2, None, None)
    assert np.array_equal(auto[0][0], plain[0][0])
    assert auto[0][1][1] == pytest.approx(auto[0][1][0], rel=0.01)


@pytest.mark.worlds(("collective", 2))
def test_a_resumed_run_goes_on_with_what_was_chosen(pool, tmp_path):
    through = pool.run(chosen.fit, 1e-5, 3)
    pool.run(chosen.fit, 1e-5, 2, str(tmp_path))
    # Now the link is fast: who measured anew would choose whole gradients.
    resumed = pool.run(chosen.fit, 1e-13, 3, str(tmp_path))
    assert resumed[0][1][2] == pytest.approx(through[0][1][2], rel=0.01)
    assert np.array_equal(resumed[0][0], through[0][0])
