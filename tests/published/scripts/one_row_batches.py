"""Stochastic gradient descent in the word's first sense: batch_size=1."""

import dtk
import keras
import numpy as np

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(17)

x = np.random.random((9, 4)).astype("float32")
y = x.sum(1, keepdims=True)

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")

history = model.fit(x, y, batch_size=1, epochs=2, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
