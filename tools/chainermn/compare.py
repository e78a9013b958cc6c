"""Compare dtk's linked stages and iterators with ChainerMN's, see `original.py`."""

import sys

import keras
import numpy as np

import dtk

# By ChainerMN's names, in the order of a stage's weights in Keras.
NAMES = {0: ("layer/W", "layer/b"), 1: ("layer/W", "layer/b"), 2: ("a/W", "a/b", "b/W")}
TOLERANCE = 1e-6


def dense(given, name, activation=None, bias=True):
    weights = keras.initializers.Constant(given[name])
    columns = given[name].shape[1]
    return keras.layers.Dense(columns, activation, bias, kernel_initializer=weights)


def stages(given):
    def last():
        front, middle = keras.Input((4,)), keras.Input((3,))
        added = dense(given, "last_of_front")(front)
        added += dense(given, "last_of_middle", bias=False)(middle)
        return keras.Model([front, middle], added)

    return [
        lambda: keras.Sequential([keras.Input((5,)), dense(given, "front", "tanh")]),
        lambda: keras.Sequential([keras.Input((4,)), dense(given, "middle", "sigmoid")]),
        last,
    ]


def epochs(seed, rows, batch):
    random = np.random.RandomState(seed)
    while True:
        yield from random.permutation(rows).reshape(-1, batch)


def main():
    with np.load(sys.argv[1]) as kept:
        given = dict(kept)
    order, received = given["order"], given["received"]
    rows, batch = len(given["x"]), order.shape[1]
    strategy = dtk.strategies.AllReduceStrategy(model_parallel=3)
    world = strategy.world
    np.random.seed(11 if world.rank == 0 else 12)
    np.random.permutation(rows)  # ChainerMN draws its seed after SerialIterator's first order
    seed = world.broadcast_object(int(np.random.randint(0, 2**32 - 1)))
    mine = dtk.data.synchronized_iterator(lambda seed: epochs(seed, rows, batch), world, seed)
    np.testing.assert_array_equal([next(mine) for _ in order], order)
    np.random.seed(3)
    sent = np.random.permutation(rows).reshape(-1, batch).astype("float32")
    mine = dtk.data.broadcast_iterator(sent if world.rank == 0 else None, world)
    np.testing.assert_array_equal(list(mine), received)

    with strategy.scope():
        model = dtk.layers.Pipeline(stages(given), links={2: [0, 1]})
        model.compile(keras.optimizers.SGD(0.1), "mse")
    for chosen in order:
        model.train_on_batch(given["x"][chosen], given["y"][chosen])
    differences = [
        np.abs(weights.numpy() - given[f"{world.rank}/{name}"]).max()
        for weights, name in zip(model.stage.weights, NAMES[world.rank], strict=True)
    ]
    largest = max(world.allgather_object(float(max(differences))))
    if world.rank == 0:
        print(
            f"batches of both iterators are ChainerMN's; after {len(order)} steps of three linked"
        )
        print(f"stages weights differ from ChainerMN's by at most {largest:.1e}")
    assert largest <= TOLERANCE


if __name__ == "__main__":
    main()
