"""Optimizers of which each rank holds a part: equal to one process, with 1/N of the slots."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.errors import DisagreementError
from dtk.trainer.gradients.sharded_optimizer import divide

from callbacks.bodies import Crash, crash_at, recorder
from support import bodies, cases, world
from support.once import once

TOLERANCE = 1e-5
WORLDS = (("collective", 2), pytest.param(("collective", 3), marks=pytest.mark.full))


# The division.


def rooms(*shapes):
    return [tf.Variable(tf.zeros(shape)) for shape in shapes]


def test_ranks_share_each_bucket_evenly():
    found = divide(rooms((5,), (2, 3), (7, 4), ()), [False] * 4, 3, limit=10_000)
    assert found.buckets == [[3, 2, 1, 0]]
    # 40 elements: 13, 13, 14, but matrices are cut between rows.
    assert found.sizes == [[0, 0, 5], [0, 0, 6], [12, 12, 4], [1, 0, 0]]


def test_a_large_variable_is_a_bucket_of_its_own():
    found = divide(rooms((3,), (8, 4), (9,)), [False] * 3, 2, limit=100)
    assert found.buckets == [[2, 0], [1]]
    assert found.sizes == [[0, 3], [16, 16], [6, 3]]


def test_undivided_variables_go_to_the_rank_that_has_least():
    found = divide(rooms((2, 2), (9, 2), (3, 2), (4,)), [True, True, True, False], 2, limit=10_000)
    # What can be cut makes up for it.
    assert found.sizes == [[0, 4], [18, 0], [0, 6], [0, 4]]
    assert found.buckets == [[3], [1, 2, 0]]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,)])
def test_hardly_any_elements(shape):
    (sizes,) = divide(rooms(shape), [False], 3, limit=100).sizes
    assert sum(sizes) == math.prod(shape)


# Training.


def excluding(optimizer, *words):
    optimizer.exclude_from_weight_decay(var_names=list(words))
    return optimizer


def divided_among_two():
    by_path = {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), by_path)
    )


OPTIMIZERS = {
    "adam, clipnorm": lambda o: o.Adam(0.01, amsgrad=True, clipnorm=0.05),
    "adamw, global norm": lambda o: excluding(
        o.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1), "bias"
    ),
    "windows": lambda o: o.Adam(
        0.01, gradient_accumulation_steps=3, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9
    ),
    "overflow": lambda o: o.LossScaleOptimizer(
        o.Adam(0.01, global_clipnorm=0.1), initial_scale=2.0**127, dynamic_growth_steps=4
    ),
    "muon": lambda o: o.Muon(0.01, weight_decay=0.1),
    "adafactor": lambda o: o.Adafactor(0.05),
    "lars": lambda o: dtk.optimizers.LARS(1.0, weight_decay=0.01),
    "of one's own": lambda o: cases.Normed(0.05),
}
OTHERS = {
    "sgd": lambda o: o.SGD(0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda o: o.SGD(0.05, clipnorm=0.1),
    "rmsprop, clipvalue": lambda o: o.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.01),
    "adagrad": lambda o: o.Adagrad(0.05, clipnorm=0.05),
    "adadelta": lambda o: o.Adadelta(0.5),
    "adamax, ema": lambda o: o.Adamax(0.01, use_ema=True, ema_momentum=0.9),
    "nadam": lambda o: o.Nadam(0.01),
    "ftrl": lambda o: o.Ftrl(0.05),
    "lion, overwritten": lambda o: o.Lion(
        0.001, weight_decay=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4
    ),
    "lamb": lambda o: o.Lamb(0.01),
    "windows in a loss scale": lambda o: o.LossScaleOptimizer(
        o.Adam(0.01, gradient_accumulation_steps=2), initial_scale=2.0**10, dynamic_growth_steps=7
    ),
    "divided among two": lambda o: divided_among_two(),
    "layerwise adam": lambda o: dtk.optimizers.LAMB(0.01, weight_decay=0.01),
    "warm-up": lambda o: dtk.optimizers.RMSpropWarmup(0.01, steps_per_epoch=5),
}
NAMES = [*OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


@functools.cache
def sharded(exchange=None):
    return dtk.strategies.AllReduceStrategy(world.communicator(), exchange, shard_optimizer=True)


def build():
    """A table, a convolution, matrices, and one matrix under a constraint."""
    keras.utils.set_random_seed(3)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(50, 4)(tokens)
    x = keras.layers.Flatten()(keras.layers.Conv1D(5, 3, activation="relu")(x))
    most = keras.constraints.MaxNorm(1.0)
    x = keras.layers.Dense(9, activation="tanh", kernel_constraint=most)(x)
    return keras.Model(tokens, keras.layers.Dense(7)(x))


def compiled(strategy, name):
    with bodies.scope_of(strategy):
        model = build()
        model.compile(
            optimizer=(OPTIMIZERS | OTHERS)[name](keras.optimizers),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def fit(model, epochs=2, callbacks=()):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, (75, 6)), random.integers(0, 7, 75)
    # One batch of 16 rows after the other, the last of 11.
    return model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )


def outcome(model):
    slots = [v.numpy().ravel() for v in model.optimizer.variables if v.shape.rank]
    return bodies.flat(model.get_weights()), sum(one.size for one in slots)


def trained(name, strategy=None):
    model = compiled(strategy, name)
    loss = fit(model).history["loss"]
    return *outcome(model), loss


def trained_in_parts(name, exchange=None):
    return trained(name, sharded(exchange))


def assert_near(found, expected, tolerance=TOLERANCE):
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert difference <= tolerance, f"relative difference {difference:.2e}"


@pytest.mark.full_but(
    "collective-2-adam, clipnorm",
    "collective-2-of one's own",
)
@pytest.mark.worlds(*WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_one_process(pool, name):
    if name == "divided among two" and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.__version__} has no MultiOptimizer yet")
    found = pool.run(trained_in_parts, name, timeout=240, meanwhile=lambda: once(trained, name))
    weights, slots, loss = once(trained, name)
    for weights_of_rank, _, loss_of_rank in found:
        assert_near(weights_of_rank, weights)
        assert np.array_equal(weights_of_rank, found[0][0]), "ranks have different weights"
        np.testing.assert_allclose(loss_of_rank, loss, rtol=TOLERANCE)
    held = [slots_of_rank for _, slots_of_rank, _ in found]
    assert sum(held) == slots
    if name == "adam, clipnorm":  # three slots; parts begin and end up to half a row elsewhere
        assert max(held) <= slots / pool.size + 3 * 9


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(*WORLDS)
def test_gradients_in_half_precision(pool):
    name = "adam, clipnorm"
    found = pool.run(trained_in_parts, name, "fp16", timeout=240)
    for weights_of_rank, *_ in found:
        assert_near(weights_of_rank, once(trained, name)[0], tolerance=0.02)
        assert np.array_equal(weights_of_rank, found[0][0])


# Saving.

SAVED = "windows"


def by_epoch():
    """Weights, their averages and the optimizer's state after each epoch in one process.

    The averages are what `fit` leaves in the model when it ends.
    """
    model, found = compiled(None, SAVED), []

    def note(epoch, logs):
        optimizer = model.optimizer
        averages = [v.numpy() for v in optimizer._model_variables_moving_average]
        state = [v.numpy() for v in optimizer.variables]
        found.append(tuple(map(bodies.flat, (model.get_weights(), averages, state))))

    fit(model, 3, [keras.callbacks.LambdaCallback(on_epoch_end=note)])
    return found


def resumed(directory, epochs, strategy=None):
    alone = dtk.strategies.AllReduceStrategy("local", shard_optimizer=True)
    model = compiled(strategy or alone, SAVED)
    fit(model, epochs, [dtk.callbacks.Checkpoint(directory)])
    return bodies.flat(model.get_weights())


def resumed_in_parts(directory, epochs):
    return resumed(directory, epochs, sharded())


@pytest.mark.worlds(*WORLDS)
def test_checkpoints_hold_the_whole(pool, tmp_path):
    """One process saves, ranks go on and save, and one process goes on.

    Five steps of an epoch leave a window of three open.
    """
    resumed(tmp_path, 1)
    for weights in pool.run(
        resumed_in_parts, str(tmp_path), 2, timeout=240, meanwhile=lambda: once(by_epoch)
    ):
        assert_near(weights, once(by_epoch)[1][1])
    assert_near(resumed(tmp_path, 3), once(by_epoch)[2][1])


def dropped_out(directory, epochs):
    """Weights and the state of a dropout's generator, after a run that may resume."""
    strategy = sharded()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse")
    rows = np.random.default_rng(1).normal(size=(24, 4))
    saves = dtk.callbacks.Checkpoint(directory)
    model.fit(rows, rows[:, :1], batch_size=6, epochs=epochs, verbose=0, callbacks=[saves])
    return bodies.flat(model.get_weights()), layers[1].seed_generator.state.numpy()


