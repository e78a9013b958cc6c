"""After keras.io's guides/custom_train_step_in_tensorflow.py, "A first simple example"."""

import dtk
import keras
import numpy as np
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(9)


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


x = np.random.random((49, 12)).astype("float32")
y = np.random.random((49, 1)).astype("float32")

with strategy.scope():
    inputs = keras.Input(shape=(12,))
    outputs = keras.layers.Dense(1)(inputs)
    model = CustomModel(inputs, outputs)
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse", metrics=["mae"])

history = model.fit(x, y, batch_size=16, epochs=3, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
