"""After keras.io's guides/making_new_layers_and_models_via_subclassing.py, "The add_loss() method".

An activity regularizer (Keras divides its sum by the batch size), weight regularizers, and
`add_loss` of a mean in a layer, beside a compiled loss.
"""

import dtk
import keras
import numpy as np
from keras import ops

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(18)


class MeanActivityRegularization(keras.layers.Layer):
    def __init__(self, rate=1e-2):
        super().__init__()
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(ops.square(inputs)))
        return inputs


x = np.random.random((49, 6)).astype("float32")
y = np.random.random((49, 3)).astype("float32")

with strategy.scope():
    inputs = keras.Input(shape=(6,))
    h = keras.layers.Dense(
        8,
        activation="tanh",
        activity_regularizer=keras.regularizers.L2(0.05),
        kernel_regularizer=keras.regularizers.L2(1e-2),
    )(inputs)
    h = MeanActivityRegularization(0.1)(h)
    outputs = keras.layers.Dense(3)(h)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")

history = model.fit(x, y, batch_size=16, epochs=3, verbose=2)

result = {
    "weights": model.get_weights(),
    "history": history.history,
    "test": model.evaluate(x, y, batch_size=16, verbose=0),
}
