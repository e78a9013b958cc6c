"""exchange="auto" takes what the link needs, on all ranks alike, and keeps to it."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.costs import Costs
from dtk.communicators.local import NullCommunicator
from dtk.exchange import Auto, WarmStart, parse
from dtk.exchange.auto import CANDIDATES, Observed, Overhead, choose, overheads_of

from exchange.exchanged import exchanging, perceptron
from support import bodies, cases

KERNEL = tf.TensorSpec([512, 512])
SIZE = 4 * 512 * 512
SENT = dict(zip(CANDIDATES, (SIZE, SIZE / 2, SIZE / 4, SIZE / 32), strict=True))
NOTHING_TO_CODE = {exchange: Overhead(0.0, sent) for exchange, sent in SENT.items()}
EXACT, HALF, EIGHT_BITS, ONE_BIT = CANDIDATES


def costs(byte, workers=2):
    return Costs(workers, 1e-6, byte, 1e-11)


def choice(step, sending, byte, workers=2, overheads=NOTHING_TO_CODE, **observed):
    seen = Observed(step, sending, **{"sent": SIZE, "gradients": [KERNEL], **observed})
    return choose(seen, overheads, costs(byte, workers))


def test_the_mildest_that_is_nearly_the_fastest_is_chosen():
    # A middling link: half the bytes save 0.05 of a second, a thirtieth would save 0.097.
    assert choice(step=1.0, sending=0.1, byte=0.1 / SIZE).exchange == HALF
    assert choice(step=1.0, sending=0.08, byte=0.08 / SIZE).exchange == EXACT
    # What the backward pass hides cannot be saved, and coding counts.
    assert choice(step=3.1, sending=0.01, byte=3.0 / SIZE).exchange == EXACT
    dear = NOTHING_TO_CODE | {e: Overhead(5.0, SENT[e]) for e in (EIGHT_BITS, ONE_BIT)}
    assert choice(step=3.1, sending=3.0, byte=3.0 / SIZE, overheads=dear).exchange == HALF
    # A measured overhead below that of whole gradients is no error.
    hiccup = NOTHING_TO_CODE | {EXACT: Overhead(9.0, SIZE)}
    told = choice(step=3.1, sending=3.0, byte=3.0 / SIZE, overheads=hiccup)
    assert min(told.predicted.values()) < 0 and told.exchange in CANDIDATES


def test_factors_are_few_bytes_already_and_half_precision_halves_what_is_summed_beside():
    # 16 rows of 1024 numbers; whole gradients would be 16 times as many.
    seen = {"sent": 16 * 1024 * 4, "gradients": [], "factored": [KERNEL]}
    for workers in (2, 8):
        told = choice(0.1, 0.02, 1e-9, workers, **seen)
        assert told.exchange == EXACT
        assert told.predicted[HALF] == pytest.approx(0.1, abs=1e-5)
    seen = {"sent": SIZE + 64_000, "gradients": [KERNEL], "factored": [KERNEL]}
    byte = 1e-6
    told = choice(10.0, 5.0, byte, workers=8, **seen)
    saved = costs(byte, 8).allreduce(SIZE) - costs(byte, 8).allreduce(SIZE / 2)
    assert told.predicted[HALF] == pytest.approx(10.0 - saved, rel=1e-3)


def test_a_slow_link_wants_few_bits_and_says_why():
    """The same if a window of steps is exchanged once."""
    expected = [0.1 + 3.0 * sent / SIZE for sent in SENT.values()]
    window = choice(3.1, 3.0, 12.0 / SIZE, sent=SIZE / 4, window=4)
    told = choice(step=3.1, sending=3.0, byte=3.0 / SIZE)
    for one in (told, window):
        assert one.exchange == ONE_BIT
        assert list(one.predicted.values()) == pytest.approx(expected, abs=1e-4)
    text = str(told)
    for part in ("Quantized(bits=1)", "3100.0 ms", "3000.0", "1.05 MB", "expected:"):
        assert part in text


def test_what_candidates_compute_and_send_is_measured():
    seen = Observed(1.0, 0.5, SIZE, [KERNEL, tf.TensorSpec([512])], [KERNEL])
    overheads = overheads_of(seen, NullCommunicator(0, 2), "CPU:0")
    whole = 2 * SIZE + 4 * 512
    assert overheads[EXACT].sent == whole
    assert overheads[HALF].sent == whole / 2
    assert SIZE / 16 < overheads[ONE_BIT].sent < SIZE / 8
    assert all(overhead.seconds > 0 for overhead in overheads.values())


def test_a_kernel_that_not_every_rank_owns_rows_of_is_measured():
    seen = Observed(1.0, 0.5, SIZE, [tf.TensorSpec([999, 1])], [])
    for rank in range(3):
        overheads = overheads_of(seen, NullCommunicator(rank, 3), "CPU:0")
        assert overheads[EXACT].sent == 4 * 999


def test_its_short_name_and_what_it_does_not_go_with():
    assert parse("auto") == Auto()
    with pytest.raises(ValueError, match="expected another exchange"):
        WarmStart(Auto(), samples=10)


FEWER = pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=["one", "two"])


class SlowBefore(keras.callbacks.Callback):
    """Lets every other rank wait in its collectives, as on a slow link."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.rank:
            time.sleep(0.06)


