"""What the tests of inference run on every rank; importing it is cheap."""

from __future__ import annotations

import numpy as np

ROWS, BATCH = 203, 8  # 26 batches, the last of 3 rows


def data(rows=ROWS):
    random = np.random.default_rng(0)
    return {
        "image": random.normal(size=(rows, 6, 6, 1)).astype("float32"),
        "extra": random.normal(size=(rows, 3)).astype("float32"),
    }


def model(seed=3, units=4):
    """Two inputs; outputs in a dict, one of them in two parts."""
    import keras

    keras.utils.set_random_seed(seed)
    image, extra = keras.Input((6, 6, 1), name="image"), keras.Input((3,), name="extra")
    h = keras.layers.Flatten()(keras.layers.Conv2D(3, 3, activation="tanh")(image))
    h = keras.layers.BatchNormalization(synchronized=True)(h)
    h = keras.layers.Concatenate()([h, extra])
    parts = [keras.layers.Dense(2, name="first")(h), keras.layers.Dense(1, name="second")(h)]
    outputs = {"logits": keras.layers.Dense(units, name="logits")(h), "parts": parts}
    return keras.Model({"image": image, "extra": extra}, outputs)


def plain(seed=3):
    """What one process predicts, row by row, without dtk."""
    import keras

    made, x = model(seed), data()
    found = []
    for start in range(0, ROWS, BATCH):
        batch = {name: array[start : start + BATCH] for name, array in x.items()}
        found.append(made(batch, training=False))
    return keras.tree.map_structure(lambda *rows: np.concatenate(rows), *found)
