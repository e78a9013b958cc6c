"""Blocks of weights on parameter servers, and the copies that workers keep of them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from dtk.compat import tf_servers
from dtk.even_division import even_bounds
from dtk.nests import Array
from dtk.parameter_server.proximal.methods import soft_threshold


class Blocks:
    """Weights on the servers, cut along their first axis."""

    def __init__(self, weights: Array, count: int, servers: int, parts: int):
        self.spans = [even_bounds(len(weights), block, count) for block in range(count)]
        self.dtype = tf.as_dtype(weights.dtype)
        self.variables = []
        for block, (begin, end) in enumerate(self.spans):
            with tf.device(tf_servers.server_device(block % servers)):
                self.variables.append(tf.Variable(weights[begin:end], trainable=False))
        # Number of updates of each block; only the main thread changes it.
        self.updates = [0] * count
        self._free: list[collections.deque[tf.Variable]] = [
            collections.deque() for _ in range(count)
        ]
        # Traced here: TensorFlow tells every task of a function, and later a task may be slow.
        self._commits = {
            device: self._commit_on(device, parts)
            for device in {variable.device for variable in self.variables}
        }

    def __len__(self) -> int:
        return len(self.spans)

    def bytes_of(self, block: int) -> int:
        """Return the size of a block, in bytes."""
        return self.variables[block].shape.num_elements() * self.dtype.size

    def whole(self) -> Array:
        """Return all of the weights, read from the servers."""
        return np.concatenate([variable.numpy() for variable in self.variables])

    def buffer(self, block: int) -> tf.Variable:
        """Return a variable for a gradient of a block, on the block's server.

        The buffer of a lost worker is never reused: the worker may come back and write to it.
        """
        try:
            return self._free[block].pop()
        except IndexError:
            variable = self.variables[block]
            with tf.device(variable.device):
                return tf.Variable(tf.zeros(variable.shape, self.dtype), trainable=False)

    def apply(self, block: int, buffers: Sequence[tf.Variable], rate: float, l1: float) -> None:
        """Set w to soft_threshold(w - rate * sum g, rate * l1), on the block's server."""
        variable = self.variables[block]
        numbers = [tf.constant(number, self.dtype) for number in (rate, rate * l1)]
        handles = [buffer.handle for buffer in buffers]
        self._commits[variable.device](variable.handle, handles, *numbers)
        self.updates[block] += 1
        self._free[block].extend(buffers)

    def _commit_on(self, device: str, parts: int) -> tf.types.experimental.ConcreteFunction:
        def read(handle: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype)

        def commit(
            weights: tf.Tensor, buffers: list[tf.Tensor], rate: tf.Tensor, threshold: tf.Tensor
        ) -> None:
            with tf.device(device):
                old = read(weights)
                gradient = tf.add_n([read(buffer) for buffer in buffers])
                new = soft_threshold(old - rate * gradient, threshold)
                tf.raw_ops.AssignVariableOp(resource=weights, value=new)

        handle, number = tf.TensorSpec([], tf.resource), tf.TensorSpec([], self.dtype)
        function = tf.function(commit, autograph=False)
        return function.get_concrete_function(handle, [handle] * parts, number, number)


class Copy:
    """A worker's copy of weights and rows, as tensors on the worker; only its thread uses it."""

    def __init__(self, blocks: Blocks, parts: Sequence[tuple[Array, ...]]):
        self._blocks, self._parts = blocks, parts
        self.copied = 0
        self.forget()

    def forget(self) -> None:
        """Forget everything: the worker is lost."""
        self._weights: list[tf.Tensor] = [None] * len(self._blocks)
        self._updates = [-1] * len(self._blocks)
        self._rows: dict[int, list[tf.Tensor]] = {}
        self._pulled = 0

    @contextlib.contextmanager
    def forgetting_on_error(self) -> Iterator[None]:
        """Forget everything if the block raises."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def weights(self) -> list[tf.Tensor]:
        """Return every block; pull the updated ones again. Call on the worker."""
        for block, updates in enumerate(self._blocks.updates):
            # The count is older than the value: at worst a block is pulled once too often.
            if self._updates[block] < updates:
                self._weights[block] = self._blocks.variables[block].read_value()
                self._updates[block] = updates
                self._pulled += self._blocks.bytes_of(block)
        return list(self._weights)

    def rows(self, part: int) -> list[tf.Tensor]:
        """Return the rows of a part; the first call sends them. Call on the worker."""
        if part not in self._rows:
            arrays = self._parts[part]
            self._rows[part] = [tf.constant(array) for array in arrays]
            self.copied += sum(array.nbytes for array in arrays)
        return self._rows[part]

    def take_pulled(self) -> int:
        """Return the bytes pulled since the last call."""
        pulled, self._pulled = self._pulled, 0
        return pulled
