"""DCGAN (Radford, Metz and Chintala 2016, arXiv:1511.06434), as ChainerMN's example trained it.

    python examples/dcgan.py --data digits --width 64 --epochs 60
    dtk run -n 2 examples/dcgan.py --data digits --width 64 --epochs 60     # the same samples
    dtk run -n 4 examples/dcgan.py --batch-size 256                         # CIFAR-10
    dtk run -n 2 examples/dcgan.py --synthetic --epochs 1                   # timing, without data

Two networks with an optimizer each, in one `train_step`, over all workers by plain `fit`. A latent
vector belongs to an image's row of the global batch: the dataset draws it, so that it does not
depend on the number of workers, and N of them end as one would. After every --every epochs rank 0
writes a grid of samples, from the same latent vectors each time.
"""

import argparse
import time
from pathlib import Path

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cifar10 import data

parser = argparse.ArgumentParser(description="Train a DCGAN.")
parser.add_argument("--data", choices=data.NAMES, default="cifar10")
parser.add_argument("--synthetic", action="store_true", help="--data synthetic: timing only")
parser.add_argument("--images", type=int, help="train with the first so many; 1024 synthetic ones")
parser.add_argument("--width", type=int, default=512, help="channels next to the latent vector")
parser.add_argument("--latent", type=int, default=100, help="numbers in a latent vector")
parser.add_argument("--batch-size", type=int, default=128, help="of all workers")
parser.add_argument("--rate", type=float, default=2e-4, help="of both optimizers")
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--every", type=int, default=10, help="epochs between grids of samples")
parser.add_argument("--output", type=Path, default=Path("dcgan"), help="folder of the grids")
parser.add_argument("--weights", help="save the weights in the end, as NAME.weights.h5")
args = parser.parse_args()
if args.weights and not args.weights.endswith(".weights.h5"):
    parser.error(f"--weights {args.weights}: Keras wants a name that ends in .weights.h5")


def initial():
    """Another for each layer: one that is shared would draw the same numbers for all."""
    return keras.initializers.RandomNormal(stddev=0.02)


def norm(scale=True):
    """Of the rows of all workers; an epsilon that keeps rounding small."""
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-3, scale=scale, synchronized=True)


