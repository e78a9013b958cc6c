"""Patches of Keras while a step is traced.

Each patch lasts as long as its context; nothing of Keras stays patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_losses

from dtk.compat import names
from dtk.compat.keras_models import layers_of
from dtk.compat.replacing import definer, replaced
from dtk.nests import Function, Nest

_BACKEND = "keras.src.backend.tensorflow"


def losses_through(
    scale: Function[tf.Tensor], unscale: Function[tf.Tensor], weigh: Function[tf.Tensor]
) -> AbstractContextManager[None]:
    """Return a context in which Keras's losses call these functions instead of its own.

    Each gets the arguments of Keras's function, and that function as the keyword `original`.
    """
    return replaced(
        keras_losses,
        scale_loss_for_distribution=functools.partial(
            scale, original=keras_losses.scale_loss_for_distribution
        ),
        unscale_loss_for_distribution=functools.partial(
            unscale, original=keras_losses.unscale_loss_for_distribution
        ),
        reduce_weighted_values=functools.partial(
            weigh, original=keras_losses.reduce_weighted_values
        ),
    )


def masked_weight(
    sample_weight: tf.Tensor | None, mask: tf.Tensor | None, dtype: tf.DType | None, reduction: str
) -> tf.Tensor:
    """Compute the weight that Keras gives each row or element under a mask."""
    return keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)


def assigns_through(observe: Callable[[keras.Variable], None]) -> AbstractContextManager[None]:
    """Return a context in which `observe` gets each Keras variable before it is assigned."""
    assign = keras.Variable.assign

    @functools.wraps(assign)
    def observed(self: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        observe(self)
        return assign(self, value)

    return replaced(definer(keras.Variable, "assign"), assign=observed)


@contextlib.contextmanager
def means_through(update: Function[object]) -> Iterator[None]:
    """Return a context in which a function updates `keras.metrics.Mean` and `Sum`."""

    def updated(original: Function[object]) -> Function[object]:
        @functools.wraps(original)
        def through(
            self: keras.Metric, values: tf.Tensor, sample_weight: tf.Tensor | None = None
        ) -> object:
            return update(self, values, sample_weight, original=original)

        return through

    mean, total = keras.metrics.Mean, keras.metrics.Sum
    with (
        replaced(mean, update_state=updated(mean.update_state)),
        replaced(total, update_state=updated(total.update_state)),
    ):
        yield


def tapes_through(differentiate: Function[Nest]) -> AbstractContextManager[None]:
    """Return a context in which a function replaces `tf.GradientTape.gradient`."""
    original = tf.GradientTape.gradient

    @functools.wraps(original)
    def through(
        self: tf.GradientTape,
        target: Nest,
        sources: Nest,
        output_gradients: Nest = None,
        *args: object,
        **more: object,
    ) -> Nest:
        if args:  # given by position
            more["unconnected_gradients"] = args[0]
        return differentiate(self, target, sources, output_gradients, original=original, **more)

    return replaced(tf.GradientTape, gradient=through)


@contextlib.contextmanager
def results_through(
    metrics: Sequence[keras.Metric],
    result: Callable[[keras.Metric, Callable[[], Nest]], Nest],
) -> Iterator[None]:
    """Return a context in which a function computes the results of metrics.

    In nested contexts, the function of the outer one does.
    """
    with _methods_through(metrics, "result", result):
        yield


def updates_through(
    metrics: Sequence[keras.Metric], update: Function[object]
) -> AbstractContextManager[None]:
    """Return a context in which a function replaces the `update_state` of metrics."""
    return _methods_through(metrics, "update_state", update)


@contextlib.contextmanager
def _methods_through(
    metrics: Sequence[keras.Metric], name: str, function: Function[object]
) -> Iterator[None]:
    changed = [metric for metric in metrics if name not in vars(metric)]
    for metric in changed:
        replacement = functools.partial(function, metric, getattr(metric, name))
        object.__setattr__(metric, name, replacement)
    try:
        yield
    finally:
        for metric in changed:
            object.__delattr__(metric, name)


@contextlib.contextmanager
def all_synchronized(model: keras.Model) -> Iterator[None]:
    """Return a context in which every batch normalization of a model is synchronized."""
    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    for layer in layers:
        layer.synchronized = True
    try:
        yield
    finally:
        for layer in layers:
            layer.synchronized = False


def takes_through(
    take: Callable[[tf.Tensor, tf.Tensor, int | None, Function[tf.Tensor]], tf.Tensor],
) -> AbstractContextManager[None]:
    """Return a context in which a function replaces `keras.ops.take`."""
    home = names.home_of(_BACKEND, "take")
    original = home.take

    @functools.wraps(original)
    def replacement(x: tf.Tensor, indices: tf.Tensor, axis: int | None = None) -> tf.Tensor:
        return take(x, indices, axis, original)

    return replaced(home, take=replacement)


def moments_through(moments: Function[tuple[tf.Tensor, tf.Tensor]]) -> AbstractContextManager[None]:
    """Return a context in which a function computes the moments of synchronized layers."""
    home = names.home_of(_BACKEND, "_compute_moments_sync")
    through = functools.partial(moments, original=home._compute_moments_sync)
    return replaced(home, _compute_moments_sync=through)
