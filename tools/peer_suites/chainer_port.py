"""Has ChainerMN's communicators and functions run over dtk's; Chainer itself stays the clone's.

Arrays go through `dtk.communicators`, and functions with gradients through `dtk.layers`. What the
receiver of a message has to know, dtk's receivers know and ChainerMN's do not, goes before it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dtk
import numpy as np
import tensorflow as tf
from dtk.communicators import plain_data
from dtk.layers import collectives

import loading


def install(clone: Path, way: str) -> None:
    """Put dtk's communicator in the place of ChainerMN's."""
    _restore_numpy()
    sys.modules["chainerx"] = chainerx = types.ModuleType("chainerx")
    chainerx.is_available, chainerx._available = lambda: False, False
    chainerx.ndarray = type("ndarray", (), {})
    # ChainerX is compiled; tests of its arrays get NumPy's.
    chainerx.array, chainerx.arange = np.array, np.arange
    chainerx.using_device = contextlib.nullcontext
    sys.path.insert(0, str(clone))
    _world()
    import chainer
    import chainermn

    communicator = _communicator_class()
    chainermn.communicators.naive_communicator.NaiveCommunicator = communicator
    for name, function in _functions().items():
        setattr(chainermn.functions, name, function)
    for name in ("chainermn.testing", "chainermn.testing.device"):
        importlib.import_module(name).get_device = lambda *_, **__: chainer.get_device("@numpy")
    loading.install(clone / "tests", lambda text, path: text.replace("import mock", MOCK))


MOCK = "from unittest import mock"


def runs(name: str) -> bool:
    """Tell which tests a machine without GPUs, and with less than 100 GB, can run."""
    return not re.search(r"gpu|nccl|large_dataset", name, re.IGNORECASE)


def _restore_numpy() -> None:
    """Give NumPy back what Chainer of 2022 uses of it."""
    for name in ("bool", "int", "float", "object", "complex"):
        np.__dict__.setdefault(name, getattr(builtins, name))
    np.sctypes = {"int": [np.int8, np.int16, np.int32, np.int64]}
    np.product = np.prod


@functools.cache
def _world() -> Any:
    return dtk.strategies.AllReduceStrategy().communicator


def _communicator_class() -> type:
    from chainermn.communicators import mpi_communicator_base, naive_communicator

    class DtkCommunicator(mpi_communicator_base.MpiCommunicatorBase):
        """ChainerMN's methods, by those of a communicator of dtk."""

        multi_node_mean_grad = naive_communicator.NaiveCommunicator.multi_node_mean_grad

        def __init__(self, mpi_comm: Any, world: Any = None) -> None:
            super().__init__(mpi_comm)
            self.world = _world() if world is None else world

        rank = property(lambda self: self.world.rank)
        size = property(lambda self: self.world.size)

        def split(self, color: int, key: int) -> Any:
            return type(self)(self.mpi_comm.Split(color, key), self.world.split(color, key))

        def send(self, data: Any, dest: int, tag: int) -> None:
            parts = data if isinstance(data, list | tuple) else [data]
            told = [isinstance(data, list | tuple), [(one.shape, str(one.dtype)) for one in parts]]
            self.send_obj(told, dest, tag)
            for one in parts:
                self.world.send(tf.constant(one), dest, tag)

        def recv(self, source: int, tag: int) -> Any:
            several, kinds = self.recv_obj(source, tag=tag)
            parts = [self.world.recv(*kind, source, tag).numpy() for kind in kinds]
            return tuple(parts) if several else parts[0]

        def bcast(self, x: Any, root: int = 0) -> Any:
            shape, dtype = self.world.broadcast_object(_kind(x), root)
            given = np.zeros(shape, dtype) if x is None else x
            return self.world.broadcast(tf.constant(given), root).numpy()

        def gather(self, x: Any, root: int = 0) -> Any:
            parts = self.allgather(x)
            return parts if self.rank == root else None

        def allgather(self, x: Any) -> Any:
            kinds = self.world.allgather_object(_kind(x))
            sizes = [int(np.prod(shape)) for shape, _ in kinds]
            rows = self.world.allgather(tf.reshape(x, [-1]), sizes)
            parts = np.split(rows.numpy(), np.cumsum(sizes)[:-1])
            return tuple(one.reshape(shape) for one, (shape, _) in zip(parts, kinds, strict=True))

        def alltoall(self, xs: Any) -> Any:
            if len(xs) != self.size:
                raise ValueError(f"{len(xs)} arrays for {self.size} ranks")
            kinds = self.world.allgather_object([_kind(x) for x in xs])
            flat = tf.concat([tf.reshape(x, [-1]) for x in xs], 0)
            rows, sizes = self.world.alltoall(flat, [x.size for x in xs])
            parts = np.split(rows.numpy(), np.cumsum(sizes)[:-1])
            mine = [kind[self.rank][0] for kind in kinds]
            return tuple(one.reshape(shape) for one, shape in zip(parts, mine, strict=True))

        def scatter(self, xs: Any, root: int = 0) -> Any:
            none = [np.zeros(0, "int8")] * self.size
            kinds = self.world.broadcast_object(
                None if xs is None else [_kind(x) for x in xs], root
            )
            xs = [x if self.rank == root else none[0].astype(kinds[0][1]) for x in xs or none]
            return self.alltoall(xs)[root].reshape(kinds[self.rank][0])

        def allreduce(self, x: Any) -> Any:
            return self.world.allreduce(tf.constant(x)).numpy()

        def _multi_node_mean(self, sendbuf: Any, recvbuf: Any) -> None:
            given = recvbuf if sendbuf is None else sendbuf
            recvbuf[...] = self.world.allreduce(tf.constant(given), "mean").numpy()

        def bcast_data(self, model: Any) -> None:
            for _, param in sorted(model.namedparams()):
                if param.data is not None:
                    param.data[...] = self.bcast(param.data)

        def bcast_obj(self, obj: Any, max_buf_len: int = 0, root: int = 0) -> Any:
            return self.world.broadcast_object(obj, root)

        def gather_obj(self, obj: Any, root: int = 0) -> Any:
            everyone = self.world.allgather_object(obj)
            return everyone if self.rank == root else None

        def allreduce_obj(self, obj: Any) -> Any:
            return functools.reduce(lambda a, b: a + b, self.world.allgather_object(obj))

        def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
            written = np.frombuffer(plain_data.encode(obj), "uint8")
            self.world.send(tf.constant([written.size], tf.int64), dest, tag)
            self.world.send(tf.constant(written), dest, tag)

        def recv_obj(self, source: int, status: Any = None, tag: int = 0) -> Any:
            size = int(self.world.recv([1], "int64", source, tag)[0])
            return plain_data.decode(self.world.recv([size], "uint8", source, tag).numpy().data)

    return DtkCommunicator


