"""Optimizers that a strategy has taken over: still the script's, for Python, Keras and files."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.errors import NotDistributedError
from dtk.trainer.step_recorder import StepRecorder

from support import bodies, cases, world
from support.once import once

TWO = pytest.mark.worlds(("collective", 2))


class Counting(type):
    """A class of classes, such as a registry of plugins has."""


@keras.saving.register_keras_serializable("tests")
class Halved(keras.optimizers.SGD, metaclass=Counting):
    """A script's own: half of each step."""

    def __init__(self, learning_rate=0.1, halves=1, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.clip = halves  # a name that dtk's classes must leave alone

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * 0.5**self.clip, variable, learning_rate)

    def get_config(self):
        return {**super().get_config(), "halves": self.clip}


def by_path():
    found = {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
    return keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), found)


def scaled(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


MAKES = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, clipnorm=1.0, use_ema=True),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, decay_steps=20)
    ),
    "windows in a loss scale": lambda: scaled(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    ),
    "of one's own": lambda: Halved(0.1, halves=2, momentum=0.5),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    MAKES["divided among two"] = lambda: keras.optimizers.MultiOptimizer(by_path())


def trained(strategy, optimizer):
    x, y = cases.rows(16)
    with bodies.scope_of(strategy):
        model = cases.compiled(strategy, optimizer=optimizer)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


def described(model):
    """What Keras writes of an optimizer, and of those made again from it in every way."""
    optimizer, given = model.optimizer, model.optimizer.__class__
    again = {
        "from_config": optimizer.from_config(optimizer.get_config()),
        "from_config of its type": type(optimizer).from_config(optimizer.get_config()),
        "pickle": pickle.loads(pickle.dumps(model)).optimizer,
        "deepcopy": copy.deepcopy(model).optimizer,
        "deserialize": keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        "get": keras.optimizers.get(keras.saving.serialize_keras_object(optimizer)),
    }
    # Keras cannot read a pickled optimizer that has state. It is written, all the same.
    assert pickle.dumps(optimizer)
    for way, one in again.items():
        assert type(one) is given, (way, type(one))
        assert not hasattr(one, "_dtk_exchange"), way
    written = {way: keras.saving.serialize_keras_object(one) for way, one in again.items()}
    written["itself"] = keras.saving.serialize_keras_object(optimizer)
    return json.dumps(written, sort_keys=True)


def saved(model, path):
    """What a file says of a model's compilation; the file stays."""
    model.save(path)
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("config.json"))["compile_config"]


def in_every_way(name, path, strategy=None):
    keras.utils.clear_session()
    optimizer = MAKES[name]()
    model = trained(strategy, optimizer)
    assert isinstance(optimizer, optimizer.__class__) and isinstance(optimizer, keras.Optimizer)
    assert (type(optimizer) is optimizer.__class__) == (strategy is None)
    assert repr(optimizer.__class__) == repr(type(optimizer))
    state = [v.numpy() for v in optimizer.variables]
    return described(model), saved(model, path), state


def under_a_strategy(name, path):
    strategy = bodies.strategy()
    return in_every_way(name, path.format(strategy.rank), strategy)


READ = """
import sys, keras, numpy as np
keras.saving.register_keras_serializable("tests")
model = keras.saving.load_model(sys.argv[1])
assert "dtk" not in sys.modules
np.savez(sys.argv[2], *[v.numpy() for v in model.optimizer.variables])
"""


@TWO
@pytest.mark.parametrize("name", MAKES)
def test_copies_and_files_are_of_the_class_that_the_script_chose(pool, tmp_path, name):
    path = str(tmp_path / "rank{}.keras")
    found = pool.run(under_a_strategy, name, path, timeout=120)
    plain = in_every_way(name, path.format("plain"))
    for written, file, state in found:
        assert written == plain[0]
        assert file == plain[1]
        for mine, theirs in zip(state, plain[2], strict=True):
            np.testing.assert_allclose(mine, theirs, 1e-4, 1e-6)
    if name == "of one's own":
        return  # its class is here
    state = tmp_path / "state.npz"
    command = [sys.executable, "-c", READ, path.format(0), str(state)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    with np.load(state) as read:
        for mine, theirs in zip(found[0][2], read.values(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


# What scripts do with optimizers.


def alone(optimizer):
    return optimizer


def compiled_twice(first, second, windows, strategy=None):
    """One optimizer in two calls of `compile`: its gradients are summed once in each step."""
    keras.utils.set_random_seed(3)
    inner = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=windows)
    x, y = cases.rows(16)
    with bodies.scope_of(strategy):
        model = cases.compiled(strategy, optimizer=first(inner))
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        model.compile(second(inner), model.loss)
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights())


def with_an_apply_of_the_scripts(windows=None, strategy=None):
    """A script that replaces `apply` of the object, before it compiles: it gets the sums."""
    keras.utils.set_random_seed(3)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=windows)
    own = optimizer.apply

    def apply(grads, trainable_variables=None):
        return own([keras.ops.sign(g) for g in grads], trainable_variables)

    optimizer.apply = apply
    return bodies.flat(trained(strategy, optimizer).get_weights())


