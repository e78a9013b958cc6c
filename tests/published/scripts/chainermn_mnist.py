"""After ChainerMN's examples/mnist/train_mnist.py, as a Keras script.

ChainerMN scatters the dataset and each worker makes minibatches of its part; here that is one
line less, and every rank is given the whole.
"""

import argparse

import dtk
import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="ChainerMN example: MNIST")
parser.add_argument("--batchsize", "-b", type=int, default=16, help="of all workers")
parser.add_argument("--epoch", "-e", type=int, default=3)
parser.add_argument("--out", "-o", default="result")
parser.add_argument("--resume", "-r", default="")
parser.add_argument("--unit", "-u", type=int, default=16)
args = parser.parse_args([])

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(36)
if strategy.rank == 0:
    print(f"Num process (COMM_WORLD): {strategy.size}")

data = load_digits()
x, y = (data.data[:70] / 16).astype("float32"), data.target[:70].astype("int64")
train, test = (x[:49], y[:49]), (x[49:], y[49:])

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Dense(args.unit, activation="tanh"),
            keras.layers.Dense(args.unit, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    *train,
    batch_size=args.batchsize,
    epochs=args.epoch,
    validation_data=test,
    callbacks=[keras.callbacks.CSVLogger(f"{args.out}.csv")],
    verbose=2,
)

result = {"weights": model.get_weights(), "history": history.history}
