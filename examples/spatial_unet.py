"""A U-Net that finds discs in large images, of which each rank sees some of the rows.

    dtk run -n 2 examples/spatial_unet.py
    dtk run -n 2 examples/spatial_unet.py --size 1024 --epochs 1
    python examples/spatial_unet.py                        # whole images, the same numbers

Ronneberger et al. 2015 (arXiv:1505.04597), small. Images are drawn at random: noise, with a few
discs; the targets say which pixels belong to one. Each rank holds activations of its rows only,
and asks its neighbours for the rows that a convolution needs beyond them.
"""

import argparse
import resource
import time

import dtk
import keras
import numpy as np

parser = argparse.ArgumentParser(description="Segment images by rows.")
parser.add_argument("--size", type=int, default=64, help="rows and columns of an image")
parser.add_argument("--images", type=int, default=96)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--filters", type=int, default=8, help="of the first layer")
args = parser.parse_args()


def draw(images, size):
    """Noisy images with three discs each, and masks of the discs."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    masks = np.zeros((images, size, size, 1), "float32")
    for mask in masks:
        for _ in range(3):
            y, x = random.integers(0, size, 2)
            radius = random.integers(size // 16, size // 5)
            mask[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 1.0
    noise = random.normal(0.0, 0.5, masks.shape)
    return (masks + noise).astype("float32"), masks


def convolve(x, filters):
    for _ in range(2):
        x = dtk.layers.SpatiallyParallelConv2D(filters, 3, padding="same", use_bias=False)(x)
        x = dtk.layers.SpatiallyParallelBatchNormalization()(x)
        x = keras.layers.Activation("gelu")(x)
    return x


def build_unet(size, filters, depth=2):
    inputs = keras.Input((size, size, 1))
    x, skipped = dtk.layers.SplitRows()(inputs), []
    for level in range(depth):
        x = convolve(x, filters << level)
        skipped.append(x)
        x = dtk.layers.SpatiallyParallelMaxPooling2D()(x)
    x = convolve(x, filters << depth)
    for level in reversed(range(depth)):
        x = dtk.layers.SpatiallyParallelUpSampling2D()(x)
        x = keras.layers.Concatenate()([skipped[level], x])
        x = convolve(x, filters << level)
    x = dtk.layers.SpatiallyParallelConv2D(1, 1)(x)
    return keras.Model(inputs, dtk.layers.GatherRows()(x))


class Clock(keras.callbacks.Callback):
    """Times of the ends of steps."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())


strategy = dtk.strategies.AllReduceStrategy(model_parallel=dtk.cluster.detect().size)
keras.utils.set_random_seed(1)
images, masks = draw(args.images, args.size)
with strategy.scope():
    model = build_unet(args.size, args.filters)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
clock = Clock()
train = args.images * 3 // 4
history = model.fit(
    images[:train],
    masks[:train],
    batch_size=8 if args.size < 512 else 1,
    epochs=args.epochs,
    verbose=0,
    callbacks=[clock],
)
loss, accuracy = model.evaluate(images[train:], masks[train:], batch_size=8, verbose=0)
if strategy.is_chief:
    seconds = np.diff(clock.times)[1:]  # without the first step, which is traced
    speed = f"{1e3 * np.median(seconds):.0f} ms a step" if seconds.size else "too few steps to time"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    for epoch, value in enumerate(history.history["loss"]):
        print(f"epoch {epoch + 1}/{args.epochs}: loss {value:.5f}")
    print(f"test loss {loss:.4f}, accuracy of pixels {accuracy:.4f}")
    parts = strategy.model_communicator.size
    print(f"{parts} rank(s) for an image: {speed}, at most {memory:.0f} MiB on rank 0")