@pytest.mark.worlds(*WORLDS)
def test_every_rank_draws_on_as_if_nothing_had_been(pool, tmp_path):
    """Only rank 0 did: the dropout of the others began anew, and nobody noticed."""
    pool.run(dropped_out, str(tmp_path / "ended"), 1)
    whole = pool.run(dropped_out, str(tmp_path / "whole"), 2)
    resumed = pool.run(dropped_out, str(tmp_path / "ended"), 2)
    for found, expected in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[0], expected[0])


def saved_and_loaded(path):
    strategy = sharded()
    model = compiled(strategy, SAVED)
    fit(model)
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    both = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in both)
    fit(loaded)
    return bodies.flat(loaded.get_weights())


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(*WORLDS)
def test_files_hold_the_whole(pool, tmp_path):
    found = pool.run(saved_and_loaded, str(tmp_path / "model.keras"), timeout=240)
    model = compiled(None, SAVED)
    fit(model)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one, other in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-3, atol=1e-6)
    fit(loaded)
    for weights_of_rank in found:
        assert_near(weights_of_rank, bodies.flat(loaded.get_weights()))


def backed_up(directory):
    """Keras's own callbacks save; training is cut off in its second epoch, and begun again."""
    folder = pathlib.Path(directory)
    model = compiled(sharded(), SAVED)

    def run(*more):
        save = keras.callbacks.ModelCheckpoint(str(folder / "{epoch}" / "model.keras"))
        backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
        with contextlib.suppress(Crash):
            fit(model, callbacks=[save, backup, *more])

    run(crash_at(1, 2))
    assert (folder / "backup").exists()
    steps = []
    run(recorder(steps))  # the same model, of which everything is restored
    assert [step[:2] for step in steps] == [(1, step) for step in range(5)]
    return bodies.flat(model.get_weights())


