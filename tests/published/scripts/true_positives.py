"""After keras.io's guides/training_with_built_in_methods.py, "Custom metrics", as published.

Labels of shape [rows] are compared with predictions of shape [rows, 1]: it counts pairs of rows.
"""

import dtk
import keras
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
        values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
        values = ops.cast(values, "float32")
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, "float32")
            values = ops.multiply(values, sample_weight)
        self.true_positives.assign_add(ops.sum(values))

    def result(self):
        return self.true_positives

    def reset_state(self):
        self.true_positives.assign(0.0)


data = load_digits()
x, y = (data.data[:70] / 16).astype("float32"), data.target[:70].astype("int64")

with strategy.scope():
    inputs = keras.Input(shape=(64,), name="digits")
    h = keras.layers.Dense(16, activation="tanh")(inputs)
    outputs = keras.layers.Dense(10)(h)
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(
        optimizer=keras.optimizers.RMSprop(learning_rate=0.05, epsilon=0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[CategoricalTruePositives()],
    )

history = model.fit(x[:49], y[:49], batch_size=16, epochs=3, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
