"""Every rank saves to one path, rank 0 alone saves, every rank saves and loads at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.trainer import model_files

from support import bodies, cases

TWO = pytest.mark.worlds(("collective", 2))


def trained(strategy):
    """A model whose optimizer and metrics have state, and rows to predict."""
    x, y = cases.rows(16)
    model = cases.compiled(strategy, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, verbose=0)
    return model, x


def assert_equal(one, other):
    mine, theirs = (bodies.flat(model.get_weights()) for model in (one, other))
    np.testing.assert_array_equal(mine, theirs)


def every_rank(folder, times=6):
    """All save to one path and load at once, without meeting in between; what was loaded."""
    model, x = trained(bodies.strategy())
    wanted = model.predict(x, verbose=0)
    state = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(state, f"{folder}/managed", max_to_keep=2)
    other = keras.models.clone_model(model)
    for _ in range(times):
        saved = state.save(f"{folder}/state/saved")
        assert saved.startswith(f"{folder}/state/saved-")
        manager.save()
        for path in (saved, tf.train.latest_checkpoint(f"{folder}/state")):
            other.set_weights([0 * weight for weight in other.get_weights()])
            tf.train.Checkpoint(model=other).restore(path).expect_partial()
            assert_equal(other, model)
        model.save(f"{folder}/model.keras")
        loaded = keras.saving.load_model(f"{folder}/model.keras", compile=False)
        assert_equal(loaded, model)
        model.save_weights(f"{folder}/model.weights.h5")
        loaded.load_weights(f"{folder}/model.weights.h5")
        model.save(Path(folder, "model.h5"))
        keras.saving.load_model(f"{folder}/model.h5", compile=False)
        model.export(f"{folder}/exported", verbose=False)
        exported = tf.saved_model.load(f"{folder}/exported")
        served = exported.serve(x)
        np.testing.assert_allclose(served, wanted, 1e-5, 1e-6)
    return sorted(path.name for path in Path(folder).glob("[!.]*"))


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_every_rank_may_save_to_one_path_and_load_at_once(pool, tmp_path):
    """Breaks as BadZipFile, as variables of another shape in an export, or as missing parts."""
    names = ["exported", "managed", "model.h5", "model.keras", "model.weights.h5", "state"]
    assert pool.run(every_rank, str(tmp_path)) == [names] * 2


def rank_0_alone(folder):
    """Only rank 0 saves, in every way; nobody may wait for the others."""
    strategy = bodies.strategy()
    model, x = trained(strategy)
    if strategy.is_chief:
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        model.export(f"{folder}/exported", verbose=False)
        metrics = tf.train.Checkpoint(model=model, metrics=model.metrics)
        metrics.read(metrics.write(f"{folder}/state")).assert_consumed()
        copy = pickle.loads(pickle.dumps(model))
        assert_equal(copy, model)
        model.set_weights([weight + 0.5 for weight in model.get_weights()])
        Path(folder, "exported", "labels.txt").write_text("ten digits")
        model.export(f"{folder}/exported", verbose=False)
        assert Path(folder, "exported", "labels.txt").is_file(), "not a file of the model"
        exported = tf.saved_model.load(f"{folder}/exported")  # its functions need its variables
        np.testing.assert_allclose(exported.serve(x), model(x), 1e-5, 1e-6)
    return sorted(path.name for path in Path(folder).glob("[!.]*"))


@TWO
def test_rank_0_may_save_alone_and_export_again(pool, tmp_path):
    """Breaks as a rank that waits for others to read a metric, or as an export that stays."""
    names = pool.run(rank_0_alone, str(tmp_path))[0]
    state = ["state.data-00000-of-00001", "state.index"]
    assert names == ["exported", "model.keras", "model.weights.h5", *state]


class Times(keras.Model):
    """Its configuration does not have its factor, nor its code."""

    def __init__(self, factor):
        super().__init__()
        self.dense, self.factors = keras.layers.Dense(3, kernel_initializer="ones"), [factor]

    def get_config(self):
        return {}

    def call(self, x):
        return self.dense(x) * self.factors[0]


def with_equal_weights():
    """Models that differ in nothing but what they make of their weights."""

    def sequential(*layers):
        dense = keras.layers.Dense(3, kernel_initializer="ones")
        return keras.Sequential([keras.Input((4,)), dense, *layers])

    def functional(skips):
        given = keras.Input((3,))
        once = keras.layers.Dense(3, kernel_initializer="ones")(given)
        twice = keras.layers.Dense(3, kernel_initializer="ones")(once)
        return keras.Model(given, keras.layers.Add()([twice, given if skips else once]))

    yield "plain", sequential()
    for slope in (0.1, 0.9):
        yield f"leaky {slope}", sequential(keras.layers.LeakyReLU(negative_slope=slope))
    for scale in (1.0, 10.0):
        yield f"rescaled {scale}", sequential(keras.layers.Rescaling(scale))
    yield "of the own", functional(False)
    yield "of the input", functional(True)


def test_models_with_equal_weights_are_told_apart():
    """Breaks as an export that keeps another model which stood there."""
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    likely = keras.Sequential([base, keras.layers.Softmax()])
    assert model_files.hash_of(base) != model_files.hash_of(likely)
    settings = model_files.settings_of
    first, again = ({n: settings(model) for n, model in with_equal_weights()} for _ in range(2))
    assert first == again, "layers have other names, and nothing else"
    assert len({*first.values()}) == len(first)


def test_an_export_replaces_a_model_of_other_settings(tmp_path):
    """Breaks as the first of them, which stays."""
    model, x = Times(2.0), np.ones((1, 4), "float32")
    model(x)
    for factor in (2.0, 3.0):
        model.factors = [factor]
        model.export(tmp_path / "served", verbose=False)
        served = tf.saved_model.load(tmp_path / "served")
        np.testing.assert_allclose(served.serve(x), model(x))


def uncompiled(folder):
    """Predictions of a model built in the scope and never compiled, and of a loaded one."""
    strategy = bodies.strategy()
    x, _ = cases.rows(37)
    with strategy.scope():
        model = cases.small()
        model.save(f"{folder}/model.keras")
        loaded = keras.saving.load_model(f"{folder}/model.keras", compile=False)
    predicted = [m.predict(x, batch_size=8, verbose=0) for m in (model, loaded)]
    return [*predicted, model.predict_on_batch(x), model(x).numpy()]


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_models_that_are_not_compiled_predict_every_row(pool, tmp_path):
    for predictions in pool.run(uncompiled, str(tmp_path)):
        *distributed, wanted = predictions
        for predicted in distributed:
            np.testing.assert_allclose(predicted, wanted, 1e-5, 1e-6)


def feature_space(folder):
    """What a FeatureSpace, which is no model, makes of a row, once saved and loaded."""
    strategy = bodies.strategy()
    space = keras.utils.FeatureSpace(
        {"a": keras.utils.FeatureSpace.float_normalized()}, output_mode="concat"
    )
    space.adapt(tf.data.Dataset.from_tensor_slices({"a": [[1.0], [2.0], [3.0]]}))
    path = f"{folder}/{strategy.rank}.keras"
    space.save(path)
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    row = {"a": tf.constant([[1.0]])}
    return space(row).numpy().item(), loaded(row).numpy().item()


@TWO
def test_a_feature_space_is_saved_as_by_keras(pool, tmp_path):
    """It has no strategy: "'FeatureSpace' object has no attribute '_distribute_strategy'"."""
    for saved, loaded in pool.run(feature_space, str(tmp_path)):
        assert saved == loaded < 0


def fit_a_window_and_a_half(strategy, save):
    """Three steps in windows of two; `save` is given the model."""
    x, y = cases.rows(12)
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(1)
        layers = [keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    save(model, lambda **options: model.fit(x, y, 4, shuffle=False, verbose=0, **options))
    return model, (x, y)


def saved_in_a_window(path, devices):
    """Go on from a file that Keras wrote after `fit`; it writes another when the epoch ends."""
    strategy = bodies.strategy(devices)

    def save(model, fit):
        keeps = keras.callbacks.ModelCheckpoint(f"{path}-epoch.keras")
        fit(callbacks=[keeps] if strategy.is_chief else [])
        model.save(f"{path}.keras")

    fit_a_window_and_a_half(strategy, save)
    strategy.world.barrier()
    with strategy.scope():
        model = keras.saving.load_model(f"{path}.keras")
    x, y = cases.rows(12)
    model.fit(x, y, 4, shuffle=False, verbose=0)
    model.load_weights(f"{path}.keras")  # and once more, by a model that has trained
    model.fit(x, y, 4, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


@pytest.mark.full_but("collective-2")
@pytest.mark.parametrize(("backend", "size"), [("collective", 2), ("mirrored", 2)])
def test_files_of_keras_hold_a_whole_accumulation_window(world, backend, size, tmp_path):
    """Breaks as a file with one rank's part of it, which every rank then adds."""
    alone = tmp_path / "alone"

    def save(model, fit):
        fit()
        model.save(f"{alone}.keras")

    plain, (x, y) = fit_a_window_and_a_half(None, save)
    pool = world("local", 1) if backend == "mirrored" else world(backend, size)
    devices = size if backend == "mirrored" else 0
    found = pool.run(saved_in_a_window, str(tmp_path / "all"), devices)
    plain.fit(x, y, 4, shuffle=False, verbose=0)
    for weights in found:
        np.testing.assert_allclose(weights, bodies.flat(plain.get_weights()), 1e-5, 1e-6)
    whole = keras.saving.load_model(f"{alone}.keras").optimizer.variables
    for name in ("all", "all-epoch"):
        saved = keras.saving.load_model(tmp_path / f"{name}.keras").optimizer.variables
        for one, other in zip(saved, whole, strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6, err_msg=f"{name} {other.path}")