@pytest.mark.worlds(*WORLDS)
def test_callbacks_of_keras_that_save(pool, tmp_path):
    """Rank 0 alone ran them, and waited for the others to gather the optimizer's state."""
    for weights in pool.run(backed_up, str(tmp_path), timeout=240):
        assert_near(weights, once(by_epoch)[1][1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    loaded = keras.models.load_model(tmp_path / "1" / "model.keras")
    weights, _, state = once(by_epoch)[0]
    assert_near(bodies.flat(loaded.get_weights()), weights)
    found = bodies.flat(v.numpy() for v in loaded.optimizer.variables)
    np.testing.assert_allclose(found, state, rtol=1e-3, atol=1e-6)


def saved_on_rank_0(directory):
    strategy = sharded()
    save = keras.callbacks.ModelCheckpoint(str(pathlib.Path(directory, "model.keras")))
    told = r"those that save.* rank 0 has \['ModelCheckpoint'\]"
    with pytest.raises(DisagreementError, match=told):
        fit(compiled(strategy, SAVED), callbacks=[save] if strategy.is_chief else [])


@pytest.mark.worlds(("collective", 2))
def test_a_callback_that_saves_on_one_rank_only_is_refused(pool, tmp_path):
    pool.run(saved_on_rank_0, str(tmp_path))


# Loops of one's own.


def looped(strategy=None):
    """Train a compiled model by a loop; its first, second ... rows are those of ranks 0, 1 ..."""
    model = compiled(strategy, "adam, clipnorm")
    ranks, rank = (strategy.size, strategy.rank) if strategy else (1, 0)
    random = np.random.default_rng(0)
    x = tf.constant(random.integers(0, 50, (16, 6))[rank::ranks])
    y = tf.constant(random.integers(0, 7, 16)[rank::ranks])

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.reduce_sum(losses) / 16
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    run = tf.function(lambda *rows: strategy.run(step, rows) if strategy else step(*rows))
    for _ in range(3):
        run(x, y)
    return outcome(model)


def looped_in_parts():
    return looped(sharded())


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
def test_a_loop_of_ones_own(pool):
    weights, slots = looped()
    found = pool.run(looped_in_parts, timeout=240)
    assert sum(slots_of_rank for _, slots_of_rank in found) == slots
    for weights_of_rank, _ in found:
        assert_near(weights_of_rank, weights)


# Gradients that stand at several places.


def twice_looked_up():
    """A model that looks rows of one table up in two places."""
    tokens = keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(9, 3)
    means = keras.layers.GlobalAveragePooling1D()(table(tokens))
    rows = keras.layers.Concatenate()([means, keras.layers.Flatten()(table(tokens[:, :2]))])
    return keras.Model(tokens, keras.layers.Dense(2)(rows))


class TwoLosses(keras.Model):
    """Applies the gradients of two losses at once: some weights have two of them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            near = tf.reduce_mean(tf.square(self(x) - y))
            far = tf.reduce_mean(tf.abs(self(x) - y))
        every, some = self.trainable_variables, self.trainable_variables[1:]
        gradients = tape.gradient(near, every) + tape.gradient(far, some)
        self.optimizer.apply(gradients, every + some)
        return {"loss": near}


def two_losses():
    tokens = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(tokens)
    return TwoLosses(tokens, keras.layers.Dense(2)(hidden))


SEVERAL = {"lookups": twice_looked_up, "losses": two_losses}


def trained_on_several(name, in_parts=False):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 9, (22, 4)), random.normal(size=(22, 2))
    with bodies.scope_of(sharded() if in_parts else None):
        keras.utils.set_random_seed(3)
        model = SEVERAL[name]()
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.05), "mse")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights())


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_one_variable_at_several_places(pool, name):
    """Lookups ended in an IndexError; of two gradients of one weight, one was applied twice."""
    for weights in pool.run(trained_on_several, name, True, timeout=120):
        assert_near(weights, once(trained_on_several, name))


# What is refused.


def untouched(method):
    """An optimizer with a method of its own, which Keras calls with all gradients or weights."""

    def own(self, *args):
        return getattr(super(made, self), method)(*args)

    made = type("Own", (keras.optimizers.SGD,), {method: own})
    return made(0.1)


OWN = ["apply_gradients", "_backend_apply_gradients", "_clip_gradients", "_backend_update_step"]


class Applied(keras.optimizers.SGD):
    """Computes with all gradients at once, in an `apply` of its own."""

    def apply(self, grads, trainable_variables=None):
        norm = tf.linalg.global_norm(grads)
        return super().apply([g / norm for g in grads], trainable_variables)


def refusals():
    told = []

    def note(make):
        try:
            make()
        except ValueError as error:
            told.append(str(error))

    communicator, make = world.communicator(), dtk.strategies.AllReduceStrategy
    note(lambda: make(communicator, "1bit", shard_optimizer=True))
    note(lambda: make(communicator, shard_optimizer=True, model_parallel=communicator.size))
    with dtk.strategies.undistributed():
        model = build()
        built = keras.optimizers.Adam()
        built.build(model.trainable_variables)
    with sharded().scope():
        note(lambda: model.compile(built, "mse"))
        note(lambda: build().compile(Applied(0.1), "mse"))
        for method in OWN:
            note(functools.partial(build().compile, untouched(method), "mse"))
        model, unknown = build(), keras.optimizers.Adam(name="unknown")
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    note(lambda: sharded().run(lambda: unknown.apply(gradients, model.trainable_variables)))
    averaging = keras.optimizers.SGD(0.1, use_ema=True)
    with sharded().scope():
        model = build()
        model.compile(averaging, "mse")
    note(lambda: fit(model, callbacks=[keras.callbacks.SwapEMAWeights()]))
    return told


@pytest.mark.worlds(("collective", 2))
def test_what_is_refused(pool):
    for rank, told in enumerate(pool.run(refusals)):
        assert [text.partition(":")[0] for text in told] == [f"rank {rank}"] * 10
        assert "exchange=Quantized(bits=1)" in told[0]
        assert "model_parallel=2" in told[1]
        assert "was built before it was compiled" in told[2]
        for text, method in zip(told[3:8], ["apply", *OWN], strict=True):
            assert f"has its own {method}, which" in text
        assert "optimizer 'unknown' was applied" in told[8]
        assert "leave the callback out" in told[9]


def test_one_process_is_plain_keras():
    strategy = dtk.strategies.AllReduceStrategy("local", shard_optimizer=True)
    assert not strategy.shard_optimizer
