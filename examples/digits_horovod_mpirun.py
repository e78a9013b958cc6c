"""Handwritten digits under mpirun: over Horovod, or over MPI itself.

    dtk install-horovod                                          # once, about two minutes
    mpirun -np 2 python examples/digits_horovod_mpirun.py

The mpirun of the MPI that Horovod was built with runs it over Horovod; that of `keras-dtk[mpi]`,
which an activated environment puts first, over MPI, since Horovod does not load there. The last
line says which it was.
The script is Keras plus a strategy, a scope and callbacks. `python` alone runs it as one process.
"""

import argparse

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train on digits under mpirun.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-per-worker", type=int, default=64)
args = parser.parse_args()

strategy = dtk.auto_strategy()  # communicator="horovod" would refuse to run over anything else

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", use_bias=False),
            # the statistics of the whole global batch, not of one worker's part
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.ReLU(),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# batch_size is the global batch. It grows with the workers here, so the learning rate does too.
model.fit(
    images[:1437],
    labels[:1437],
    batch_size=args.batch_per_worker * strategy.size,
    epochs=args.epochs,
    verbose=0,
    callbacks=[
        dtk.callbacks.BroadcastVariables(root_rank=0),
        dtk.callbacks.LearningRateScaling(warmup_epochs=3),
        dtk.callbacks.ProgressPrinter(freq=None),
    ],
)

_, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
if strategy.is_chief:  # evaluate was called by all, and gave all the same answer
    name = strategy.communicator.name
    print(f"test accuracy {accuracy:.4f} with {strategy.size} worker(s) over {name}")
