"""After keras.io's examples/vision/semisupervised_simclr.py: labels are places in the batch.

Views are functions of the images instead of random. Each row's loss is over all rows of the batch,
and it is differentiated as a vector; a probe trains on the side with a loss object.
"""

import dtk
import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(23)


class ContrastiveModel(keras.Model):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.temperature = temperature
        self.encoder = keras.Sequential(
            [keras.Input((64,)), layers.Dense(16, activation="tanh")], name="encoder"
        )
        self.projection_head = keras.Sequential(
            [keras.Input((16,)), layers.Dense(8, activation="tanh"), layers.Dense(8)]
        )
        self.linear_probe = keras.Sequential([keras.Input((16,)), layers.Dense(10)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
        ]

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = tf.math.l2_normalize(projections_1, axis=1)
        projections_2 = tf.math.l2_normalize(projections_2, axis=1)
        similarities = tf.matmul(projections_1, projections_2, transpose_b=True) / self.temperature
        contrastive_labels = tf.range(tf.shape(projections_1)[0])
        self.contrastive_accuracy.update_state(contrastive_labels, similarities)
        loss_1_2 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, similarities, from_logits=True
        )
        loss_2_1 = keras.losses.sparse_categorical_crossentropy(
            contrastive_labels, tf.transpose(similarities), from_logits=True
        )
        return (loss_1_2 + loss_2_1) / 2

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            projections_1 = self.projection_head(self.encoder(images, training=True))
            projections_2 = self.projection_head(self.encoder(images[:, ::-1], training=True))
            contrastive_loss = self.contrastive_loss(projections_1, projections_2)
        trained = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, trained)
        self.contrastive_optimizer.apply_gradients(zip(gradients, trained, strict=True))
        self.contrastive_loss_tracker.update_state(contrastive_loss)

        with tf.GradientTape() as tape:
            class_logits = self.linear_probe(self.encoder(images, training=False))
            probe_loss = self.probe_loss(labels, class_logits)
        gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
        self.probe_optimizer.apply_gradients(
            zip(gradients, self.linear_probe.trainable_weights, strict=True)
        )
        self.probe_loss_tracker.update_state(probe_loss)
        return {m.name: m.result() for m in self.metrics}


data = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    ((data.data[:50] / 16).astype("float32"), data.target[:50].astype("int64"))
).batch(16)

with strategy.scope():
    pretraining_model = ContrastiveModel()
    pretraining_model.compile(
        contrastive_optimizer=keras.optimizers.Adam(),
        probe_optimizer=keras.optimizers.Adam(),
    )

history = pretraining_model.fit(dataset, epochs=2, verbose=2)

result = {"weights": pretraining_model.get_weights(), "history": history.history}
