"""Handwritten digits in pods: killed, started again, and resumed from a volume that pods share.

    dtk run -n 2 examples/kubernetes/digits.py

docs/engines/kubernetes.md starts it on a cluster, with the manifests beside this file. A small CNN
learns scikit-learn's digits on all pods together, on all rows of each batch of one process.
"""

import argparse

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train on digits, and resume.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--checkpoints", default="checkpoints", help="a folder that all pods see")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16 - 0.5
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]

keras.utils.set_random_seed(1)
strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="gelu"),
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
    callbacks=[
        dtk.callbacks.Checkpoint(args.checkpoints, resume=True),
        dtk.callbacks.ProgressPrinter(freq=None),
    ],
)
_, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
if strategy.is_chief:
    norm = float(sum((weight**2).sum() for weight in model.get_weights()) ** 0.5)
    print(f"test accuracy {accuracy:.4f}, norm of all weights {norm:.6f}, on {strategy.size} pods")
