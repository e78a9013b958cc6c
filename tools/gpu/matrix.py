"""Train small models in every way that GPUs change, and keep their weights.

    matrix.py FILE.npz                  one process, or a rank of several
    matrix.py FILE.npz REPLICAS         one process with so many devices
    matrix.py FILE.npz one-card         a rank of several that share the first card
"""

from __future__ import annotations

import itertools
import os
import sys

import keras
import numpy as np
import one_card
import tensorflow as tf

import dtk

MODELS = ("dense", "convolution", "table")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam, global norm 1": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    "lamb": lambda: keras.optimizers.Lamb(1e-3),
}
WAYS = {"float32": {}, "xla": {"jit_compile": True}, "mixed_float16": {}}
ROWS, BATCH, EPOCHS = 160, 16, 5


def model_of(kind: str) -> keras.Model:
    """Build a model of one kind."""
    if kind == "table":
        given = keras.Input((4,), dtype="int64")
        inner = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(given))
    else:
        given = keras.Input((8, 8, 1))
        inner = given
    if kind == "convolution":
        inner = keras.layers.Conv2D(8, 3, activation="relu")(inner)
        inner = keras.layers.BatchNormalization(synchronized=True)(inner)
    inner = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(inner))
    return keras.Model(given, keras.layers.Dense(10, dtype="float32")(inner))


def main() -> None:
    """Train each model by each optimizer in each way."""
    if sys.argv[2:] == ["one-card"]:
        os.environ.update(one_card.environment(dtk.cluster.detect().rank))
    if sys.argv[2:] and sys.argv[2].isdigit():
        strategy = dtk.strategies.MirroredStrategy(int(sys.argv[2]), memory_growth=True)
    else:
        strategy = dtk.strategies.AllReduceStrategy(memory_growth=True)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    random = np.random.default_rng(0)
    images = random.normal(size=(ROWS, 8, 8, 1)).astype("float32")
    words, labels = random.integers(0, 50, (ROWS, 4)), random.integers(0, 10, ROWS)
    found = {}
    for kind, optimizer, way in itertools.product(MODELS, OPTIMIZERS, WAYS):
        if way == "xla" and kind == "convolution":
            continue  # a synchronized norm communicates inside the step
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy("mixed_float16" if way == "mixed_float16" else "float32")
        with strategy.scope():
            model = model_of(kind)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(OPTIMIZERS[optimizer](), loss, **WAYS[way])
        data = words if kind == "table" else images
        model.fit(data, labels, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        found[f"{kind}, {optimizer}, {way}"] = np.concatenate(
            [weights.ravel() for weights in model.get_weights()]
        )
    if strategy.is_chief:
        np.savez(sys.argv[1], **found)
        print(f"dtk computed on {strategy.extended.worker_devices[0]}")


if __name__ == "__main__":
    main()
