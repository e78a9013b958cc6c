"""A model whose `fit` is overridden as fit(self, *args, **kwargs), as wrappers of libraries do."""

import dtk
import keras
import numpy as np

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(15)


class Pipeline(keras.Sequential):
    """Scales what it is given, as keras_hub's tasks preprocess: before Keras's own `fit`."""

    def fit(self, *args, **kwargs):
        x, *rest = args
        kwargs.setdefault("epochs", 3)
        return super().fit(x / 10, *rest, **kwargs)


x = np.random.random((50, 6)).astype("float32") * 10
y = x.sum(1, keepdims=True) / 30

with strategy.scope():
    model = Pipeline([keras.Input((6,)), keras.layers.Dense(8, activation="tanh")])
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse", metrics=["mae"])

history = model.fit(x, y, batch_size=16, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
