"""What the strategy tests run on every rank, and once more in one plain process to compare with."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from pathlib import Path

import numpy as np

EPOCHS, BATCH = 5, 16
# Rows of an epoch: ten steps each, 50 in all.
TAILS = {"even": 160, "short tail": 155, "tail of one": 145}


@functools.cache
def strategy(devices=0):
    """The one strategy of this process: mirrored over `devices`, else all-reduce over the world."""
    from dtk.strategies import AllReduceStrategy, MirroredStrategy

    if devices:
        return MirroredStrategy(devices=devices)
    return AllReduceStrategy(os.environ["DTK_TEST_COMMUNICATOR"])


@functools.cache
def served(consistency="sync"):
    """The one strategy over parameter servers of this process; see `served_with`."""
    from dtk.strategies import ParameterServerStrategy

    return ParameterServerStrategy(consistency)


def served_with(consistency):
    """The same with another consistency: it is looked up when a model is compiled.

    None for a plain process, whose results are compared with.
    """
    if consistency is None:
        return None
    from dtk.parameter_server import consistency_models

    strategy = served()
    strategy.consistency = consistency_models.parse(consistency)
    return strategy


@functools.cache
def digits():
    """Real 8x8 images, shape [1797, 8, 8, 1], and their labels.

    To import scikit-learn, which has them, costs each process 1.4 s.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",")
    images = rows[:, :64].reshape(-1, 8, 8, 1)
    return (images / 16).astype("float32"), rows[:, 64].astype("int64")


def scope_of(trained_under):
    return trained_under.scope() if trained_under else contextlib.nullcontext()


OPTIMIZERS = ("sgd momentum", "adam", "adamw", "loss scaling", "ema")
CLIPS = {
    "none": {},
    "clipnorm": {"clipnorm": 0.1},
    "global clipnorm": {"global_clipnorm": 0.2},
    "clipvalue": {"clipvalue": 0.01},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def make_optimizer(name, clip):
    import keras

    more = CLIPS[clip]
    if name == "sgd momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9, **more)
    if name == "adam":
        return keras.optimizers.Adam(0.01, **more)
    if name == "adamw":
        return keras.optimizers.AdamW(0.01, weight_decay=0.01, **more)
    if name == "ema":
        return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, **more)
    inner = keras.optimizers.SGD(0.05, momentum=0.9, **more)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=7)


def train(optimizer, clip, tail, trained_under=None, inside=True, normalise=True):
    """50 steps on the digits, shuffled. Returns flat weights and the history."""
    import keras

    keras.utils.set_random_seed(7)
    scope = scope_of(trained_under)
    x, y = digits()
    x, y = x[: TAILS[tail]], y[: TAILS[tail]]

    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                # No bias in front of the normalisation: its gradient is zero but for rounding, and
                # Adam divides that rounding by itself.
                keras.layers.Conv2D(4, 3, strides=2, use_bias=False),
                keras.layers.BatchNormalization(synchronized=True)
                if normalise
                else keras.layers.LayerNormalization(),
                keras.layers.ReLU(),
                keras.layers.Flatten(),
                keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(1e-3)),
            ]
        )

    model = None if inside else build()
    with scope:
        model = model or build()
        model.compile(
            optimizer=make_optimizer(optimizer, clip),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, validation_data=(x[:33], y[:33])
    )
    return flat(model.get_weights()), history.history


def flat(arrays):
    return np.concatenate([np.ravel(a).astype("float64") for a in arrays])


def train_here(optimizer, clip, tail, devices=0):
    return train(optimizer, clip, tail, strategy(devices))


def train_built_outside(optimizer, clip, tail, devices=0):
    return train(optimizer, clip, tail, strategy(devices), inside=False)


def train_served(optimizer, clip, tail, consistency="sync"):
    """The same on workers behind parameter servers, which cannot synchronize a normalisation."""
    return train(optimizer, clip, tail, served_with(consistency), normalise=False)


def run_served_case(name, consistency):
    """One feature with parameter servers."""
    from support import cases

    return cases.CASES[name](served_with(consistency))


def run_case(name, devices=0):
    """One feature under the strategy of this process; see cases.py."""
    from support import cases

    return cases.CASES[name](strategy(devices))


def run_plain(name):
    """The same in one plain process."""
    from support import cases

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return cases.CASES[name](None)
