"""Names for the structures of tensors, of numbers and of settings that TensorFlow and Keras take.

To mypy a tensor is whatever is done with it: TensorFlow ships no types. What a structure is made of
is known all the same, and these names say it. Nothing is imported for them when dtk runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import tensorflow as tf

_Result = TypeVar("_Result", covariant=True)

# A tensor of any kind: dense, ragged or sparse.
Leaf: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"

# A NumPy array of any shape, whose dtype is as open to mypy as a tensor's (`tf.DType` is untyped).
# `np.ndarray` alone means the same, by an `Any` of NumPy's.
Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[tf.DType]]"

# What NumPy makes an array of.
Numbers: TypeAlias = "float | Array | tf.Tensor | Sequence[Numbers]"

# A structure of tensors, as `tf.nest` walks through it: a batch, a model's outputs, what a step
# returns. None marks an absent part.
Nest: TypeAlias = "Leaf | tuple[Nest, ...] | list[Nest] | dict[str, Nest] | None"

# What the tensors of a structure look like, in the same structure.
Specs: TypeAlias = "tf.TypeSpec | tuple[Specs, ...] | list[Specs] | dict[str, Specs] | None"

# What optimizers are given, in the order of their variables; None where a variable has none.
Gradients: TypeAlias = "list[tf.Tensor | tf.IndexedSlices | None]"

# What Keras tells callbacks of a step or an epoch: the name of a metric -> its value, a Python
# number or a scalar tensor.
Logs: TypeAlias = "dict[str, float | tf.Tensor]"

# What one of Keras's methods was called with.
Args: TypeAlias = "tuple[object, ...]"
Kwargs: TypeAlias = "dict[str, object]"

# What an object of Keras is made again from, as it is written to JSON.
Config: TypeAlias = "dict[str, object]"


class Function(Protocol[_Result]):
    """A function whose parameters are decided elsewhere: by TensorFlow, Keras or a script.

    Wherever dtk knows what it calls a function with, the signature is written out instead.
    """

    # Only Any for both means "any parameters" to mypy; with object it would be "accepts all".
    def __call__(self, *args: Any, **kwargs: Any) -> _Result:  # type: ignore[explicit-any]
        """Call the function with whatever it takes."""
