"""Loops of a script's own: the lines that a refusal prints, and jobs of one process."""

from __future__ import annotations

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.errors import NotDistributedError

from strategies.test_mistakes import looped
from support import bodies, cases
from support.once import once


def by_the_printed_lines(strategy):
    """A loop that is refused, then run by what the refusal prints; weights after three steps."""
    x, y = cases.rows(24)
    with strategy.scope():
        model = cases.small()
        optimizer = keras.optimizers.Adam(0.01)

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images), from_logits=True
            )
            loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train_set = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    try:
        for images, labels in train_set:
            train_step(images, labels)
    except NotDistributedError as error:
        printed = str(error).split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
        names = {"tf": tf, "strategy": strategy, "train_set": train_set, "train_step": train_step}
        exec(textwrap.dedent(printed), names)
    return bodies.flat(model.get_weights())


def by_the_printed_lines_in_a_job():
    return by_the_printed_lines(bodies.strategy())


def by_hand_in_one_process():
    return by_the_printed_lines(tf.distribute.get_strategy())


@pytest.mark.worlds(("collective", 2))
def test_the_printed_lines_train_as_one_process(pool):
    plain = once(by_hand_in_one_process)
    for weights in pool.run(by_the_printed_lines_in_a_job):
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)


def alone():
    """A loop without `strategy.run` in a job of one: its optimizer made outside, and inside."""
    strategy = bodies.strategy()
    first = bodies.flat(looped(strategy))
    return first, bodies.flat(looped(strategy, in_scope=True))


@pytest.mark.worlds(("local", 1))
def test_one_process_may_leave_strategy_run_out(pool):
    [(outside, inside)] = pool.run(alone)
    np.testing.assert_array_equal(outside, inside)


def between_devices():
    strategy = bodies.strategy(2)
    try:
        looped(strategy, in_scope=True)
    except NotDistributedError as error:
        return str(error)
    return "nothing"


@pytest.mark.worlds(("local", 1))
def test_devices_of_one_process_are_told_of_strategy_run(pool):
    [text] = pool.run(between_devices)
    assert "with 2 replicas" in text
    assert "strategy.run(train_step, args=batch)" in text


def test_a_strategy_of_one_process_refuses_no_optimizer():
    dtk.strategies.AllReduceStrategy("local")
    weight = keras.Variable([1.0])
    keras.optimizers.SGD(0.5).apply([tf.constant([1.0])], [weight])
    np.testing.assert_array_equal(weight, [0.5])