def _kind(x: Any) -> tuple[tuple[int, ...], str] | None:
    return None if x is None else (tuple(x.shape), str(x.dtype))


def _functions() -> dict[str, Callable[..., Any]]:
    """ChainerMN's functions, by those of `dtk.layers`."""
    import chainer

    class Through(chainer.Function):
        """A function of TensorFlow as one of Chainer's."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def forward(self, inputs: Any) -> Any:
            self.given = [tf.constant(x) for x in inputs]
            with tf.GradientTape() as self.tape:
                self.tape.watch(self.given)
                self.made = self.function(*self.given)
            return tuple(np.asarray(y) for y in self.made)

        def backward(self, inputs: Any, grad_outputs: Any) -> Any:
            given = zip(self.made, grad_outputs, strict=True)
            grads = [tf.zeros_like(y) if g is None else tf.constant(g) for y, g in given]
            found = self.tape.gradient(self.made, self.given, grads)
            return tuple(None if one is None else np.asarray(one) for one in found)

    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        none = chainer.Variable(np.zeros(0, "float32"))  # so that there is something to go back to
        made = Through(lambda *xs: function(*xs[:-1]))(*inputs, none)
        return made if isinstance(made, tuple) else (made,)

    def parts(rows: Any, kinds: Any) -> list[Any]:
        pieces = tf.split(rows, [int(np.prod(shape)) for shape, _ in kinds])
        return [tf.reshape(one, shape) for one, (shape, _) in zip(pieces, kinds, strict=True)]

    def allgather(comm: Any, x: Any) -> Any:
        kinds = comm.world.allgather_object(_kind(x))
        flat = lambda x: collectives.allgather(tf.reshape(x, [-1]), comm.world)  # noqa: E731
        return run(lambda x: parts(flat(x), kinds), x)

    def alltoall(comm: Any, xs: Any) -> Any:
        kinds = [one[comm.rank] for one in comm.world.allgather_object([_kind(x) for x in xs])]

        def exchanged(*xs: Any) -> Any:
            flat = tf.concat([tf.reshape(x, [-1]) for x in xs], 0)
            return parts(collectives.alltoall(flat, comm.world, [tf.size(x) for x in xs])[0], kinds)

        return run(exchanged, *xs)

    def bcast(comm: Any, x: Any, root: int = 0) -> Any:
        shape, dtype = comm.world.broadcast_object(_kind(x), root)
        x = chainer.Variable(np.zeros(shape, dtype)) if x is None else x
        return run(lambda x: [collectives.broadcast(x, comm.world, root)], x)[0]

    def gather(comm: Any, x: Any, root: int = 0) -> Any:
        kinds = comm.world.allgather_object(_kind(x))

        def gathered(x: Any) -> Any:
            rows = collectives.gather(tf.reshape(x, [-1]), comm.world, root)
            return parts(rows, kinds) if comm.rank == root else [rows]

        made = run(gathered, x)
        return made if comm.rank == root else made[0]

    def scatter(comm: Any, xs: Any, root: int = 0) -> Any:
        kinds = comm.world.broadcast_object(None if xs is None else [_kind(x) for x in xs], root)
        sizes = [int(np.prod(shape)) for shape, _ in kinds]
        given = xs if comm.rank == root else [np.zeros(0, kinds[0][1])]

        def scattered(*xs: Any) -> Any:
            flat = tf.concat([tf.reshape(x, [-1]) for x in xs], 0)
            mine = collectives.scatter(flat, comm.world, root, sizes)
            return [tf.reshape(mine, kinds[comm.rank][0])]

        return run(scattered, *given)[0]

    def send(x: Any, comm: Any, rank: int, tag: int = 0) -> Any:
        if rank == comm.rank:
            raise ValueError(f"rank {rank} cannot send to itself")
        xs = list(x) if isinstance(x, list | tuple) else [x]
        comm.send_obj([_kind(x) for x in xs], rank, tag)

        def sent(*xs: Any) -> Any:
            return [tf.add_n([collectives.send(x, comm.world, rank, tag) for x in xs])]

        return run(sent, *xs)[0]

    def recv(
        comm: Any, rank: int, delegate_variable: Any = None, tag: int = 0, force_tuple: bool = False
    ) -> Any:
        if rank == comm.rank:
            raise ValueError(f"rank {rank} cannot receive from itself")
        kinds = comm.recv_obj(rank, tag=tag)
        given = [] if delegate_variable is None else [delegate_variable]

        def received(*tokens: Any) -> Any:
            token = tokens[0] if tokens else None
            return [collectives.recv(*kind, comm.world, rank, tag, token) for kind in kinds]

        made = run(received, *given)
        return made if force_tuple or len(made) > 1 else made[0]

    def pseudo_connect(delegate_variable: Any, *actual_variables: Any) -> Any:
        def connected(token: Any, *xs: Any) -> Any:
            return [collectives.pseudo_connect(token, x) for x in xs]

        return run(connected, delegate_variable, *actual_variables)

    return {
        made.__name__: made
        for made in (allgather, alltoall, bcast, gather, scatter, send, recv, pseudo_connect)
    }
