"""One model in every format it can be served in: accuracy, size and latency of each.

    dtk run -n 2 examples/export_digits.py

A network learns scikit-learn's digits on all workers, rank 0 exports it, then its weights are
quantised to 8 bits by Keras and exported again. Each artifact is then loaded by its own runtime.
"""

import argparse
import importlib.util
import tempfile

import dtk
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Export a model, and compare what was exported.")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--width", type=int, default=256, help="units of the hidden layer")
parser.add_argument("--calls", type=int, default=200, help="calls that latencies are medians of")
parser.add_argument("--directory", help="where to; a temporary one if left out")
args = parser.parse_args()

TRAIN = 1437  # of 1797 images; the rest is the test set
strategy = dtk.auto_strategy()

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]
test_images, test_labels = images[TRAIN:], labels[TRAIN:]

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(args.width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
model.fit(images[:TRAIN], labels[:TRAIN], batch_size=128, epochs=args.epochs, verbose=0)

# 1. Every rank calls `export`; rank 0 writes, and compares what it wrote with the model.


def some_images():
    for image in images[:100]:
        yield [image[np.newaxis]]


directory = args.directory or tempfile.mkdtemp()
directory = strategy.communicator.broadcast_object(directory)
eight_bits = {"optimizations": [tf.lite.Optimize.DEFAULT]}
wanted = [
    ("Keras float32", "keras", "float32.keras", {}),
    ("SavedModel float32", "tf_saved_model", "float32", {}),
    ("LiteRT float32", "litert", "float32.tflite", {}),
    ("LiteRT int8 weights", "litert", "weights8.tflite", eight_bits),
    (
        "LiteRT int8, calibrated",
        "litert",
        "int8.tflite",
        {**eight_bits, "representative_dataset": some_images},
    ),
]
if importlib.util.find_spec("tf2onnx") and importlib.util.find_spec("onnxruntime"):
    wanted.append(("ONNX float32", "onnx", "float32.onnx", {}))
elif strategy.is_chief:
    print("no ONNX: pip install './dtk[export]'")
written = {}
for title, kind, name, options in wanted:
    rows = test_images[:32]
    written[title] = dtk.inference.export(
        model, f"{directory}/{name}", kind, sample=rows, **options
    )

# 2. Weights in 8 bits, by Keras, on every rank.

report = dtk.inference.quantize(model)
for title, kind, name in (
    ("Keras int8", "keras", "int8.keras"),
    ("SavedModel int8", "tf_saved_model", "int8"),
):
    written[title] = dtk.inference.export(
        model, f"{directory}/{name}", kind, sample=test_images[:32]
    )

# 3. What came out.

if strategy.is_chief:
    print(f"Keras: {report}")
    print(f"{'':26}{'accuracy':>8}{'kB on disk':>12}   latency of one image: median (quartiles)")
    for title, path in written.items():
        run = dtk.inference.load(path)
        if title == "LiteRT int8, calibrated":  # made for the images one by one
            logits = np.concatenate([run(image[np.newaxis]) for image in test_images])
        else:
            logits = run(test_images)
        accuracy = np.mean(np.argmax(logits, -1) == test_labels)
        one = test_images[:1]
        latency = dtk.inference.latency(lambda: run(one), args.calls)  # noqa: B023
        size = dtk.inference.size_of(path) / 1e3
        print(f"{title:26}{accuracy:8.4f}{size:12.1f}   {latency}")
strategy.communicator.barrier()  # a rank that ends early is taken for a dead one
