"""Predictions of more rows than fit in memory, on all workers, and again after a kill.

    dtk run -n 2 examples/predict_to_disk.py --directory predictions

A network learns scikit-learn's digits. Then it predicts many noisy copies of them, which lie in a
file that is mapped into memory; each rank reads its own rows and writes its own files. Kill it, and
start it again: it says how many files it has found, and makes the others.
"""

import argparse
import os
import tempfile
import time

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Predict a large file, and go on after a kill.")
parser.add_argument("--rows", type=int, default=200_000)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--directory", help="where to; a temporary one if left out")
args = parser.parse_args()

strategy = dtk.auto_strategy()
directory = args.directory or tempfile.mkdtemp()
directory = strategy.communicator.broadcast_object(directory)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16

# The same seeds in every run: predictions of other weights would not be gone on with.
keras.utils.set_random_seed(1)
weights = f"{directory}/model.weights.h5"
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

# 1. Rank 0 prepares the data, once; a real script would find them there.

if strategy.is_chief:
    os.makedirs(directory, exist_ok=True)
    if not os.path.exists(f"{directory}/rows.npy"):
        random, draft = np.random.default_rng(0), f"{directory}/draft.npy"
        shape = (args.rows, 8, 8, 1)
        rows = np.lib.format.open_memmap(draft, "w+", "float32", shape)
        for start in range(0, args.rows, 10_000):
            which = np.arange(start, min(start + 10_000, args.rows)) % len(images)
            noise = random.normal(0, 0.1, (len(which), 8, 8, 1))
            rows[start : start + 10_000] = images[which] + noise
        rows.flush()
        os.replace(draft, f"{directory}/rows.npy")
there = strategy.communicator.broadcast_object(os.path.exists(weights))
if there:
    model.load_weights(weights)
else:
    model.fit(images, labels, batch_size=128, epochs=args.epochs, verbose=0)
    model.save_weights(weights)
rows = np.load(f"{directory}/rows.npy", mmap_mode="r")

# 2. Every rank predicts its share, and writes it.

files = f"{directory}/predictions/output"
found = len(os.listdir(files)) if os.path.isdir(files) else 0
strategy.communicator.barrier()
began = time.perf_counter()
predictions = dtk.inference.predict_to_disk(
    model,
    rows,
    f"{directory}/predictions",
    batch_size=args.batch_size,
)
seconds = time.perf_counter() - began

# 3. Rank 0 reads what all have written.

if strategy.is_chief:
    right = 0
    for start, logits in enumerate(predictions.batches(10_000)):
        which = np.arange(start * 10_000, start * 10_000 + len(logits)) % len(images)
        right += np.sum(np.argmax(logits, -1) == labels[which])
    few = slice(1000, 1100)
    difference = np.abs(predictions[few] - model(rows[few], training=False).numpy()).max()
    size = dtk.inference.size_of(f"{directory}/predictions") / 1e6
    print(f"{found} files were there; now {len(os.listdir(files))} hold {len(predictions)} rows")
    print(f"accuracy {right / len(predictions):.4f}, {size:.1f} MB on disk")
    print(f"{len(rows) / seconds:.0f} rows/s in {seconds:.1f} s on {strategy.size} worker(s)")
    print(f"largest difference from one process in 100 rows: {difference:.0e}")
strategy.communicator.barrier()  # a rank that ends early is taken for a dead one
