"""After keras.io's examples/vision/siamese_network.py: a triplet loss, one number for each row.

`train_step` differentiates the vector of losses, which is to differentiate their sum; it and
`test_step` give the vector to a Mean.
"""

import dtk
import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(5)


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        ap_distance = ops.sum(tf.square(anchor - positive), -1)
        an_distance = ops.sum(tf.square(anchor - negative), -1)
        return (ap_distance, an_distance)


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.siamese_network.trainable_weights, strict=True)
        )
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        loss = self._compute_loss(data)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        ap_distance, an_distance = self.siamese_network(data)
        loss = ap_distance - an_distance
        return tf.maximum(loss + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


images = (load_digits().images[:210, ..., None] / 16).astype("float32")
triplets = tf.data.Dataset.from_tensor_slices((images[:70], images[70:140], images[140:]))
train_dataset = triplets.take(50).shuffle(1024).batch(16, drop_remainder=False).prefetch(8)
val_dataset = triplets.skip(50).batch(16, drop_remainder=False).prefetch(8)

with strategy.scope():
    embedding = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(16, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(8),
        ],
        name="embedding",
    )
    anchor_input = layers.Input(name="anchor", shape=(8, 8, 1))
    positive_input = layers.Input(name="positive", shape=(8, 8, 1))
    negative_input = layers.Input(name="negative", shape=(8, 8, 1))
    distances = DistanceLayer()(
        embedding(anchor_input), embedding(positive_input), embedding(negative_input)
    )
    siamese_network = keras.Model([anchor_input, positive_input, negative_input], distances)
    siamese_model = SiameseModel(siamese_network)
    siamese_model.compile(optimizer=keras.optimizers.Adam(0.0001))

history = siamese_model.fit(train_dataset, epochs=3, validation_data=val_dataset, verbose=2)

# What shifts all embeddings changes no distance: its gradient is rounding, and Adam divides by it.
free = {id(embedding.layers[2].beta), id(embedding.layers[3].bias)}
weights = [w.numpy() for w in siamese_model.weights if id(w) not in free]
result = {"weights": weights, "history": history.history}
