"""After keras.io's guides/custom_train_step_in_tensorflow.py, "Going lower-level".

Loss and metrics are the model's own: a loss object, a Mean that tracks it, and a metric.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(10)


class CustomModel(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


x = np.random.random((49, 12)).astype("float32")
y = np.random.random((49, 1)).astype("float32")

with strategy.scope():
    inputs = keras.Input(shape=(12,))
    outputs = keras.layers.Dense(1)(inputs)
    model = CustomModel(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam())

history = model.fit(x, y, batch_size=16, epochs=3, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
