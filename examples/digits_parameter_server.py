"""Handwritten digits with the weights on parameter servers.

    dtk run -n 2 --ps 2 examples/digits_parameter_server.py
    dtk run -n 2 --ps 2 examples/digits_parameter_server.py --consistency sync
    dtk run -n 3 --ps 1 examples/digits_parameter_server.py --consistency 4    # bounded delay

Every task runs this file. Workers and servers stay in the strategy's constructor and serve; what
comes after it runs on the chief. Kill a worker while it trains: the job goes on, and `dtk run`
starts the worker again.
"""

import argparse

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train on digits with parameter servers.")
parser.add_argument("--consistency", default="async", help="sync, async, or a delay bound")
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()

consistency = args.consistency
if consistency.isdigit():
    consistency = dtk.strategies.BoundedDelay(int(consistency))
strategy = dtk.strategies.ParameterServerStrategy(consistency)

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(
    images[:1437],
    labels[:1437],
    batch_size=64,
    epochs=args.epochs,
    verbose=0,
    callbacks=[dtk.callbacks.ProgressPrinter(freq=None)],
)

_, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
staleness = strategy.schedule_of(model).statistics
print(f"test accuracy {accuracy:.4f} after {int(model.optimizer.iterations.numpy())} steps")
print(f"staleness in the last epoch: mean {staleness.mean:.2f}, at most {staleness.max} steps")
for index, worker in enumerate(strategy.traffic):
    steps = max(worker["steps"], 1)
    print(
        f"worker {index}: {worker['steps']} steps, pulled {worker['pulled'] / steps / 1e3:.0f} and "
        f"pushed {worker['pushed'] / steps / 1e3:.0f} kB in each"
    )
print(f"bytes on each server: {strategy.placement}")
