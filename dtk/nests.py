"""Names for the structures of tensors, of numbers and of settings that TensorFlow and Keras take.

To mypy a tensor is whatever is done with it: TensorFlow ships no types. What a structure is made of
is known all the same, and these names say it. Nothing is imported for them when dtk runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

# One tensor with rows: dense, ragged or sparse.
Leaf: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"

# A NumPy array of any shape. Its entries are open, as those of a tensor: `np.ndarray` alone says
# it with an `Any` of NumPy's.
Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[tf.DType]]"

# A structure of tensors, as `tf.nest` walks through it: a batch, a model's outputs, what a step
# returns. None marks an absent part.
Nest: TypeAlias = "Leaf | tuple[Nest, ...] | list[Nest] | dict[str, Nest] | None"

# A structure of what tensors look like, alike to the structure of the tensors themselves.
Specs: TypeAlias = "tf.TypeSpec | tuple[Specs, ...] | list[Specs] | dict[str, Specs] | None"

# What Keras tells callbacks of a step or an epoch: the name of a metric -> its value, a Python
# number or a scalar tensor.
Logs: TypeAlias = "dict[str, float | tf.Tensor]"

# What an object of Keras is made again from, as it is written to JSON.
Config: TypeAlias = "dict[str, object]"
