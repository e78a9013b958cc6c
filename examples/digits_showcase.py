"""CNTK's MNIST showcase: everything its training session could do, in plain Keras.

    dtk run -n 2 examples/digits_showcase.py
    dtk run -n 2 examples/digits_showcase.py           # again: goes on from its checkpoint

Handwritten digits, learned with one bit per gradient entry after a warm start. The rate is given
per sample and the momentum as a time constant, and stay so while the minibatch grows by a schedule;
cross-validation halves the rate where it gains too little; checkpoints, progress after 1, 2, 4, 8,
... minibatches, and a test at the end.
"""

import argparse

import dtk
import keras
import numpy as np
from dtk.callbacks import (
    BatchSizeSchedule,
    Checkpoint,
    CommunicationStats,
    FinalTest,
    HalveRate,
    ProgressPrinter,
    SampleRate,
)
from dtk.exchange import Quantized, WarmStart
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Digits with everything CNTK's showcase had.")
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--checkpoints", metavar="DIR", default="showcase")
parser.add_argument("--warm", type=int, default=2 * 1257, help="samples of the warm start")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16 - 0.5
order = np.random.default_rng(0).permutation(len(images))
(x, x_held, x_test), (y, y_held, y_test) = (
    np.split(values[order], [1257, 1437]) for values in (images, labels)
)

keras.utils.set_random_seed(1)
strategy = dtk.strategies.AllReduceStrategy(exchange=WarmStart(Quantized(bits=1), args.warm))
batch = 32
rate = SampleRate(0.02, time_constant=256)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="gelu"),
            keras.layers.Flatten(),
            keras.layers.Dense(96, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(momentum=0.9),  # both numbers are SampleRate's
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    x,
    y,
    batch_size=batch,
    epochs=args.epochs,
    verbose=0,
    callbacks=[
        rate,
        BatchSizeSchedule([(4, batch), (4, 2 * batch), (1, 4 * batch)]),
        HalveRate(2000, (x_held, y_held), monitor=lambda numbers: 1 - numbers["accuracy"]),
        Checkpoint(args.checkpoints),
        CommunicationStats(),
        ProgressPrinter(freq=0),
        FinalTest(x_test, y_test),
    ],
)
if strategy.is_chief:
    last = float(model.optimizer.learning_rate)
    print(f"{rate.rate:.4g} per sample: rate {last:.4g}, momentum {rate.momentum:.4f} in the end")
if strategy.is_chief and strategy.size > 1 and history.epoch:
    first, last = (history.history["comm_bytes"][i] for i in (0, -1))
    print(f"a step sent {first / 1e3:.1f} kB at first, and {last / 1e3:.1f} kB in the end")
