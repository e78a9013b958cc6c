"""After keras.io's guides/training_with_built_in_methods.py, "Custom metrics".

A Metric subclass that counts, and a function as a metric, which returns a number for each row.
"""

import dtk
import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(20)


class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name="categorical_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(ops.reshape(y_true, (-1, 1)), "int32") == ops.cast(y_pred, "int32")
        values = ops.cast(values, "float32")
        if sample_weight is not None:
            values = ops.multiply(values, ops.reshape(ops.cast(sample_weight, "float32"), (-1, 1)))
        self.true_positives.assign_add(ops.sum(values))

    def result(self):
        return self.true_positives

    def reset_state(self):
        self.true_positives.assign(0.0)


def confidence(y_true, y_pred):
    return ops.max(ops.softmax(y_pred), axis=-1)


data = load_digits()
x, y = (data.data[:70] / 16).astype("float32"), data.target[:70].astype("int64")

with strategy.scope():
    inputs = keras.Input(shape=(64,), name="digits")
    h = keras.layers.Dense(16, activation="tanh")(inputs)
    outputs = keras.layers.Dense(10)(h)
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(
        optimizer=keras.optimizers.RMSprop(learning_rate=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[CategoricalTruePositives(), confidence],
    )

history = model.fit(
    x[:49], y[:49], batch_size=16, epochs=3, verbose=2, validation_data=(x[49:], y[49:])
)

result = {
    "weights": model.get_weights(),
    "history": history.history,
    "test": np.array(model.evaluate(x[49:], y[49:], batch_size=16, verbose=0)),
}
