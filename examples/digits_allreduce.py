"""Handwritten digits on two workers, and proof that they do what one process does.

    dtk run -n 2 examples/digits_allreduce.py

A small CNN learns scikit-learn's digits (1797 images of 8 x 8 pixels) on all workers together. Then
rank 0 alone trains the same network again without any strategy, in plain Keras, while the others
wait. The end compares accuracy, throughput and every weight of the two.
"""

import argparse
import os
import statistics
import time

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train on digits and compare with one process.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=256, help="the global batch")
parser.add_argument("--width", type=int, default=64, help="filters of the first layer")
parser.add_argument("--learning-rate", type=float, default=0.002)
args = parser.parse_args()
if args.epochs < 2:
    parser.error(f"--epochs {args.epochs}: the first epoch warms up and is not timed; 2 or more")

TRAIN = 1437  # of 1797 images; the rest is the test set


def load():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16 - 0.5
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])


def build_model():
    # Smooth activations: with ReLU a rounding error of 1e-7 can push a unit over its kink, and then
    # even two runs of one process, started 1e-7 apart, end percents apart.
    def conv(filters, strides=1):
        return keras.layers.Conv2D(filters, 3, strides, padding="same", activation="gelu")

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            conv(args.width),
            conv(args.width),
            conv(2 * args.width, strides=2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def compile_model(model):
    model.compile(
        optimizer=keras.optimizers.Adam(args.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class StepTimer(keras.callbacks.Callback):
    """Seconds of every step after the first epoch, which also traces and warms up."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.warm = epoch > 0

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self.warm:
            self.seconds.append(time.perf_counter() - self.began)

    def images_per_second(self):
        return args.batch_size / statistics.median(self.seconds)


def train(model, *callbacks):
    keras.utils.set_random_seed(2)  # the order of the images
    timer = StepTimer()
    model.fit(
        *train_set,
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=0,
        callbacks=[timer, *callbacks],
    )
    return timer.images_per_second()


def largest_difference(weights, others):
    """Largest |a - b| of all weights, each tensor relative to its largest value."""
    return max(
        np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        for a, b in zip(weights, others, strict=True)
    )


train_set, test_set = load()
strategy = dtk.auto_strategy()

# 1. All workers together: a strategy, a scope, a callback or two.

keras.utils.set_random_seed(1)  # the first weights
with strategy.scope():
    model = build_model()
    compile_model(model)
together = train(
    model,
    dtk.callbacks.BroadcastVariables(root_rank=0),
    dtk.callbacks.ProgressPrinter(freq=None),
)
loss, accuracy = model.evaluate(*test_set, batch_size=args.batch_size, verbose=0)

# 2. Rank 0 alone, in plain Keras, while the others wait for it.

if strategy.is_chief:
    print("now rank 0 alone, without a strategy ...", flush=True)
    keras.utils.set_random_seed(1)
    alone_model = build_model()
    compile_model(alone_model)
    with dtk.strategies.undistributed():  # else refused: every rank would train one of its own
        alone = train(alone_model)
    _, alone_accuracy = alone_model.evaluate(*test_set, batch_size=args.batch_size, verbose=0)
# Every rank may be bound to cores of its own.
parts = strategy.communicator.allgather_object(os.sched_getaffinity(0))

# 3. What came out.

if strategy.is_chief:
    workers = f"{strategy.size} worker{'s' * (strategy.size > 1)}"
    cores = len(set().union(*parts))
    perfect = f"{strategy.size:.2f} x"
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS", "all")
    difference = largest_difference(model.get_weights(), alone_model.get_weights())
    print(f"""
{"":24}{"1 process":>12}{workers:>12}
{"test accuracy":24}{alone_accuracy:12.4f}{accuracy:12.4f}
{"images per second":24}{alone:12.0f}{together:12.0f}   = {together / alone:.2f} x

weights equal to one process: largest relative difference {difference:.0e}

Images per second are of the median step. This job has {cores} cores; each process computed with
{threads} thread(s), and the one process had the machine to itself, so that {perfect} would be
perfect. What is missing went into summing gradients and into work that every worker repeats;
other programs on this machine move both numbers.
""")
    if difference > 1e-5:
        raise SystemExit("the weights differ by more than rounding: please report this")
