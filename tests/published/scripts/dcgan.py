"""After keras.io's examples/generative/dcgan_overriding_train_step.py: two optimizers, no `call`.

Latent vectors are functions of the real images instead of random, and units are smooth.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(2)

LATENT_DIM = 8
PROJECTION = np.random.default_rng(2).normal(size=(64, LATENT_DIM)).astype("float32")


def noise_of(images, phase):
    return tf.sin(tf.matmul(tf.reshape(images, (-1, 64)), PROJECTION) + phase)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        generated_images = self.generator(noise_of(real_images, 0.0))
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)

        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )

        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise_of(real_images, 1.0)))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


images = (load_digits().images[:50, ..., None] / 16).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(1024).batch(16)

with strategy.scope():
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, kernel_size=4, strides=2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENT_DIM,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, kernel_size=4, strides=2, padding="same", activation="tanh"),
            layers.Conv2D(1, kernel_size=5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )
    gan = GAN(discriminator, generator)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(0.05, epsilon=0.1),
        g_optimizer=keras.optimizers.Adam(0.05, epsilon=0.1),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )

history = gan.fit(dataset, epochs=3, verbose=2)

result = {"weights": gan.get_weights(), "history": history.history}
