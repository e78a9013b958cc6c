"""Layouts of gradient buffers for compressed gradients; the worker keeps the rest."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.exchange import codec, quantized
from dtk.parameter_server.gradient_buffers import BufferLayout, BufferSlot, Weight


class FilteredLayout(BufferLayout):
    """Layout with a few entries and their positions in a dense slot, or with all entries."""

    def __init__(self, weights: Sequence[Weight], sparse: set[int], significant: float):
        super().__init__(weights, sparse)
        self._significant = significant
        self._positions = [
            BufferSlot(slot.device, tf.int32, slot.holds, True) for slot in self.dense
        ]
        self.slots = [*self.dense, *self._positions, *self.rows]

    def compress(
        self, contents: Sequence[tf.Tensor], rate: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Choose the significant entries; rows of tables are sent whole. Called while tracing."""
        sent, positions, kept = [], [], []
        for dense in contents[: len(self.dense)]:
            changes = tf.abs(dense) * tf.cast(rate, dense.dtype)
            where = tf.cast(tf.where(changes > self._significant)[:, 0], tf.int32)
            # A position takes four bytes.
            shorter = tf.size(where) * (4 + dense.dtype.size) < tf.size(dense) * dense.dtype.size
            values = tf.gather(dense, where)
            rest = tf.tensor_scatter_nd_update(dense, where[:, None], tf.zeros_like(values))
            sent.append(tf.cond(shorter, lambda v=values: v, lambda d=dense: d))
            positions.append(tf.cond(shorter, lambda w=where: w, lambda w=where: w[:0]))
            kept.append(tf.cond(shorter, lambda r=rest: r, lambda d=dense: tf.zeros_like(d)))
        rows = list(contents[len(self.dense) :])
        return [*sent, *positions, *rows], [*kept, *(row[:0] for row in rows)]

    def _read_dense(
        self, slot: BufferSlot, buffers: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        positions = self._positions[self.dense.index(slot)]
        size = sum(self._size(index) for index in slot.holds)
        return [
            tf.cond(
                tf.size(values) == size,
                lambda v=values: v,
                lambda v=values, w=where: tf.scatter_nd(w[:, None], v, [size]),
            )
            for values, where in zip(
                self._read(slot, buffers), self._read(positions, buffers), strict=True
            )
        ]


class QuantizedLayout(BufferLayout):
    """Layout with a few bits for each entry of a kernel; vectors and rows of tables are whole.

    Each dense slot has a second slot for codes, and itself holds only what is not coded.
    """

    def __init__(self, weights: Sequence[Weight], sparse: set[int], bits: int):
        super().__init__(weights, sparse)
        self._bits = bits
        self._codes = [BufferSlot(slot.device, tf.uint8, slot.holds) for slot in self.dense]
        self.slots = [*self.dense, *self._codes, *self.rows]

    def compress(
        self, contents: Sequence[tf.Tensor], rate: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Encode kernels; also return the loss, for the worker to keep. Called while tracing."""
        del rate
        sent, sent_codes, kept = [], [], []
        for slot, flat in zip(self.dense, contents, strict=False):
            whole, codes, left = [], [], []
            for index, part in zip(slot.holds, self._cut(slot, flat), strict=True):
                if not self._is_coded(index):
                    whole.append(part)
                    left.append(tf.zeros_like(part))
                    continue
                shape = tuple(self.weights[index].shape)
                matrix = codec.to_columns(tf.reshape(part, shape))
                code = codec.encode(matrix, self._bits)
                lost = matrix - codec.decode(code, matrix.shape[1], self._bits)
                codes.append(code)
                left.append(tf.reshape(codec.from_columns(lost, shape, slot.dtype), [-1]))
            sent.append(tf.concat([*whole, tf.zeros([0], slot.dtype)], 0))
            sent_codes.append(codec.to_bytes(codes))
            kept.append(tf.concat(left, 0))
        rows = list(contents[len(self.dense) :])
        return [*sent, *sent_codes, *rows], [*kept, *(row[:0] for row in rows)]

    def _is_coded(self, index: int) -> bool:
        weight = self.weights[index]
        return quantized.is_coded(tuple(weight.shape), tf.as_dtype(weight.dtype), self._bits)

    def _cut(self, slot: BufferSlot, flat: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(flat, [self._size(index) for index in slot.holds])

    def _read_dense(
        self, slot: BufferSlot, buffers: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        codes = self._codes[self.dense.index(slot)]
        return [
            self._joined(slot, whole, code)
            for whole, code in zip(
                self._read(slot, buffers), self._read(codes, buffers), strict=True
            )
        ]

    def _joined(self, slot: BufferSlot, whole: tf.Tensor, code: tf.Tensor) -> tf.Tensor:
        """Decode the contents of one slot, in the order of its weights."""
        coded = [index for index in slot.holds if self._is_coded(index)]
        shapes = {index: tuple(self.weights[index].shape) for index in slot.holds}
        matrices = [codec.matrix_shape(shapes[index]) for index in coded]
        length = sum(codec.bytes_of(*matrix, self._bits) for matrix in matrices)
        codes = codec.from_bytes(
            tf.reshape(code, (1, length)),
            [columns for columns, _ in matrices],
            [entries for _, entries in matrices],
            self._bits,
        )
        decoded = {
            index: codec.decode(one, entries, self._bits)
            for index, one, (_, entries) in zip(coded, codes, matrices, strict=True)
        }
        sizes = [self._size(index) for index in slot.holds if index not in decoded]
        others = iter(tf.split(whole, sizes) if sizes else [])
        return tf.concat(
            [
                tf.reshape(codec.from_columns(decoded[i], shapes[i], slot.dtype), [-1])
                if i in decoded
                else next(others)
                for i in slot.holds
            ],
            0,
        )
