"""After CNTK's "Using CNTK multi-GPU support with Keras": each worker takes its block of the rows.

dtk cuts global batches itself, and would leave out half of each block.
"""

import dtk
import keras
import numpy as np

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(34)

rng = np.random.default_rng(34)
x_train = rng.random((64, 8)).astype("float32")
y_train = x_train.sum(1, keepdims=True)

block = len(x_train) // strategy.size
x_train = x_train[block * strategy.rank : block * (strategy.rank + 1)]
y_train = y_train[block * strategy.rank : block * (strategy.rank + 1)]

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")

history = model.fit(x_train, y_train, batch_size=16 // strategy.size, epochs=2, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
