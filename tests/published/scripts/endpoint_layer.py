"""After keras.io's examples/keras_recipes/endpoint_layer_pattern.py, functional.

A layer computes the mean loss with a `keras.losses` object and hands it to `add_loss`.
"""

import dtk
import keras
import numpy as np

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(6)


class LogisticEndpoint(keras.layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_fn = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            loss = self.loss_fn(targets, logits, sample_weight)
            self.add_loss(loss)
            self.accuracy_fn.update_state(targets, logits, sample_weight)
        return keras.ops.sigmoid(logits)


data = {
    "inputs": np.random.random((50, 24)).astype("float32"),
    "targets": np.random.randint(0, 2, (50, 1)).astype("float32"),
    "sample_weight": np.random.random((50, 1)).astype("float32"),
}

with strategy.scope():
    inputs = keras.Input((24,), name="inputs")
    logits = keras.layers.Dense(1)(inputs)
    targets = keras.Input((1,), name="targets")
    sample_weight = keras.Input((1,), name="sample_weight")
    preds = LogisticEndpoint()(logits, targets, sample_weight)
    model = keras.Model([inputs, targets, sample_weight], preds)
    model.compile(keras.optimizers.Adam(1e-3))

history = model.fit(data, epochs=3, batch_size=16, verbose=2)

inputs = keras.Input((24,), name="inputs")
logits = keras.layers.Dense(1)(inputs)
preds = LogisticEndpoint()(logits, targets=None, sample_weight=None)
inference_model = keras.Model(inputs, preds)
inference_model.set_weights(model.get_weights()[:2])
predictions = inference_model.predict(data["inputs"], verbose=0)

result = {
    "weights": model.get_weights()[:2],
    "history": history.history,
    "predictions": predictions,
}
