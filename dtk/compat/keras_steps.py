"""What a step calls while it is traced, patched as long as a context lasts, or for good.

scale_loss_for_distribution and its like    patch_losses
keras.Loss.__call__                         patch_loss_calls
assign of variables, _moments: for good      patch_assign_and_moments
update_state of keras.metrics.Mean and Sum  patch_means
result, update_state of a model's metrics   patch_metrics
tf.GradientTape.gradient and __enter__      patch_tapes
calls of a script's tf.function             patch_tf_functions
keras.ops.take                              patch_take
moments of synchronized layers              patch_moments
ops of keras.losses                         patch_sums_of_losses
BatchNormalization.synchronized             all_synchronized
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import masking
from keras.src.losses import loss as keras_losses
from keras.src.losses import losses
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util, function_type_utils

from dtk.compat import names
from dtk.compat.keras_models import layers_of
from dtk.nests import Args, Function, Kwargs, Tree
from dtk.patches import definer, patch, patch_around, patch_for_good

_BACKEND = "keras.src.backend.tensorflow"
_LIBRARIES = ("dtk", "keras", "tensorflow")
# The values with respect to which a tape differentiates, kept on it: variable's id -> tensor.
_WATCHED = "_dtk_watched"
Values: TypeAlias = Mapping[int, tf.Tensor]

_Value = TypeVar("_Value")

# Computes gradients from target, sources and output gradients; in a list, if the sources are one.
Gradient: TypeAlias = Callable[[Tree, Tree, Tree], list[Tree]]


# Losses and metrics.


def patch_losses(
    scale: Function[tf.Tensor], unscale: Function[tf.Tensor], weigh: Function[tf.Tensor]
) -> AbstractContextManager[None]:
    """Return a context in which Keras's losses call these functions instead of its own.

    Each gets the arguments of Keras's function, and that function as the keyword `original`.
    """
    return patch_around(
        keras_losses,
        scale_loss_for_distribution=scale,
        unscale_loss_for_distribution=unscale,
        reduce_weighted_values=weigh,
    )


@contextlib.contextmanager
def patch_loss_calls(call: Function[tf.Tensor], own: Iterable[object]) -> Iterator[None]:
    """Return a context in which `call(loss, y_true, y_pred, weight, original=...)` calls losses.

    `own` are a script's, some of which may have a `__call__` of their own.
    """
    classes = [type(loss) for loss in own if isinstance(loss, keras.losses.Loss)]
    with contextlib.ExitStack() as stack:
        for one in {definer(one, "__call__") for one in [keras.losses.Loss, *classes]}:
            stack.enter_context(patch_around(one, __call__=call))
        yield


def has_own_call(loss: keras.Loss) -> bool:
    """Return whether a script has written the `__call__` of a loss."""
    return definer(type(loss), "__call__") is not keras.losses.Loss


def mask_of(tensor: object) -> tf.Tensor | None:
    """Return the mask that a layer has given a tensor."""
    return masking.get_keras_mask(tensor)


def with_mask(tensor: _Value, mask: tf.Tensor | None) -> _Value:
    """Give a tensor a mask."""
    if mask is not None:
        masking.set_keras_mask(tensor, mask)
    return tensor


def masked_weight(
    sample_weight: tf.Tensor | None, mask: tf.Tensor | None, dtype: tf.DType | None, reduction: str
) -> tf.Tensor:
    """Compute the weight that Keras gives each row or element under a mask."""
    return keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def patch_assign_and_moments(
    assign: Function[tf.Tensor], moments: Function[tuple[tf.Tensor, tf.Tensor]]
) -> None:
    """Assign Keras variables, and compute a batch's moments, by these functions from now on.

    They are called as `assign(variable, value, original=...)` and `moments(layer, inputs, mask,
    original=...)`.
    """
    patch_for_good(definer(keras.Variable, "assign"), "assign", assign)
    patch_for_good(keras.layers.BatchNormalization, "_moments", moments)


@contextlib.contextmanager
def patch_means(update: Function[object]) -> Iterator[None]:
    """Return a context in which `update(self, values, weight, original=...)` counts means and sums.

    These are `keras.metrics.Mean` and `Sum`.
    """
    with (
        patch_around(keras.metrics.Mean, update_state=update),
        patch_around(keras.metrics.Sum, update_state=update),
    ):
        yield


@contextlib.contextmanager
def patch_metrics(
    metrics: Sequence[keras.Metric], name: str, function: Function[object]
) -> Iterator[None]:
    """Return a context in which `function(metric, original, ...)` is a method of metrics.

    In nested contexts, the function of the outer one is.
    """
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            if name not in vars(metric):
                own = functools.partial(function, metric, getattr(metric, name))
                stack.enter_context(patch(metric, **{name: own}))
        yield


# Gradients.


def patch_tapes(
    differentiate: Callable[[Gradient, Values, Tree, Tree, Tree], Tree],
    watched: Callable[[], Values] | None = None,
) -> AbstractContextManager[None]:
    """Return a context in which a function replaces `tf.GradientTape.gradient`.

    It gets the tape's own function, the values that `watched` has returned for the tape to watch in
    place of variables, and the arguments of the call: target, sources and output gradients.
    """

    def watching(tape: tf.GradientTape, original: Function[tf.GradientTape]) -> tf.GradientTape:
        entered = original(tape)
        values = watched() if watched is not None else {}
        setattr(entered, _WATCHED, values)
        entered.watch(list(values.values()))
        return entered

    def gradient(
        tape: tf.GradientTape,
        target: Tree,
        sources: Tree,
        output_gradients: Tree = None,
        *args: object,
        original: Function[list[Tree]],
        **more: object,
    ) -> Tree:
        def own(target: Tree, sources: Tree, output_gradients: Tree) -> list[Tree]:
            return original(tape, target, sources, output_gradients, *args, **more)

        values = getattr(tape, _WATCHED, {})
        return differentiate(own, values, target, sources, output_gradients)

    entering = {} if watched is None else {"__enter__": watching}
    return patch_around(tf.GradientTape, gradient=gradient, **entering)


# Functions and layers.


def patch_tf_functions(
    wanted: Callable[[], bool], compiled: bool = True
) -> AbstractContextManager[None]:
    """Return a context in which a script's `tf.function` is traced into the graph that calls it.

    A loss in a separate graph could not be weighed by tensors of the step's graph. `compiled`: also
    a function that XLA is to compile, which then compiles it no more.
    """

    def call(
        self: tf.types.experimental.PolymorphicFunction,
        *args: object,
        original: Function[Tree],
        **kwargs: object,
    ) -> Tree:
        python = self.python_function
        package = (getattr(python, "__module__", None) or "").partition(".")[0]
        kept = package in _LIBRARIES or (self._jit_compile and not compiled)
        if kept or not wanted():
            return original(self, *args, **kwargs)
        bound = _canonical(self, args, kwargs)
        if self._autograph:
            python = autograph_util.py_func_from_autograph(python, None)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):  # even if the caller is not converted
            return python(*bound.args, **bound.kwargs)

    return patch_around(type(tf.function(lambda: None)), __call__=call)


def _canonical(
    function: tf.types.experimental.PolymorphicFunction, args: Args, kwargs: Kwargs
) -> inspect.BoundArguments:
    """Return the arguments with which TensorFlow would trace a function."""
    bound = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function.function_type, function._default_values, function._is_pure
    )
    bound.arguments = tf.nest.map_structure(
        lambda leaf: (
            tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
        ),
        bound.arguments,
    )
    return bound


def patch_take(take: Function[tf.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which `take(x, indices, axis, original=...)` is `keras.ops.take`."""
    return patch_around(names.home_of(_BACKEND, "take"), take=take)


