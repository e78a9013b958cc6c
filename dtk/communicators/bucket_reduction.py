"""An all-reduce of many dense tensors, in few buckets of dtypes that a backend can reduce."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from dtk.communicators import buckets, wire
from dtk.communicators.messages import CollectiveMessage


class BucketReduction:
    """An all-reduce of a list of dense tensors."""

    def __init__(
        self, tensors: list[tf.Tensor], op: str, limit: int, native: frozenset[tf.DType]
    ) -> None:
        packed, self._layout = buckets.pack(tensors, limit)
        self._tensors = tensors
        self._encoded = [wire.for_reducing(bucket, op, native) for bucket in packed]
        # Only bool changes its op, so there are one or two groups.
        self._places = {
            wire_op: [i for i, item in enumerate(self._encoded) if item[1] == wire_op]
            for wire_op in dict.fromkeys(item[1] for item in self._encoded)
        }

    def message(
        self,
        reduce: Callable[[list[tf.Tensor], str, str], list[tf.Tensor]],
        size: int,
        label: Callable[[str], str],
    ) -> CollectiveMessage:
        """Return the collective that reduces the buckets and cuts them into tensors again."""
        labels = {wire_op: label(f"reduce/{wire_op}") for wire_op in self._places}

        def send(flat: list[tf.Tensor], lane: int) -> list[tf.Tensor]:
            del lane
            for wire_op, chosen in self._places.items():
                base_op = "sum" if wire_op == "mean" else wire_op
                outputs = reduce([flat[i] for i in chosen], base_op, labels[wire_op])
                for i, output in zip(chosen, outputs, strict=True):
                    flat[i] = output
            return flat

        def finish(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
            decoded = [
                decode(mean(output, size) if wire_op == "mean" else output)
                for (_, wire_op, decode), output in zip(self._encoded, outputs, strict=True)
            ]
            return buckets.unpack(decoded, self._tensors, self._layout)

        return CollectiveMessage([item[0] for item in self._encoded], send, finish)


def mean(total: tf.Tensor, size: int) -> tf.Tensor:
    """Return a sum over all ranks divided by their number, in the sum's dtype."""
    return total / tf.cast(size, total.dtype)
