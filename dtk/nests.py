"""Type names for the structures of tensors, numbers and settings of TensorFlow and Keras.

TensorFlow ships no types, so mypy takes a tensor for Any; these names describe at least the
structures. They import nothing when dtk runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import tensorflow as tf

_Result = TypeVar("_Result")

# A tensor of any kind: dense, ragged or sparse.
Leaf: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"

# A NumPy array of any shape and, for mypy, of any dtype (`tf.DType` is untyped). `np.ndarray` alone
# means the same, through an `Any` in NumPy.
Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[tf.DType]]"

# Anything that NumPy converts to an array.
Numbers: TypeAlias = "float | Array | tf.Tensor | Sequence[Numbers]"

# A structure of tensors for `tf.nest`: a batch, a model's outputs, the logs of a step. None marks
# an absent part.
Tree: TypeAlias = "Leaf | tuple[Tree, ...] | list[Tree] | dict[str, Tree] | None"

# Specs of the tensors of a structure, in the same structure.
Specs: TypeAlias = "tf.TypeSpec | tuple[Specs, ...] | list[Specs] | dict[str, Specs] | None"

# Gradients for an optimizer, in the order of its variables; None where a variable has none.
Gradients: TypeAlias = "list[tf.Tensor | tf.IndexedSlices | None]"

# The logs of a step or an epoch for callbacks: the name of a metric -> its value, a Python number
# or a scalar tensor.
Logs: TypeAlias = "dict[str, float | tf.Tensor]"

# The arguments of a call of a Keras method.
Args: TypeAlias = "tuple[object, ...]"
Kwargs: TypeAlias = "dict[str, object]"

# The config of a Keras object, as written to JSON.
Config: TypeAlias = "dict[str, object]"

# A function with parameters that TensorFlow, Keras or a script decides. Where dtk knows them, the
# signature is written out instead.
Function: TypeAlias = Callable[..., _Result]  # type: ignore[explicit-any]
