"""After keras.io's examples/generative/vq_vae.py: `sum(model.losses)` in a step of its own.

The quantizer adds means with `add_loss`; the step adds them to its own `reduce_mean`.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(27)


class VectorQuantizer(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.beta = beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings), initializer="random_uniform"
        )

    def call(self, x):
        flattened = tf.reshape(x, [-1, self.embedding_dim])
        encoding_indices = self.get_code_indices(flattened)
        encodings = tf.one_hot(encoding_indices, self.num_embeddings)
        quantized = tf.matmul(encodings, self.embeddings, transpose_b=True)
        quantized = tf.reshape(quantized, tf.shape(x))
        commitment_loss = self.beta * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook_loss = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(commitment_loss + codebook_loss)
        return x + tf.stop_gradient(quantized - x)

    def get_code_indices(self, flattened_inputs):
        similarity = tf.matmul(flattened_inputs, self.embeddings)
        distances = (
            tf.reduce_sum(flattened_inputs**2, axis=1, keepdims=True)
            + tf.reduce_sum(tf.square(self.embeddings), axis=0)
            - 2 * similarity
        )
        return tf.argmin(distances, axis=1)


class VQVAETrainer(keras.Model):
    def __init__(self, train_variance, vqvae, **kwargs):
        super().__init__(**kwargs)
        self.train_variance = train_variance
        self.vqvae = vqvae
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.vq_loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            reconstruction_loss = tf.reduce_mean((x - reconstructions) ** 2) / self.train_variance
            total_loss = reconstruction_loss + sum(self.vqvae.losses)
        grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "vqvae_loss": self.vq_loss_tracker.result(),
        }


x_train_scaled = (load_digits().data[:49] / 16 - 0.5).astype("float32")
data_variance = float(np.var(x_train_scaled))

with strategy.scope():
    inputs = keras.Input((64,))
    h = layers.Dense(4)(layers.Dense(16, activation="tanh")(inputs))
    h = VectorQuantizer(8, 4, name="vector_quantizer")(h)
    outputs = layers.Dense(64)(layers.Dense(16, activation="tanh")(h))
    vqvae_trainer = VQVAETrainer(data_variance, keras.Model(inputs, outputs, name="vq_vae"))
    vqvae_trainer.compile(optimizer=keras.optimizers.Adam())

history = vqvae_trainer.fit(x_train_scaled, epochs=2, batch_size=16, verbose=2)

result = {"weights": vqvae_trainer.get_weights(), "history": history.history}