def fit(byte, epochs, directory=None, value="auto", options=None, window=None):
    """Train where a byte is said to take so many seconds.

    Returns weights, bytes per step of each epoch, and rank 0's words are in its log.
    """
    x, y = cases.rows(128)
    strategy = bodies.strategy()
    communicator, before = strategy.communicator, strategy.communicator.costs
    communicator.costs = Costs(communicator.size, 1e-4, byte, 1e-11)
    slow = SlowBefore()
    slow.rank = strategy.rank
    callbacks = [slow, dtk.callbacks.CommunicationStats()]
    if directory is not None:
        callbacks.append(dtk.callbacks.Checkpoint(directory, resume=True))
    try:
        with exchanging(value):
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=window)
            model = perceptron(strategy, optimizer, **options or {})
            history = model.fit(
                x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks
            ).history
    finally:
        communicator.costs = before
    return bodies.flat(model.get_weights()), np.array(history["comm_bytes"]), history["loss"]


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@pytest.mark.worlds(("collective", 2))
@FEWER
def test_once_enough_was_seen_fewer_bytes_travel(pool, options):
    # Four calls of the train function in an epoch are not enough, where each takes two steps.
    (weights, sent, _), (others, *_) = pool.run(fit, 1e-5, 4, None, "auto", options)
    assert np.array_equal(weights, others)
    assert sent[2] < 0.6 * sent[0] and sent[3] == pytest.approx(sent[2], rel=0.01)
    assert (sent[1] == pytest.approx(sent[0], rel=0.01)) == bool(options)


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@pytest.mark.worlds(("collective", 2))
def test_windows_of_gradients_too(pool):
    (weights, sent, _), (others, *_) = pool.run(fit, 1e-5, 3, None, "auto", {}, 2)
    assert np.array_equal(weights, others) and sent[1] < 0.7 * sent[0]


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@pytest.mark.worlds(("collective", 2))
def test_where_nothing_can_be_saved_it_is_whole_gradients_to_the_bit(pool):
    auto = pool.run(fit, 1e-13, 2)
    plain = pool.run(fit, 1e-13, 2, None, None)
    assert np.array_equal(auto[0][0], plain[0][0])
    assert auto[0][1][1] == pytest.approx(auto[0][1][0], rel=0.01)


@pytest.mark.full("one way of being interrupted of each kind")
@pytest.mark.worlds(("collective", 2))
def test_a_resumed_run_goes_on_with_what_was_chosen(pool, tmp_path):
    (_, sent, _), _ = pool.run(fit, 1e-5, 2, str(tmp_path))
    # Now the link is fast: who measured anew would choose whole gradients.
    resumed = pool.run(fit, 1e-13, 3, str(tmp_path))
    assert resumed[0][1][2] == pytest.approx(sent[1], rel=0.01)
    assert np.array_equal(resumed[0][0], resumed[1][0])