def make_generator(width):
    """A latent vector, on its way to 4 x 4, 8 x 8, 16 x 16 and 32 x 32 pixels in [0, 1]."""
    parts = [keras.Input((args.latent,))]
    parts += [layers.Dense(16 * width, use_bias=False, kernel_initializer=initial())]
    parts += [norm(), layers.ReLU(), layers.Reshape((4, 4, width))]
    for part in (2, 4, 8):
        kind = {"padding": "same", "use_bias": False, "kernel_initializer": initial()}
        parts += [layers.Conv2DTranspose(width // part, 4, 2, **kind), norm(), layers.ReLU()]
    last = layers.Conv2D(3, 3, padding="same", activation="sigmoid", kernel_initializer=initial())
    return keras.Sequential([*parts, last], name="generator")


def make_discriminator(width):
    """Convolutions without pooling; its output is a logit, above 0 for a real image."""

    def conv(filters, size, strides):
        # Of the first, TensorFlow's optimizer of graphs would fuse a bias with the activation, and
        # complain that two tapes read what it removes.
        kind = {"padding": "same", "use_bias": False, "kernel_initializer": initial()}
        return layers.Conv2D(filters, size, strides, **kind)

    parts = [keras.Input((32, 32, 3)), conv(width // 8, 3, 1), layers.LeakyReLU(0.2)]
    for part in (4, 2, 1):
        filters = width // part
        parts += [conv(filters, 4, 2), norm(scale=False), layers.LeakyReLU(0.2)]
        parts += [conv(filters, 3, 1), norm(scale=False), layers.LeakyReLU(0.2)]
    parts += [layers.Flatten(), layers.Dense(1, kernel_initializer=initial())]
    return keras.Sequential(parts, name="discriminator")


class DCGAN(keras.Model):
    """Both networks, and a step that updates both from the same images, real and generated."""

    def __init__(self, width):
        super().__init__(name="dcgan")
        self.generator = make_generator(width)
        self.discriminator = make_discriminator(width)
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.d_loss = keras.metrics.Mean(name="d_loss")

    def compile(self, g_optimizer, d_optimizer):
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer
        self.judged = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.g_loss, self.d_loss]

    def call(self, images, training=None):
        return self.discriminator(images, training=training)

    def train_step(self, batch):
        real, latent = batch
        ones, zeros = (make((tf.shape(real)[0], 1)) for make in (tf.ones, tf.zeros))
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
            fake = self.generator(latent, training=True)
            of_real = self.discriminator(real, training=True)
            of_fake = self.discriminator(fake, training=True)
            d_loss = self.judged(ones, of_real) + self.judged(zeros, of_fake)
            g_loss = self.judged(ones, of_fake)
        # Both gradients before either update, as in ChainerMN: the images are judged once.
        updates = []
        for tape, loss, network, optimizer in (
            (of_discriminator, d_loss, self.discriminator, self.d_optimizer),
            (of_generator, g_loss, self.generator, self.g_optimizer),
        ):
            weights = network.trainable_variables
            updates.append((optimizer, tape.gradient(loss, weights), weights))
        for optimizer, gradients, weights in updates:
            optimizer.apply(gradients, weights)
        self.g_loss.update_state(g_loss)
        self.d_loss.update_state(d_loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Samples(keras.callbacks.Callback):
    """Writes 8 x 8 generated images as a PNG, on rank 0.

    Args:
        folder: Where to; made if missing.
        every: After how many epochs; also after the last.
    """

    def __init__(self, folder, every):
        super().__init__()
        self.folder, self.every = folder, every
        self.latent = np.random.default_rng(0).uniform(-1, 1, (64, args.latent)).astype("float32")

    def on_epoch_end(self, epoch, logs=None):
        if strategy.is_chief and (epoch + 1) % self.every == 0:
            self.write(epoch + 1)

    def on_train_end(self, logs=None):
        if strategy.is_chief and self.params["epochs"] % self.every:
            self.write(self.params["epochs"])

    def write(self, epoch):
        images = np.asarray(self.model.generator(self.latent, training=False))
        grid = images.reshape(8, 8, 32, 32, 3).swapaxes(1, 2).reshape(256, 256, 3)
        self.folder.mkdir(parents=True, exist_ok=True)
        encoded = tf.io.encode_png((255 * grid).round().astype("uint8"))
        tf.io.write_file(str(self.folder / f"epoch-{epoch:04}.png"), encoded)


def rows_of(images):
    """Global batches of images in [0, 1], each with a latent vector."""
    real = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=2)
    seeds = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True).batch(2)

    def row(image, seed):
        latent = tf.random.stateless_uniform((args.latent,), tf.cast(seed, tf.int32), -1.0, 1.0)
        return tf.cast(image, tf.float32) / 255, latent

    dataset = tf.data.Dataset.zip(real, seeds).map(row, tf.data.AUTOTUNE)
    return dataset.batch(args.batch_size).prefetch(tf.data.AUTOTUNE)


strategy = dtk.auto_strategy()
images = data.load("synthetic" if args.synthetic else args.data, strategy, args.images)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = DCGAN(args.width)
    model.compile(*(keras.optimizers.Adam(args.rate, beta_1=0.5) for _ in range(2)))

began = time.perf_counter()
history = model.fit(
    rows_of(images.train[0]),
    shuffle=False,  # the dataset shuffles itself
    epochs=args.epochs,
    verbose=0,
    callbacks=[dtk.callbacks.ProgressPrinter(freq=None), Samples(args.output, args.every)],
).history
if args.weights:
    model.save_weights(args.weights)
if strategy.is_chief:
    seconds = time.perf_counter() - began
    print(
        f"dcgan: {args.epochs} epochs on {images.title}, {strategy.size} worker(s), "
        f"{seconds:.0f} s; losses {history['g_loss'][-1]:.3f} (generator) and "
        f"{history['d_loss'][-1]:.3f} (discriminator); samples in {args.output}"
    )
