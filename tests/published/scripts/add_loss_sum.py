"""After keras.io's guides/making_new_layers_and_models_via_subclassing.py, "The add_loss() method".

As published, the layer adds a *sum* over the batch, so a batch of more rows weighs more.
"""

import dtk
import keras
import numpy as np
from keras import ops

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(19)


class ActivityRegularizationLayer(keras.layers.Layer):
    def __init__(self, rate=1e-2):
        super().__init__()
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.sum(inputs))
        return inputs


x = np.random.random((49, 6)).astype("float32")
y = np.random.random((49, 3)).astype("float32")

with strategy.scope():
    inputs = keras.Input(shape=(6,))
    h = keras.layers.Dense(8, activation="tanh")(inputs)
    h = ActivityRegularizationLayer(0.01)(h)
    outputs = keras.layers.Dense(3)(h)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")

history = model.fit(x, y, batch_size=16, epochs=3, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
