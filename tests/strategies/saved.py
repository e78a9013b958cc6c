"""Bodies that save models, from all ranks or from one; see test_saving.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from strategies import bodies, cases


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
    for _ in range(times):
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


def rank_0_alone(folder):
    """Only rank 0 saves, in every way; nobody may wait for the others."""
    strategy = bodies.strategy()
    model, _ = trained(strategy)
    if strategy.is_chief:
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        model.export(f"{folder}/exported", verbose=False)
        copy = pickle.loads(pickle.dumps(model))
        assert_equal(copy, model)
        Path(folder, "model.json").write_text(model.to_json())
    return sorted(path.name for path in Path(folder).glob("[!.]*"))


def exported_anew(folder):
    """The second of two exports to one path is of other weights."""
    model, x = trained(bodies.strategy())
    model.export(f"{folder}/exported", verbose=False)
    model.set_weights([weight + 0.5 for weight in model.get_weights()])
    model.export(f"{folder}/exported", verbose=False)
    exported = tf.saved_model.load(f"{folder}/exported")
    return exported.serve(x).numpy(), model.predict(x, verbose=0)


def two_strategies():
    """A second strategy in one process, over the same communicator; its weights."""
    from dtk.exchange import Quantized, WarmStart
    from dtk.strategies import AllReduceStrategy

    x, y = cases.rows(32)
    communicator = bodies.strategy().communicator
    found = []
    for exchange in (Quantized(1), WarmStart(Quantized(1), samples=16)):
        strategy = AllReduceStrategy(communicator, exchange=exchange)
        model = cases.compiled(strategy)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        found.append(bodies.flat(model.get_weights()))
    return found


def uncompiled(folder):
    """Predictions of a model built in the scope and never compiled, and of a loaded one."""
    strategy = bodies.strategy()
    x, _ = cases.rows(37)
    with strategy.scope():
        model = cases.small()
        model.save(f"{folder}/model.keras")
        loaded = keras.saving.load_model(f"{folder}/model.keras", compile=False)
    return [m.predict(x, batch_size=8, verbose=0) for m in (model, loaded)] + [
        model.predict_on_batch(x), model(x).numpy(),
    ]  # fmt: skip
