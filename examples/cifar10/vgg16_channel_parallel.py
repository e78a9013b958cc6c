"""VGG-16 with the channels of its convolutions divided among ranks, as in ChainerMN's talk.

    dtk run -n 2 examples/cifar10/vgg16_channel_parallel.py --data digits
    dtk run -n 2 examples/cifar10/vgg16_channel_parallel.py --synthetic --steps 4
    python examples/cifar10/vgg16_channel_parallel.py --synthetic --steps 4     # whole

Simonyan and Zisserman 2015 (arXiv:1409.1556), of keras.applications, on images of 32 x 32. Every
rank sees the whole batch, computes some of the filters of each layer, and gathers those of the
others. ChainerMN found it 2 to 3 times slower than one GPU; it is for models that do not fit.
"""

import argparse
import resource
import time

import dtk
import keras
import numpy as np

from data import NAMES, load, mean_image

parser = argparse.ArgumentParser(description="Train VGG-16 by channels.")
parser.add_argument("--data", choices=NAMES, default="cifar10")
parser.add_argument("--synthetic", dest="data", action="store_const", const="synthetic")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--steps", type=int, help="of an epoch; all without")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--units", type=int, default=512, help="of the two dense layers")
args = parser.parse_args()


def build_vgg16():
    """VGG-16 for ten classes; its dense layers have fewer units, as images are small."""
    features = keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    x = keras.layers.Flatten(name="flatten")(features.output)
    for name in ("fc1", "fc2"):
        x = keras.layers.Dense(args.units, "relu", name=name)(x)
    return keras.Model(features.input, keras.layers.Dense(10, name="predictions")(x))


class Clock(keras.callbacks.Callback):
    """Times of the ends of steps."""

    def on_train_begin(self, logs=None):
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())


strategy = dtk.strategies.AllReduceStrategy(model_parallel=dtk.cluster.detect().size)
group = strategy.model_communicator
keras.utils.set_random_seed(1)
found = load(args.data, strategy)
rows = None if args.steps is None else args.steps * args.batch_size
(x, y), (x_test, y_test) = found.train, found.test
mean = mean_image(found)
with strategy.scope():
    plan = {"block*_conv*": "channels", "fc1": "channels", "fc2": "channels"}
    model = dtk.layers.parallelize(build_vgg16(), plan)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
clock, before = Clock(), group.bytes_sent
history = model.fit(
    (x[:rows] - mean) / 64,
    y[:rows],
    batch_size=args.batch_size,
    epochs=args.epochs,
    verbose=0,
    callbacks=[clock],
)
sent = (group.bytes_sent - before) / len(clock.times) / 1e6
_, accuracy = model.evaluate((x_test[:256] - mean) / 64, y_test[:256], verbose=0)
if strategy.is_chief:
    seconds = np.diff(clock.times)[1:]  # without the first step, which is traced
    speed = f"{1e3 * np.median(seconds):.0f} ms a step" if seconds.size else "too few steps to time"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    here = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    print(f"{found.title}: loss {history.history['loss'][-1]:.4f}, test accuracy {accuracy:.4f}")
    print(f"{group.size} rank(s) for one model: {speed}, {sent:.1f} MB sent in it")
    print(f"rank 0 holds {here / 1e6:.2f} M weights, and at most {memory:.0f} MiB")
