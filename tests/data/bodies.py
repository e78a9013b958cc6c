"""What the data tests run on every rank."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtk.communicators.local import NullCommunicator


class Twin(NullCommunicator):
    """One of `size` ranks that all say the same: what it hears from others is what it said."""

    def broadcast_object(self, value=None, root=0):
        return value

    def allgather_object(self, value):
        return [value] * self.size


def dataset(kind, count):
    """`count` rows that `rows_of` can tell."""
    numbers = np.arange(count)
    if kind == "arrays":
        return {"x": numbers.astype("float32")[:, None], "y": (numbers, numbers + 1)}
    if kind == "dataset":
        return tf.data.Dataset.from_tensor_slices((numbers, numbers + 1))
    return {
        "array": numbers,
        "tensor": tf.constant(numbers),
        "samples": [(number, np.full(number, 1.5)) for number in numbers.tolist()],
        "strings": np.array([str(number) for number in numbers]),
    }[kind]
