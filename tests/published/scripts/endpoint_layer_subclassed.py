"""After keras.io's examples/keras_recipes/endpoint_layer_pattern.py, in a subclassed model."""

import dtk
import keras
import numpy as np

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(7)


class LogisticEndpoint(keras.layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_fn = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_fn.update_state(targets, logits, sample_weight)
        return keras.ops.sigmoid(logits)


class LogReg(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.logistic_endpoint = LogisticEndpoint()

    def call(self, inputs):
        logits = self.dense(inputs["inputs"])
        return self.logistic_endpoint(
            logits=logits, targets=inputs["targets"], sample_weight=inputs["sample_weight"]
        )


data = {
    "inputs": np.random.random((49, 24)).astype("float32"),
    "targets": np.random.randint(0, 2, (49, 1)).astype("float32"),
    "sample_weight": np.random.random((49, 1)).astype("float32"),
}

with strategy.scope():
    model = LogReg()
    model.compile(keras.optimizers.Adam(1e-3))

history = model.fit(data, epochs=3, batch_size=16, verbose=2)

result = {"weights": model.dense.get_weights(), "history": history.history}
