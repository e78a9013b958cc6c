"""Sparse inputs (tf.SparseTensor in tf.data) to a Dense layer that is not yet built."""

import dtk
import keras
import numpy as np
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(16)

rng = np.random.default_rng(16)
dense = (rng.random((50, 30)) * (rng.random((50, 30)) < 0.1)).astype("float32")
y = (dense.sum(1) > 1.5).astype("float32")[:, None]
dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), y)).batch(16)

with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    # Adam squares the slices of a sparse gradient, of which there is one for each column in use.
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

before = model.predict(dataset.map(lambda x, y: x), verbose=0)  # builds the model
history = model.fit(dataset, epochs=3, verbose=2)

result = {
    "before": before,
    "weights": model.get_weights(),
    "history": history.history,
    "test": np.array(model.evaluate(dataset, verbose=0)),
}
