"""After keras.io's guides/custom_train_step_in_tensorflow.py, its GAN at the end.

Latent vectors are functions of the real images; the guide's `SeedGenerator` stays, unused.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(13)

LATENT_DIM = 8
PROJECTION = np.random.default_rng(13).normal(size=(64, LATENT_DIM)).astype("float32")


def noise_of(images, phase):
    return tf.sin(tf.matmul(tf.reshape(images, (-1, 64)), PROJECTION) + phase)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        generated_images = self.generator(noise_of(real_images, 0.0))
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        # published: noise on the labels; here noise that belongs to a row
        doubled = tf.concat([real_images, real_images], axis=0)
        labels += 0.05 * tf.square(noise_of(doubled, 2.0)[:, :1])

        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)

        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise_of(real_images, 1.0)))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


digits = (load_digits().images[:49, ..., None] / 16).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(digits).shuffle(buffer_size=1024).batch(16)

with strategy.scope():
    discriminator = keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, (3, 3), strides=(2, 2), padding="same", activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input(shape=(LATENT_DIM,)),
            layers.Dense(4 * 4 * 4, activation="tanh"),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, (4, 4), strides=(2, 2), padding="same", activation="tanh"),
            layers.Conv2D(1, (7, 7), padding="same", activation="sigmoid"),
        ],
        name="generator",
    )
    gan = GAN(discriminator=discriminator, generator=generator)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.05, epsilon=0.1),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.05, epsilon=0.1),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )

history = gan.fit(dataset, epochs=3, verbose=2)

result = {
    "weights": [*discriminator.get_weights(), *generator.get_weights()],
    "history": history.history,
}
