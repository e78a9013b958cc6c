"""Updates of variables that make one pass over memory where Keras 3 makes many.

SGD                    same bits: always used
Adam, AdamW            last digits differ: used between replicas, whose sums differ there anyway
any, under XLA         compiled by XLA, as in Keras

    of one optimizer     update_step                 fuse_updates
    while gradients      unsorted_segment_sum        patch_row_sums
    apply, on GPUs       resource_scatter_add, _sub
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops, gen_resource_variable_ops

from dtk import placement
from dtk.communicators.aligned_slices import once
from dtk.compat import keras_optimizers
from dtk.nests import Function
from dtk.patches import patch_around

_Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
_Operation: TypeAlias = Callable[[keras.Optimizer, list[tf.Tensor], tf.Tensor, tf.Tensor], None]
_DISTRIBUTED = tf.distribute.DistributedValues
# Elements of a variable: with fewer, compiling saves little, and each variable is compiled by
# itself.
_WORTH_COMPILING = 1 << 14
# Types of variables that TensorFlow's operations update: on GPUs it has none for bfloat16, and in
# float16 the squares of Adam overflow.
_FUSED = (tf.float32, tf.float64)


class _Update:
    """Replacement for an optimizer's `update_step`."""

    def __init__(
        self, optimizer: keras.Optimizer, operation: _Operation | None, slots: Sequence[str]
    ):
        self.compiled = False
        self._optimizer, self._operation, self._slots = optimizer, operation, slots
        self._by_parts = self.__wrapped__ = optimizer.update_step

    def __call__(
        self, gradient: _Gradient, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        if variable.shape.num_elements() == 0:
            return  # other ranks have all parts of it
        update = self._by_parts
        if isinstance(gradient, tf.IndexedSlices) or not _is_plain(variable):
            update(gradient, variable, learning_rate)
        elif self._operation is not None and variable.dtype in _FUSED:
            place = self._optimizer._get_variable_index(variable) if self._slots else 0
            # Slot copies on the same device as the updated variable.
            slots = [_local(getattr(self._optimizer, name)[place].value) for name in self._slots]
            if not all(map(_is_plain, slots)):
                update(gradient, variable, learning_rate)
                return
            rate, gradient = (tf.cast(one, variable.dtype) for one in (learning_rate, gradient))
            handles = [one.handle for one in (variable, *slots)]
            self._operation(self._optimizer, handles, gradient, rate)
        elif self.compiled and variable.shape.num_elements() >= _WORTH_COMPILING:
            compiled = tf.function(
                lambda gradient, rate: update(gradient, variable, rate),
                autograph=False,
                jit_compile=True,
            )
            compiled(gradient, tf.convert_to_tensor(learning_rate))
        else:
            update(gradient, variable, learning_rate)


def fuse_updates(optimizer: keras.Optimizer, replicas: int = 1) -> None:
    """Make an optimizer update each variable by one TensorFlow operation, where one exists.

    Keras's own update runs an operation for each product and sum, and each passes over the memory
    of the variable, the gradient and the slots: for 10.5 M weights SGD takes 13 ms instead of 6,
    with Nesterov's momentum 20 instead of 8. TensorFlow's operations for SGD compute the same bits,
    those for Adam differ by about 1e-7.
    """
    if isinstance(vars(optimizer).get("update_step"), _Update):
        return
    operation: _Operation | None = None
    slots: list[str] = []
    if keras_optimizers.has_own(optimizer, "update_step"):
        pass  # the user has replaced it, perhaps in Keras's class
    elif optimizer.__class__ is keras.optimizers.SGD:
        operation, slots = _update_sgd, ["momentums"] if optimizer.momentum != 0 else []
    elif replicas > 1 and _is_adam(optimizer):
        operation, slots = _update_adam, ["_momentums", "_velocities"]
    optimizer.update_step = _Update(optimizer, operation, slots)


@contextlib.contextmanager
def patch_row_sums(device: str) -> Iterator[None]:
    """Return a context in which a device adds rows of a table to the same bits on all replicas."""
    if not placement.is_gpu(device):  # a CPU adds in the order of the rows
        yield
        return
    thread = threading.get_ident()  # another's forward pass has derivatives, and `once` has none

    def added_once(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values, indices = tf.convert_to_tensor(values), tf.convert_to_tensor(indices)
        of_rows = values.dtype.is_floating and indices.shape.rank == 1
        ours = of_rows and threading.get_ident() == thread
        return once(values, indices) if ours else (values, indices)

    def dense(
        data: tf.Tensor,
        segment_ids: tf.Tensor,
        num_segments: tf.Tensor,
        name: str | None = None,
        *,
        original: Function[tf.Tensor],
    ) -> tf.Tensor:
        return original(*added_once(data, segment_ids), num_segments, name)

    def scatter(
        table: tf.Tensor,
        indices: tf.Tensor,
        values: tf.Tensor,
        *,
        original: Function[tf.Operation],
        **named: str | None,
    ) -> tf.Operation:
        values, lines = added_once(values, indices)
        return original(table, lines, values, **named)

    scatters = dict.fromkeys(("resource_scatter_add", "resource_scatter_sub"), scatter)
    with (
        patch_around(tf.math, unsorted_segment_sum=dense),
        patch_around(gen_math_ops, unsorted_segment_sum=dense),
        patch_around(gen_resource_variable_ops, **scatters),
    ):
        yield


def compile_updates(optimizer: keras.Optimizer, wished: bool) -> None:
    """Let XLA compile an optimizer's update of each large variable, from the next trace on.

    Each update is a separate cluster, which begins once the variable's gradient is ready. Updates
    by one TensorFlow operation stay uncompiled.
    """
    update = vars(optimizer).get("update_step")
    if isinstance(update, _Update):
        update.compiled = wished


def _is_adam(optimizer: keras.Optimizer) -> bool:
    return (
        optimizer.__class__ in (keras.optimizers.Adam, keras.optimizers.AdamW)
        and not optimizer.amsgrad
        and all(
            isinstance(number, float | int)  # and no variable
            for number in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
        )
    )


def _is_plain(variable: tf.Variable) -> bool:
    return isinstance(variable, tf.Variable) and not isinstance(variable, _DISTRIBUTED)


def _local(variable: tf.Variable) -> tf.Variable:
    return variable._get() if isinstance(variable, _DISTRIBUTED) else variable


def _update_sgd(
    optimizer: keras.optimizers.SGD, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor
) -> None:
    if len(handles) == 1:
        tf.raw_ops.ResourceApplyGradientDescent(var=handles[0], alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=handles[0],
        accum=handles[1],
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, rate.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _update_adam(
    optimizer: keras.optimizers.Adam, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor
) -> None:
    step = tf.cast(optimizer.iterations + 1, rate.dtype)
    betas = optimizer.beta_1, optimizer.beta_2
    # tf.cast rounds the betas to 32 bits first, as in Keras.
    powers = [tf.pow(tf.cast(beta, rate.dtype), step) for beta in betas]
    # The operation takes 1 - beta in the variable's type. For 0.999 this is 1.3e-5 too small; after
    # some steps weights differed by 5e-6. Then the mean is updated apart, and the operation told
    # that beta is 1, with which it leaves the mean as it is.
    told, apart = [], []
    values = gradient, tf.square(gradient)
    for beta, handle, value in zip(betas, handles[1:], values, strict=True):
        exact = _is_exact(beta, rate.dtype)
        told.append(tf.constant(beta if exact else 1.0, rate.dtype))
        if not exact:
            mean = tf.raw_ops.ReadVariableOp(resource=handle, dtype=rate.dtype)
            weight = tf.constant(1 - beta, rate.dtype)
            apart.append(
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=handle, alpha=weight, delta=mean - value
                )
            )
    with tf.control_dependencies([one for one in apart if one is not None]):
        tf.raw_ops.ResourceApplyAdam(
            var=handles[0],
            m=handles[1],
            v=handles[2],
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=rate,
            beta1=told[0],
            beta2=told[1],
            epsilon=tf.constant(optimizer.epsilon, rate.dtype),
            grad=gradient,
        )


def _is_exact(beta: float, dtype: tf.DType) -> bool:
    """Return whether 1 - beta, computed in a type, is 1 - beta up to the rounding of a product."""
    kind = dtype.as_numpy_dtype
    exact = kind(1 - beta)
    return bool(abs(kind(1) - kind(beta) - exact) <= 4 * np.finfo(kind).eps * exact)