@contextlib.contextmanager
def patch_moments(moments: Function[tuple[tf.Tensor, tf.Tensor]]) -> Iterator[None]:
    """Return a context in which a function computes the moments of synchronized layers.

    Keras does not synchronize inputs with a mask; the function gets it, in their shape, as `kept`.
    """

    def masked(
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
        *,
        original: Function[tuple[tf.Tensor, tf.Tensor]],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        if mask is None or not layer.synchronized:
            return original(layer, inputs, mask)
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        alone = functools.partial(original, layer, inputs, mask)
        return moments(inputs, layer._reduction_axes, kept=kept, original=lambda *_: alone())

    home = names.home_of(_BACKEND, "_compute_moments_sync")
    with (
        patch_around(home, _compute_moments_sync=moments),
        patch_around(keras.layers.BatchNormalization, _moments=masked),
    ):
        yield


def patch_sums_of_losses(sums: Function[tf.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which a function takes the place of `keras.ops.sum` in Keras's losses."""
    replaced = functools.partial(sums, original=keras.ops.sum)
    return patch(losses, ops=types.SimpleNamespace(**vars(losses.ops) | {"sum": replaced}))


@contextlib.contextmanager
def all_synchronized(model: keras.Model) -> Iterator[None]:
    """Return a context in which every batch normalization of a model is synchronized."""
    with contextlib.ExitStack() as stack:
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(patch(layer, synchronized=True))
        yield
