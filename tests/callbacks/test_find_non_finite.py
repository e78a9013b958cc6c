"""The first NaN is told by its step, its variables and the rank whose rows made it."""

from __future__ import annotations

import contextlib
import io
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
import dtk.exchange
from dtk.errors import NonFiniteError
from dtk.parameter_server.train_jobs import TrainOutputs, non_finite

from callbacks.bodies import BATCH, strategy
from support.bodies import served_with


def rows(bad_row=None, count=40):
    x = np.random.default_rng(0).normal(size=(count, 6)).astype("float32")
    if bad_row is not None:
        x[bad_row] = np.nan
    return x, x[:, :1]


def model_of(kind, optimizer="sgd", dtype=None, **options):
    with strategy(kind).scope():
        layers = [keras.layers.Dense(4, name="first", dtype=dtype)]
        layers += [keras.layers.Dense(1, name="second", dtype=dtype)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def trained(data, kind="world", action="raise", **given):
    """Train; returns what was raised and said."""
    model = model_of(kind, **given)
    raised = None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            found = dtk.callbacks.FindNonFinite(action)
            how = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
            model.fit(*data, callbacks=[found], **how)
        except NonFiniteError as error:
            raised = str(error)
    return raised, said.getvalue()


def in_rows_of(rank, kind="world"):
    """A NaN in step 3: in its first row, rank 0's, or in its last, the last rank's."""
    return trained(rows(2 * BATCH + (0 if rank == 0 else BATCH - 1)), kind)


@pytest.mark.full_but("collective-2-0")
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_whose_rows_hold_it_is_named_once(pool, rank):
    if rank == 0:
        (raised, said), (_, silent) = pool.run(going_on)
        assert raised is None and silent == ""
        assert said.count("FindNonFinite: epoch 1, step 3:") == said.count("\n") == 1
    for raised, _ in pool.run(in_rows_of, rank):
        assert raised.startswith("epoch 1, step 3: the loss is nan; ")
        assert "first/bias, " in raised and " and 1 more hold NaN or infinite numbers; " in raised
        assert f"came from rank {rank}, in step 3 of the optimizer, for " in raised


def elsewhere(how):
    """The same in a step that XLA compiles, and where ranks take steps of their own."""
    if how == "compiled":
        return trained(rows(3 * BATCH - 1), jit_compile=True)
    try:
        strategy().exchange = dtk.exchange.ModelAveraging(period=2 * BATCH)
        return trained(rows(3 * BATCH - 1))
    finally:
        strategy().exchange = None


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("how, step", [("compiled", 3), ("local steps", 5)])
def test_other_steps_name_the_rank_as_well(pool, how, step):
    for raised, _ in pool.run(elsewhere, how):
        assert raised.startswith(f"epoch 1, step {step}: the loss is nan; ")
        assert "came from rank 1, in step 3 of the optimizer, for " in raised


@pytest.mark.parametrize("replica", [0, 1])
def test_the_replica_of_one_process_is_named(alone, replica):
    ((raised, _),) = alone.run(in_rows_of, replica, "mirrored")
    assert "epoch 1, step 3: the loss is nan" in raised
    assert "came from rank 0" + (" (replica 1)" if replica else ", in step 3") in raised


def exploding(accumulation=None):
    """Gradients of the second layer alone are infinite, of rank 1's rows alone; the loss is not."""

    @tf.custom_gradient
    def passed(x):
        return x, lambda g: tf.where(tf.reduce_any(x > 50.0), np.inf * tf.ones_like(g), g)

    class Marked(keras.layers.Layer):
        def call(self, x):
            return passed(x)

    with strategy().scope():
        inputs = keras.Input((6,))
        # What flows back through the marked layer reaches "below" alone.
        below = Marked()(keras.layers.Dense(2, name="below", kernel_initializer="ones")(inputs))
        beside = keras.layers.Dense(2, name="beside")(inputs)
        model = keras.Model(inputs, keras.layers.Concatenate()([below * 1e-3, beside]))
        rate = keras.optimizers.SGD(1e-3, gradient_accumulation_steps=accumulation)
        model.compile(optimizer=rate, loss="mse")
    x = rows()[0]
    x[2 * BATCH - 1] = 10.0  # the last row of step 2
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with pytest.raises(NonFiniteError) as raised:
        model.fit(x, np.zeros((40, 4)), callbacks=[dtk.callbacks.FindNonFinite()], **how)
    return str(raised.value)


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("accumulation, step", [(None, 2), (2, 1)])
def test_a_gradient_is_told_by_its_variables_one_step_before_the_loss(pool, accumulation, step):
    for raised in pool.run(exploding, accumulation):
        assert raised.startswith("epoch 1, step 3: the loss is ")
        assert raised.endswith(
            f"rank 1, in step {step} of the optimizer, for below/kernel, below/bias"
        )


def overflowing(bad_row):
    """Gradients overflow for some steps until the scale fits; rows may hold a NaN after that."""
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**18)
    found = trained(rows(bad_row, count=20 * BATCH), optimizer=scaled, dtype="mixed_float16")
    assert float(scaled.dynamic_scale.numpy()) < 2.0**18, "no gradient has overflown"
    return found


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
def test_gradients_that_overflow_by_their_scale_are_no_error(pool):
    assert pool.run(overflowing, None) == [(None, "")] * 2
    for raised, _ in pool.run(overflowing, 19 * BATCH - 1):
        assert raised.startswith("epoch 1, step 19: the loss is nan; the first gradients")
        assert "came from rank 1, in step" in raised


def going_on():
    return trained(rows(2 * BATCH), action="say")


def left_alone():
    """Without the callback again, the step is as it was; with finite rows nothing is said."""
    model, (x, y) = model_of("world"), rows()
    found = dtk.callbacks.FindNonFinite()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[found])
    x[:] = np.nan
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with pytest.raises(NonFiniteError):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[found])
    return said.getvalue()


@pytest.mark.full_but("local-1")
@pytest.mark.worlds(("collective", 2), ("local", 1))
def test_it_ends_with_its_fit_and_begins_again(pool):
    assert set(pool.run(left_alone)) == {""}


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("served", 2))
def test_behind_servers_the_epoch_and_the_worker_are_told(pool):
    ((raised, _),) = pool.run(served)
    assert raised.startswith("epoch 1, step 5: the loss is nan; ") and "/kernel" in raised
    # Either worker may have computed the second slice.
    assert re.search(r"not finite came from worker [01], in step 3 of this training$", raised)


def test_the_worker_is_the_one_that_has_counted_what_is_not_finite():
    def counted(worker, *metrics):
        report = {"metrics": [np.array(one) for one in metrics]}
        return TrainOutputs(report, 0.5, None, worker)

    good = [counted(0, 1.0, 4), counted(1, [2.0, 3.0], 4)]
    assert non_finite(good, 7) is None
    assert non_finite([*good, counted(2, np.nan, 4)], 7) == (7, (2,))
    assert non_finite([counted(3, np.inf), counted(1, 1.0, [0.0, np.nan])], 1) == (1, (1, 3))


def served():
    chosen = served_with("sync")
    with chosen.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="first")])
        model.compile(optimizer="sgd", loss="mse")
    x, y = rows(3 * BATCH - 1)  # in step 3, of the second slice
    found = dtk.callbacks.FindNonFinite()
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[found])
    return str(caught.value), ""