class Clipped(keras.optimizers.SGD):
    """Clips gradients where `train_step` hands them over, which Keras does by this method."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(tf.clip_by_norm(g, 0.05), v) for g, v in grads_and_vars])


def with_apply_gradients_of_the_scripts(windows, compiled=False, strategy=None):
    keras.utils.set_random_seed(3)
    optimizer = Clipped(0.1, gradient_accumulation_steps=windows)
    x, y = cases.rows(16)
    with bodies.scope_of(strategy):
        layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
        model.compile(optimizer, cases.crossentropy(), jit_compile=compiled)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights())


SCRIPTS = {
    "two loss scales, windows": functools.partial(compiled_twice, scaled, scaled, 2),
    "alone, then scaled": functools.partial(compiled_twice, alone, scaled, None),
    "alone, then scaled, windows": functools.partial(compiled_twice, alone, scaled, 2),
    "scaled, then alone": functools.partial(compiled_twice, scaled, alone, None),
    "scaled, then alone, windows": functools.partial(compiled_twice, scaled, alone, 2),
    "an own apply": with_an_apply_of_the_scripts,
    "an own apply, windows": functools.partial(with_an_apply_of_the_scripts, 3),
    "own apply_gradients": functools.partial(with_apply_gradients_of_the_scripts, None),
    "own apply_gradients, compiled": functools.partial(
        with_apply_gradients_of_the_scripts, None, True
    ),
    "own apply_gradients, windows": functools.partial(with_apply_gradients_of_the_scripts, 3),
}


def trained_by(script, distributed=False):
    return SCRIPTS[script](strategy=bodies.strategy() if distributed else None)


@TWO
@pytest.mark.parametrize("script", SCRIPTS)
def test_equal_to_one_process(pool, script):
    found = pool.run(trained_by, script, True, timeout=120)
    for weights in found:
        np.testing.assert_allclose(weights, once(trained_by, script), 1e-5, 1e-6)
        np.testing.assert_array_equal(weights, found[0])


def test_no_rate_is_told_of_an_optimizer_that_has_none():
    """A MultiOptimizer ended the training of rank 0 under `dtk run`."""
    strategy = dtk.strategies.AllReduceStrategy("local")
    told = {}
    for name, make in MAKES.items():
        model = cases.small()
        model.compile(make(), cases.crossentropy())
        told[name] = StepRecorder(model, strategy, None)._settings()
    assert told["adamw"] == {"rate": pytest.approx(0.01)}
    assert told.get("divided among two", {}) == {}


# What is refused, and leaves things as they were.


class Signs(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([keras.ops.sign(g) for g in grads], trainable_variables)


def applied_in_a_loop(strategy, optimizer, of_model):
    """What a loop is told that applies an optimizer."""
    x, y = cases.rows(16)
    with strategy.scope():
        model = cases.compiled(strategy, optimizer=of_model)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with pytest.raises(NotDistributedError) as error:
        for batch in strategy.experimental_distribute_dataset(rows):
            strategy.run(step, args=batch)
    return str(error.value)


def refusals():
    strategy = bodies.strategy()
    with strategy.scope():
        inner, own = keras.optimizers.SGD(0.1), Signs(0.1)
    return [
        applied_in_a_loop(strategy, inner, scaled(inner)),
        applied_in_a_loop(strategy, own, keras.optimizers.SGD(0.1)),
    ]


@TWO
def test_a_loop_whose_gradients_nothing_would_sum_or_too_late_is_refused(pool):
    """The inside of a loss scale was applied on each rank alone; an own apply, twice."""
    for of_inner, of_own in pool.run(refusals, timeout=120):
        assert "it is inside 'loss_scale_optimizer" in of_inner
        assert "Apply the outer one, as model.optimizer" in of_inner
        assert "(Signs) has its own apply, and no model was compiled with it" in of_own


def saved_after_a_refusal(path):
    strategy = dtk.strategies.AllReduceStrategy(world.communicator(), shard_optimizer=True)
    with strategy.scope():
        model, optimizer = cases.small(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        with pytest.raises(ValueError, match="was built before it was compiled"):
            model.compile(optimizer, cases.crossentropy())
    model.save(path.format(strategy.rank))


@TWO
def test_a_model_whose_optimizer_was_refused_can_be_saved(pool, tmp_path):
    pool.run(saved_after_a_refusal, str(tmp_path / "rank{}.keras"), timeout=120)
    assert len(list(tmp_path.iterdir())) == 2
