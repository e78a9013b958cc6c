"""A small network learns from a large one, on all workers: accuracy, size and latency of both.

    dtk run -n 2 examples/distill_digits.py

A large CNN learns scikit-learn's digits. A small one learns the same labels, and another small one
learns labels and what the large one says of each image (Hinton et al. 2015), by Keras's own
`Distiller`. The last row has the weights of that one in 8 bits.
"""

import argparse
import tempfile

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Distil a network that knows digits.")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--width", type=int, default=32, help="filters of the teacher's first layer")
parser.add_argument("--temperature", type=float, default=8.0)
parser.add_argument("--calls", type=int, default=200, help="calls that latencies are medians of")
args = parser.parse_args()

TRAIN = 1437  # of 1797 images; the rest is the test set
strategy = dtk.auto_strategy()

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]
test_images, test_labels = images[TRAIN:], labels[TRAIN:]


def build_teacher():
    layers = [
        keras.layers.Conv2D(args.width, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(2 * args.width, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(8 * args.width, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def build_student():
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def train(build, seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build()
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(images[:TRAIN], labels[:TRAIN], batch_size=64, epochs=args.epochs, verbose=0)
    return model


def distilled_student():
    return keras.distillation.Distiller(
        teacher,
        build_student(),
        # Not the name "kl_divergence", which is the default: see docs/inference.md.
        keras.distillation.LogitsDistillation(args.temperature, keras.losses.KLDivergence()),
        student_loss_weight=0.3,
    )


teacher = train(build_teacher, seed=1)
alone = train(build_student, seed=2)
student = train(distilled_student, seed=2).student

# Every rank calls `export` and `quantize`; rank 0 writes.

directory = strategy.communicator.broadcast_object(tempfile.mkdtemp())
written = {}
for title, model in (("teacher", teacher), ("alone", alone), ("distilled", student)):
    path = f"{directory}/{title}.keras"
    written[title] = dtk.inference.export(model, path, "keras", strategy=strategy)
report = dtk.inference.quantize(student, strategy=strategy)
path = f"{directory}/int8.keras"
written["distilled, in 8 bits"] = dtk.inference.export(student, path, "keras", strategy=strategy)

if strategy.is_chief:
    print(f"student: {report}")
    print(f"{'':22}{'accuracy':>8}{'kB on disk':>12}   latency of one image: median (quartiles)")
    for title, path in written.items():
        run = dtk.inference.load(path)
        accuracy = np.mean(np.argmax(run(test_images), -1) == test_labels)
        one = test_images[:1]
        latency = dtk.inference.latency(lambda: run(one), args.calls)  # noqa: B023
        size = dtk.inference.size_of(path) / 1e3
        print(f"{title:22}{accuracy:8.4f}{size:12.1f}   {latency}")
strategy.communicator.barrier()  # a rank that ends early is taken for a dead one
