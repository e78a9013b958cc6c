"""A multi-layer perceptron on the digits, its two halves on a rank each.

    dtk run -n 2 examples/pipeline_mlp.py
    dtk run -n 4 examples/pipeline_mlp.py                  # two replicas of two stages
    dtk run -n 2 examples/pipeline_mlp.py --schedule 1f1b --microbatches 8
    python examples/pipeline_mlp.py                        # both stages in one process

Each rank holds the weights of its own stage only; losses, metrics and predictions are those of the
whole model, and so are checkpoints, which resume on any number of ranks.
"""

import argparse

import dtk
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Train a perceptron in two pipelined stages.")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
parser.add_argument("--width", type=int, default=256, help="units of each hidden layer")
parser.add_argument("--checkpoints", metavar="DIR", help="save there, and resume from there")
args = parser.parse_args()


def load():
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16 - 0.5
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], labels[order]


def build_stages():
    def hidden():
        return keras.layers.Dense(args.width, activation="gelu")

    front = keras.Sequential([keras.Input((64,)), hidden(), hidden(), keras.layers.Dropout(0.1)])
    back = keras.Sequential([keras.Input((args.width,)), hidden(), keras.layers.Dense(10)])
    return [front, back]


processes = dtk.cluster.detect().size
strategy = dtk.strategies.AllReduceStrategy(model_parallel=1 if processes == 1 else 2)
keras.utils.set_random_seed(1)
images, labels = load()
with strategy.scope():
    model = dtk.layers.Pipeline(build_stages(), args.microbatches, args.schedule)
    model.compile(
        optimizer=keras.optimizers.Adam(0.002, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
callbacks = [dtk.callbacks.Checkpoint(args.checkpoints)] if args.checkpoints else []
model.fit(
    images[:1437],
    labels[:1437],
    batch_size=128,
    epochs=args.epochs,
    verbose=0,
    callbacks=callbacks,
)
loss, accuracy = model.evaluate(images[1437:], labels[1437:], verbose=0)
held = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
weights = dtk.layers.whole(model).get_weights()
everything = sum(int(w.size) for w in weights)
print(f"rank {strategy.rank} holds {held} of {everything} weights")
if strategy.is_chief:
    norm = float(np.sqrt(sum(np.sum(np.square(w, dtype=np.float64)) for w in weights)))
    print(f"test accuracy {accuracy:.4f}, loss {loss:.4f}, norm of all weights {norm:.5f}")
