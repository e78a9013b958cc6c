"""A table too large for one server: partitioned, looked up by rows, updated by rows.

    dtk run -n 2 --ps 2 examples/embedding_parameter_server.py
    dtk run -n 2 --ps 3 examples/embedding_parameter_server.py --buckets 4000000 --dimension 64

The digits again, as a bag of words: every image is the set of its (pixel, grey value, neighbour's
grey value) triples, hashed into a table with many more rows than there are triples, as one does for
user and item ids. A step needs some thousand rows of the table; only these travel, from the server
that has them and back as gradients. The table itself is on no single machine.
"""

import argparse

import dtk
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="A large partitioned table with sparse updates.")
parser.add_argument("--buckets", type=int, default=1_000_000, help="rows of the table")
parser.add_argument("--dimension", type=int, default=16, help="numbers in a row")
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

strategy = dtk.strategies.ParameterServerStrategy(
    "async",
    # As many parts as there are servers, of what has at least a megabyte in each.
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=1 << 20, max_shards=16
    ),
)

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8).astype("int64")
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], labels[order]

# One id per pixel: where it is, how dark it is, and how dark the next one is.
place = np.arange(56).reshape(8, 7)
triples = (place * 17 + images[:, :, :7]) * 17 + images[:, :, 1:]
# Knuth's multiplicative hash, into the table's rows.
ids = (triples.reshape(len(images), -1) * 2654435761) % 2**32 % args.buckets

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((56,), dtype="int64"),
            keras.layers.Embedding(args.buckets, args.dimension),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(8.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(
    ids[:1437],
    labels[:1437],
    batch_size=32,
    epochs=args.epochs,
    verbose=0,
    callbacks=[dtk.callbacks.ProgressPrinter(freq=None), dtk.callbacks.ServerReport()],
)

_, accuracy = model.evaluate(ids[1437:], labels[1437:], verbose=0)
table = 4 * args.buckets * args.dimension
moved = sum(worker["pulled"] + worker["pushed"] for worker in strategy.traffic)
steps = sum(worker["steps"] for worker in strategy.traffic)
print(f"test accuracy {accuracy:.4f} after {int(model.optimizer.iterations.numpy())} steps")
print(f"the table has {table / 1e6:.1f} MB; a step moved {moved / steps / 1e6:.3f} MB")
