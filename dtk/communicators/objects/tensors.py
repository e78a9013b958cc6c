"""Kinds of TensorFlow's values: tensors, and what describes them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dtk.communicators.objects.kinds import Kind, NotPlain, exactly

# tf.Tensor is what graphs are made of, too.
_EAGER = tf.__internal__.EagerTensor
_WITHOUT_NUMBERS = (tf.resource, tf.variant)


def _of_tensor(tensor: tf.Tensor) -> list[object]:
    if tensor.dtype in _WITHOUT_NUMBERS:
        raise NotPlain(f"a tensor of dtype {tensor.dtype.name}")
    if tensor.dtype == tf.string:
        return [tensor.shape.as_list(), tf.reshape(tensor, [-1]).numpy().tolist()]
    return [np.asarray(tensor.numpy())]


def _tensor(parts: list[object]) -> tf.Tensor:
    if len(parts) == 1:
        return tf.convert_to_tensor(*exactly(parts, (np.ndarray,)))
    shape, texts = parts
    if not isinstance(texts, list) or any(type(text) is not bytes for text in texts):
        raise ValueError("strings are bytes")
    return tf.reshape(tf.constant(texts, tf.string), tf.constant(shape, tf.int64))


def _of_ragged(ragged: tf.RaggedTensor) -> list[object]:
    length = ragged.uniform_row_length
    return [ragged.values, ragged.row_splits, None if length is None else int(length)]


def _ragged(values: tf.Tensor, splits: tf.Tensor, length: int | None) -> tf.RaggedTensor:
    if type(values) not in (_EAGER, tf.RaggedTensor):
        raise ValueError(f"rows of {type(values).__name__}")
    made = tf.RaggedTensor.from_row_splits(values, splits)  # which looks at them
    if length is None:
        return made
    uniform = tf.RaggedTensor.from_uniform_row_length(values, length, made.nrows(splits.dtype))
    if not np.array_equal(uniform.row_splits, splits):
        raise ValueError("rows of another length")
    return uniform


def _of_shape(shape: tf.TensorShape) -> list[object]:
    return [None if shape.rank is None else shape.as_list()]


KINDS: dict[type, Kind] = {
    _EAGER: Kind("tf.Tensor", _of_tensor, _tensor),
    tf.RaggedTensor: Kind("tf.RaggedTensor", _of_ragged, _ragged, (None, _EAGER, None)),
    tf.SparseTensor: Kind(
        "tf.SparseTensor",
        lambda sparse: [sparse.indices, sparse.values, sparse.dense_shape],
        tf.SparseTensor,
        (_EAGER, _EAGER, _EAGER),
    ),
    tf.TensorSpec: Kind(
        "tf.TensorSpec",
        lambda spec: [spec.shape, spec.dtype, spec.name],
        tf.TensorSpec,
        (tf.TensorShape, tf.DType, None),
    ),
    tf.TensorShape: Kind("tf.TensorShape", _of_shape, tf.TensorShape, (None,)),
    tf.DType: Kind("tf.DType", lambda dtype: [dtype.name], tf.as_dtype, (str,)),
}
