"""Square images in three channels: CIFAR-10, scikit-learn's digits, made ones, or random ones.

Every rank makes the same global batches; dtk gives each rank its rows of them. Random crops and
flips depend on seeds that travel with the rows, so they are the same for any number of workers.
"""

import sys
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

NO_DATA = """
CIFAR-10 is not on this machine and could not be downloaded ({error}).
Next, one of:
  * fetch https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz on a machine with a network
    (170 MB) and put it, under this name, where Keras looks for it:
      ~/.keras/datasets/cifar-10-batches-py-target.tar.gz
    (KERAS_HOME, when set, stands for ~/.keras)
  * add --data digits, to learn scikit-learn's handwritten digits, enlarged to 32 x 32
  * add --data teacher, to learn what another network says of made images of 8 x 8
  * add --synthetic, to measure speed on random images."""

NAMES = ("cifar10", "digits", "teacher", "synthetic")


class Data(NamedTuple):
    """A training set and a test set.

    Attributes:
        train: Images, uint8 of shape (n, size, size, 3), and labels of shape (n,).
        test: The same.
        title: What it is, for people.
        background: Value of the pixels around an image that is moved.
        flips: Whether a mirrored image still shows the same.
    """

    train: tuple
    test: tuple
    title: str
    background: int
    flips: bool


def load(name, strategy, images=None):
    """Load a data set on every rank.

    Args:
        name: One of `NAMES`.
        strategy: Its rank 0 downloads CIFAR-10, and the others wait and read what it found.
        images: Training images to keep, the first ones; None for all, which are 1024 of
            "synthetic" and 4000 of "teacher".

    Returns:
        A `Data`. Where CIFAR-10 is missing and cannot be downloaded, the process ends: rank 0 says
        what to do.
    """
    if name == "digits":
        found = load_digits()
    elif name == "synthetic":
        found = make_synthetic(images or 1024)
    elif name == "teacher":
        found = make_taught(images or 4000)
    else:
        found = load_cifar10(strategy)
    x, y = found.train
    return found._replace(train=(x[:images], y[:images]))


def load_cifar10(strategy):
    error = None
    if strategy.is_chief:
        try:
            keras.datasets.cifar10.load_data()
        except Exception as failure:  # Keras raises a bare Exception
            error = str(failure).rpartition(": ")[2].strip() or repr(failure)
    error = strategy.world.broadcast_object(error)
    if error:
        sys.exit(NO_DATA.format(error=error) if strategy.is_chief else 0)
    (x, y), (x_test, y_test) = keras.datasets.cifar10.load_data()
    # CNTK's installer surrounds images with 128
    return Data((x, y[:, 0]), (x_test, y_test[:, 0]), "CIFAR-10", 128, flips=True)


def load_digits():
    """1437 digits to train and 360 to test, enlarged from 8 x 8 pixels, grey."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    small = images[order].reshape(-1, 8, 8, 1) * (255 / 16)
    large = tf.image.resize(small, (32, 32)).numpy().round().astype("uint8").repeat(3, axis=-1)
    labels = labels[order].astype("int64")
    title = "digits of scikit-learn enlarged to 32 x 32 (not CIFAR-10)"
    return Data((large[:1437], labels[:1437]), (large[1437:], labels[1437:]), title, 0, flips=False)


def make_synthetic(images):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (images + 256, 32, 32, 3), "uint8")
    y = random.integers(0, 10, images + 256)
    title = "random images (the error means nothing)"
    return Data((x[:images], y[:images]), (x[images:], y[images:]), title, 128, flips=True)


def make_taught(images):
    """Made images of 8 x 8, and which of ten filters of a random teacher answers most.

    Images are blots of two pixels under grains of one. A filter's answer is its mean over all
    pixels, so that an image that is moved by a pixel keeps its class. Of four images, the one whose
    class is clearest is kept; classes are of one size.
    """
    random = np.random.default_rng(0)
    total = images + 1000
    blots = random.normal(size=(4 * total, 4, 4, 3))
    pixels = 128 + 100 * tf.image.resize(blots, (8, 8), "bicubic").numpy()
    x = (pixels + 8 * random.normal(size=pixels.shape)).clip(0, 255).round().astype("uint8")
    filters = random.normal(size=(3, 3, 3, 10)) / np.sqrt(27)
    answers = np.maximum(tf.nn.conv2d(x / 64.0 - 2, filters, 1, "SAME"), 0).mean(axis=(1, 2))
    answers = (answers - answers.mean(axis=0)) / answers.std(axis=0)
    y = answers.argmax(axis=1)
    second, first = np.sort(answers, axis=1)[:, -2:].T
    clearest = np.argsort(second - first, kind="stable")
    each = -(-total // 10)
    kept = np.concatenate([clearest[y[clearest] == one][:each] for one in range(10)])
    kept = random.permutation(np.sort(kept))
    x, y = x[kept], y[kept]
    title = "made images of 8 x 8 with a teacher's classes (not CIFAR-10)"
    return Data((x[:images], y[:images]), (x[images:], y[images:]), title, 128, flips=False)


def training_set(data, batch_size):
    """Shuffled global batches of images moved by up to an eighth, and mirrored at random.

    As CNTK's reader does: of CIFAR-10 a crop of 32 x 32 pixels out of 40 x 40, a flip of every
    other image, and the mean image of the training set is subtracted.
    """
    mean = mean_image(data)
    edge = len(mean) // 8
    around = [[edge, edge], [edge, edge], [0, 0]]

    def augment(row, seed):
        image, label = row
        image = tf.pad(image, around, constant_values=tf.constant(data.background, tf.uint8))
        image = tf.image.stateless_random_crop(image, mean.shape, seed)
        if data.flips:
            image = tf.image.stateless_random_flip_left_right(image, seed + 1)
        return tf.cast(image, tf.float32) - mean, label

    x, _ = data.train
    rows = tf.data.Dataset.from_tensor_slices(data.train).shuffle(len(x), seed=2)
    seeds = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True)
    seeds = seeds.batch(2, drop_remainder=True)  # of a fixed shape: each worker maps its own rows
    dataset = tf.data.Dataset.zip(rows, seeds).map(augment, tf.data.AUTOTUNE)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def test_set(data, batch_size):
    """Global batches of images as they are, but for the mean image."""
    mean = mean_image(data)
    dataset = tf.data.Dataset.from_tensor_slices(data.test).batch(batch_size)
    return dataset.map(lambda x, y: (tf.cast(x, tf.float32) - mean, y), tf.data.AUTOTUNE)


def mean_image(data):
    """Mean of the training images, pixel by pixel, shape (size, size, 3)."""
    return data.train[0].mean(axis=0, dtype="float64").astype("float32")
