"""MobileNet for inference: float32, Keras's int8 and LiteRT's, their size, latency and agreement.

    dtk run -n 2 examples/mobilenet_inference.py                  # CIFAR-10, trained for an epoch
    dtk run -n 2 examples/mobilenet_inference.py --synthetic      # random images, without the data
    dtk run -n 2 examples/mobilenet_inference.py --weights imagenet --image-size 128

MobileNet (Howard et al. 2017, arXiv:1704.04861) with a head for CIFAR-10 is trained on all workers
and exported by rank 0. Keras quantises its Dense head and no convolution; LiteRT quantises all of
it, best where it has seen some images.
"""

import argparse
import sys
import tempfile

import dtk
import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description="Export and quantise a MobileNet.")
parser.add_argument("--alpha", type=float, default=0.25, help="multiplies the number of filters")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--weights", choices=("none", "imagenet"), default="none", help="to start from")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--images", type=int, default=4096, help="how many to train on")
parser.add_argument("--test-images", type=int, default=512)
parser.add_argument("--synthetic", action="store_true", help="random images")
parser.add_argument("--calls", type=int, default=50, help="calls that latencies are medians of")
args = parser.parse_args()

NO_DATA = """
{what} not on this machine and could not be downloaded ({error}).
Next, one of:
  * {fetch}
  * {instead}"""
FETCH_CIFAR = """fetch https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz on a machine with a
    network and put it where Keras looks for it:
    ~/.keras/datasets/cifar-10-batches-py-target.tar.gz"""
FETCH_WEIGHTS = """run keras.applications.MobileNet(alpha={alpha}, include_top=False) on a machine
    with a network, and copy what it puts into ~/.keras/models to this one"""

strategy = dtk.auto_strategy()


def on_rank_0_first(load, what, fetch, instead):
    """Load what is downloaded once: rank 0 first, then the others."""
    error = None
    if strategy.is_chief:
        try:
            load()
        except Exception as failure:  # Keras raises a bare Exception
            error = str(failure).rpartition(": ")[2].strip() or repr(failure)
    error = strategy.communicator.broadcast_object(error)
    if error:
        said = NO_DATA.format(what=what, error=error, fetch=fetch, instead=instead)
        sys.exit(said if strategy.is_chief else 0)
    return load()


def load_images():
    if args.synthetic:
        random = np.random.default_rng(0)
        count = args.images + args.test_images
        labels = random.integers(0, 10, (count, 1))
        # Each class has a colour of its own, so that there is something to learn.
        colours = random.integers(0, 256, (10, 1, 1, 3))
        images = (colours[labels[:, 0]] + random.integers(0, 256, (count, 32, 32, 3))) // 2
        images = images.astype("uint8")
        return images[args.test_images :], labels[args.test_images :], images, labels
    (images, labels), (test_images, test_labels) = on_rank_0_first(
        keras.datasets.cifar10.load_data,
        "CIFAR-10 is",
        FETCH_CIFAR,
        "add --synthetic, for random images",
    )
    return images, labels, test_images, test_labels


images, labels, test_images, test_labels = load_images()
images, labels = images[: args.images], labels[: args.images]
test_images, test_labels = test_images[: args.test_images], test_labels[: args.test_images]


def prepared(images):
    images = images.astype("float32") / 127.5 - 1
    return tf.image.resize(images, (args.image_size, args.image_size)).numpy()


shape = (args.image_size, args.image_size, 3)


def build_body():
    weights = None if args.weights == "none" else args.weights
    return keras.applications.MobileNet(
        shape, args.alpha, include_top=False, weights=weights, pooling="avg"
    )


keras.utils.set_random_seed(1)
with strategy.scope():
    if args.weights == "none":
        body = build_body()
    else:
        fetch = FETCH_WEIGHTS.format(alpha=args.alpha)
        body = on_rank_0_first(
            build_body, "MobileNet's weights are", fetch, "leave --weights out, to start at random"
        )
    head = keras.layers.Dense(10, name="head")
    model = keras.Model(body.input, head(keras.layers.Dropout(0.1)(body.output)))
    model = dtk.layers.convert_sync_batchnorm(model)
    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
x, test_x = prepared(images), prepared(test_images)
# Few steps are not enough for moving averages.
statistics = dtk.callbacks.BatchNormStatistics(x, batches=8)
model.fit(x, labels, batch_size=64, epochs=args.epochs, verbose=0, callbacks=[statistics])


def some_images():
    for image in x[:100]:
        yield [image[np.newaxis]]


# Every rank calls `export` and `quantize`; rank 0 writes.

directory = strategy.communicator.broadcast_object(tempfile.mkdtemp())
eight_bits = {"optimizations": [tf.lite.Optimize.DEFAULT], "tolerance": 1.0}
written = {}
for title, kind, name, options in (
    ("Keras float32", "keras", "float32.keras", {}),
    ("LiteRT float32", "litert", "float32.tflite", {}),
    ("LiteRT int8 weights", "litert", "weights8.tflite", eight_bits),
    (
        "LiteRT int8, calibrated",
        "litert",
        "int8.tflite",
        {**eight_bits, "representative_dataset": some_images},
    ),
):
    path = f"{directory}/{name}"
    written[title] = dtk.inference.export(model, path, kind, sample=test_x[:1], **options)
report = dtk.inference.quantize(model)
path = f"{directory}/int8.keras"
written["Keras int8"] = dtk.inference.export(model, path, "keras", sample=test_x[:1])

if strategy.is_chief:
    print(f"MobileNet {args.alpha}, {shape}, {'random images' if args.synthetic else 'CIFAR-10'}")
    print(f"Keras: {report}")
    columns = f"{'accuracy':>8}{'agrees':>8}{'kB on disk':>12}"
    print(f"{'':25}{columns}   latency of one image: median (quartiles)")
    classes = None
    for title, path in written.items():
        run = dtk.inference.load(path)
        found = np.concatenate([np.argmax(run(row[np.newaxis]), -1) for row in test_x])
        classes = found if classes is None else classes
        accuracy, agrees = np.mean(found == test_labels[:, 0]), np.mean(found == classes)
        latency = dtk.inference.latency(lambda: run(test_x[:1]), args.calls)  # noqa: B023
        size = dtk.inference.size_of(path) / 1e3
        print(f"{title:25}{accuracy:8.4f}{agrees:8.4f}{size:12.1f}   {latency}")
strategy.communicator.barrier()  # a rank that ends early is taken for a dead one
