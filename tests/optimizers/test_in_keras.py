"""They are Keras optimizers like others: options, sparse gradients, configs, saved models."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.optimizers import LAMB, LARS, RMSpropWarmup
from dtk.schedules import LearningRateWarmup

from optimizers import problem

MADE = {
    "lars": lambda **more: LARS(**{"learning_rate": 5.0, **more}),
    "lamb": lambda **more: LAMB(**{"learning_rate": 0.1, **more}),
    "rmsprop warmup": lambda **more: RMSpropWarmup(
        **{"learning_rate": 0.1, "steps_per_epoch": 10, **more}
    ),
}
# Their own arguments, none at its default.
OWN = {
    "lars": {"momentum": 0.8, "trust_coefficient": 0.01, "exclude": ["head"]},
    "lamb": {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3, "exclude": ["head"]},
    "rmsprop warmup": {
        "steps_per_epoch": 7, "center": 0.5, "period": 2.0, "rmsprop_rate": 1e-3,
        "momentum": 0.8, "rho": 0.9, "epsilon": 1e-2,
    },
}  # fmt: skip
each = pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))


def scaled(factor):
    return [{name: g * np.float32(factor) for name, g in s.items()} for s in problem.gradients()]


@pytest.mark.parametrize("make", [MADE["lars"], MADE["lamb"]], ids=["lars", "lamb"])
def test_accumulation_steps_once_with_the_mean(make):
    steps = problem.gradients()
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    means = [{name: (one[name] + other[name]) / 2 for name in one} for one, other in pairs]
    got = problem.taken(make(gradient_accumulation_steps=2), steps)
    problem.check(got, problem.taken(make(), means))


@each
def test_loss_scales_are_divided_out(make):
    plain = problem.taken(make())
    problem.check(problem.taken(make(loss_scale_factor=8.0), scaled(8.0)), plain)
    outer = keras.optimizers.LossScaleOptimizer(make(), initial_scale=16.0)
    problem.check(problem.taken(outer, scaled(16.0)), plain)


@each
def test_gradients_are_clipped_first(make):
    clipped = [
        {name: g * min(1.0, 0.5 / max(problem.length(g), 1e-9)) for name, g in step.items()}
        for step in problem.gradients()
    ]
    clipped = [{name: g.astype("float32") for name, g in step.items()} for step in clipped]
    problem.check(problem.taken(make(clipnorm=0.5)), problem.taken(make(), clipped))


@pytest.mark.full_for("lamb")
@each
def test_moving_averages(make):
    averages, steps = problem.weights(), problem.gradients()[:4]
    for count in range(1, len(steps) + 1):
        now = problem.taken(make(), steps[:count])
        keep = 0.7 if count > 1 else 0.0  # Keras begins with the first step's weights
        averages = {name: keep * averages[name] + (1 - keep) * now[name] for name in now}
    optimizer, trained = make(use_ema=True, ema_momentum=0.7), problem.variables()
    for step in steps:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in step.values()], trained)
    optimizer.finalize_variable_values(trained)
    problem.check({v.name: v.numpy() for v in trained}, averages)


@each
def test_a_sparse_gradient_is_the_dense_one(make):
    """Rows named twice are summed before anything is squared; rows not named decay as well."""
    decay = {"weight_decay": 0.1}
    table = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    rows, indices = np.arange(12, dtype="float32").reshape(4, 3), [1, 4, 1, 0]
    whole = np.zeros_like(table)
    np.add.at(whole, indices, rows)
    results = []
    for gradient in (tf.IndexedSlices(tf.constant(rows), tf.constant(indices)), whole):
        variable, optimizer = keras.Variable(table, name="table"), make(**decay)
        for _ in range(3):
            optimizer.apply([gradient], [variable])
        results.append(variable.numpy())
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


@each
def test_half_precision_weights(make):
    """Their squares overflow float16 in a norm."""
    variable = keras.Variable(np.full((40, 40), 100.0), dtype="float16")
    before = variable.numpy()
    make().apply([keras.ops.full((40, 40), 60.0, "float16")], [variable])
    moved = before - variable.numpy()
    assert np.all(np.isfinite(moved)) and np.all(moved > 0)


@pytest.mark.parametrize("name", MADE)
def test_configs_come_back(name):
    rates = LearningRateWarmup(keras.optimizers.schedules.ExponentialDecay(0.4, 10, 0.5), 4)
    optimizer = MADE[name](learning_rate=rates, weight_decay=0.1, clipnorm=2.0, **OWN[name])
    assert OWN[name].items() <= optimizer.get_config().items()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    problem.check(problem.taken(again), problem.taken(optimizer))


@pytest.mark.full_but("lars")
@each
def test_a_saved_model_trains_on_as_if_it_had_not_been(make, tmp_path):
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 4)]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
    decay = keras.optimizers.schedules.PolynomialDecay(0.5, 20, 0.0, 2.0)
    model.compile(make(learning_rate=LearningRateWarmup(decay, 4, 0.1)), "mse")
    random = np.random.default_rng(0)
    x, y = random.integers(0, 20, (16, 6)), random.normal(size=(16, 1))
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert float(again.optimizer.learning_rate) == float(model.optimizer.learning_rate)
    for trained in (model, again):
        trained.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
