"""One model on all ranks: rows of images in its convolutions, channels in its dense layers.

    dtk run -n 2 examples/model_parallel.py
    dtk run -n 4 examples/model_parallel.py --ranks 2    # two replicas of two ranks each
    python examples/model_parallel.py                 # the same numbers, from one process

The ranks of a replica see the same rows of a batch, and each holds part of the model.
"""

import argparse

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train a model that is divided among ranks.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--ranks", type=int, help="that hold one model; all without")
args = parser.parse_args()

ranks = args.ranks or dtk.cluster.detect().size
strategy = dtk.strategies.AllReduceStrategy(model_parallel=ranks)
group = strategy.model_communicator  # the ranks that hold the parts of this one's model
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", name="conv1"),
            keras.layers.BatchNormalization(synchronized=True, name="norm1"),
            keras.layers.Activation("gelu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu", name="conv2"),
            keras.layers.MaxPooling2D(name="pool"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "gelu", name="hidden"),
            keras.layers.Dense(10, name="head"),
        ]
    )
    plan = {"conv*": "rows", "norm1": "rows", "pool": "rows", "hidden": "output", "head": "input"}
    model = dtk.layers.parallelize(model, plan)
    model.compile(
        keras.optimizers.Adam(0.002),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    images[:1437], labels[:1437], batch_size=128, epochs=args.epochs, shuffle=False, verbose=0
)
steps = args.epochs * -(-1437 // 128)
_, accuracy = model.evaluate(images[1437:], labels[1437:], batch_size=360, verbose=0)
if strategy.is_chief:
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}")
    here = whole = 0
    for variable in model.trainable_variables:
        shard = dtk.layers.shard_of(variable)
        here += np.prod(variable.shape)
        whole += np.prod(shard.whole_shape(variable.shape) if shard else variable.shape)
    sent = group.bytes_sent / steps / 1e3
    print(f"test accuracy {accuracy:.4f} with {group.size} rank(s) for one model")
    print(f"{here} of {whole} weights are here; a step sends {sent:.1f} kB")
