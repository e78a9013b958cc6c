"""After keras.io's examples/generative/wgan_gp.py: losses of the script's own, several updates.

Noise is a function of the real images instead of random. The generator has no BatchNormalization,
which would normalise with the rows of one worker, and the critic no dropout.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(3)

NOISE_DIM = 8
PROJECTION = np.random.default_rng(3).normal(size=(64, NOISE_DIM)).astype("float32")


def noise_of(images, phase):
    return tf.sin(tf.matmul(tf.reshape(images, (-1, 64)), PROJECTION) + phase)


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, discriminator_extra_steps=3, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = discriminator_extra_steps
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, real_images, fake_images):
        alpha = noise_of(real_images, 5.0)[:, :1, None, None]
        diff = fake_images - real_images
        interpolated = real_images + alpha * diff
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        for i in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise_of(real_images, float(i)), training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(d_gradient, self.discriminator.trainable_variables, strict=True)
            )
        with tf.GradientTape() as tape:
            generated_images = self.generator(noise_of(real_images, 9.0), training=True)
            gen_img_logits = self.discriminator(generated_images, training=True)
            g_loss = self.g_loss_fn(gen_img_logits)
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(gen_gradient, self.generator.trainable_variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def discriminator_loss(real_img, fake_img):
    real_loss = tf.reduce_mean(real_img)
    fake_loss = tf.reduce_mean(fake_img)
    return fake_loss - real_loss


def generator_loss(fake_img):
    return -tf.reduce_mean(fake_img)


train_images = (load_digits().images[:50, ..., None] / 8 - 1).astype("float32")

with strategy.scope():
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input((NOISE_DIM,)),
            layers.Dense(4 * 4 * 4, use_bias=False, activation="tanh"),
            layers.Reshape((4, 4, 4)),
            layers.UpSampling2D((2, 2)),
            layers.Conv2D(1, 3, padding="same", use_bias=False, activation="tanh"),
        ],
        name="generator",
    )
    wgan = WGAN(discriminator, generator, discriminator_extra_steps=3)
    wgan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9),
        g_loss_fn=generator_loss,
        d_loss_fn=discriminator_loss,
    )

history = wgan.fit(train_images, batch_size=16, epochs=2, verbose=2)

result = {"weights": wgan.get_weights(), "history": history.history}
