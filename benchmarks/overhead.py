"""What a strategy costs where it has nothing to do: `fit` in a world of one against plain `fit`.

    python benchmarks/overhead.py

Both models are trained in turns, an epoch each, so that whatever else the machine does falls on
both alike. The ratio is plain seconds / strategy seconds per epoch: 1 is no cost, 0.97 the target.
"""

import argparse
import statistics
import time

import dtk
import keras
import numpy as np

parser = argparse.ArgumentParser(description="Overhead of AllReduceStrategy at world size 1.")
parser.add_argument("--rounds", type=int, default=15, help="epochs of each, in turns")
parser.add_argument("--steps", type=int, default=100, help="steps of an epoch")
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

RANDOM = np.random.default_rng(0)


def dense():
    """Steps of about a millisecond: the worst case."""
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


def conv():
    """Steps of some ten milliseconds."""
    layers = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(3)]
    head = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, *head])


def compiled(build):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def epoch(model, x, y):
    began = time.perf_counter()
    model.fit(x, y, batch_size=args.batch_size, verbose=0)
    return time.perf_counter() - began


def quartiles(values):
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def spread(seconds):
    low, middle, high = quartiles(seconds)
    return f"{1000 * middle:7.1f} ms ({1000 * low:.1f} - {1000 * high:.1f})"


rows = args.steps * args.batch_size
x = RANDOM.normal(size=(rows, 8, 8, 1)).astype("float32")
y = RANDOM.integers(0, 10, rows)
strategy = dtk.strategies.AllReduceStrategy(communicator="local")

print(f"epochs of {args.steps} steps, batch {args.batch_size}, {args.rounds} rounds")
print("medians (and quartiles) of an epoch; of the ratio, within each round")
for build in (dense, conv):
    plain = compiled(build)
    with strategy.scope():
        distributed = compiled(build)
    for model in (plain, distributed, plain, distributed):
        epoch(model, x, y)
    plain_seconds, strategy_seconds = [], []
    for number in range(args.rounds):
        turn = [(plain, plain_seconds), (distributed, strategy_seconds)]
        for model, seconds in turn if number % 2 else reversed(turn):
            seconds.append(epoch(model, x, y))
    ratios = [a / b for a, b in zip(plain_seconds, strategy_seconds, strict=True)]
    low, ratio, high = quartiles(ratios)
    print(f"{build.__name__:6} plain    {spread(plain_seconds)}")
    print(f"{'':6} strategy {spread(strategy_seconds)}")
    print(f"{'':6} ratio    {ratio:.3f} ({low:.3f} - {high:.3f})", flush=True)
