"""Random numbers that a row gets wherever it is computed, and in every trace.

A step that draws random numbers for its rows (dropout, the noise of a variational autoencoder)
computes something else on the whole of a few rows than on parts of them, however right it is.
Inside `by_row` the n-th draw of a step is a constant of the graph, of which each row has its own
part. Shuffles leave the order as it is, and draws whose distribution belongs to a row (categorical,
gamma, Poisson, binomial) return a number that stands for it.

Private names used: tensorflow.python.ops.gen_random_ops, gen_stateless_random_ops,
gen_stateless_random_ops_v2, gen_stateful_random_ops, through which all of TensorFlow's and Keras's
random functions go; keras.src.backend.tensorflow.random.shuffle. tests/compat holds them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from types import ModuleType

import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random
from tensorflow.python.ops import (
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from dtk.nests import Function

# Draws since `restart`, of this thread: replicas may be threads.
_drawn = threading.local()

_DRAWS = gen_stateless_random_ops
# Which function draws instead of each of these.
_SHAPED = {
    _DRAWS.stateless_random_normal: (
        (gen_random_ops, "random_standard_normal"),
        (gen_stateless_random_ops, "stateless_random_normal"),
        (gen_stateless_random_ops_v2, "stateless_random_normal_v2"),
        (gen_stateful_random_ops, "stateful_standard_normal_v2"),
    ),
    _DRAWS.stateless_truncated_normal: (
        (gen_random_ops, "truncated_normal"),
        (gen_stateless_random_ops, "stateless_truncated_normal"),
        (gen_stateless_random_ops_v2, "stateless_truncated_normal_v2"),
        (gen_stateful_random_ops, "stateful_truncated_normal"),
    ),
    _DRAWS.stateless_random_uniform: (
        (gen_random_ops, "random_uniform"),
        (gen_stateless_random_ops, "stateless_random_uniform"),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_v2"),
        (gen_stateful_random_ops, "stateful_uniform"),
    ),
    _DRAWS.stateless_random_uniform_int: (
        (gen_random_ops, "random_uniform_int"),
        (gen_stateless_random_ops, "stateless_random_uniform_int"),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_int_v2"),
        (gen_stateful_random_ops, "stateful_uniform_int"),
    ),
    _DRAWS.stateless_random_uniform_full_int: (
        (gen_stateless_random_ops, "stateless_random_uniform_full_int"),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_full_int_v2"),
        (gen_stateful_random_ops, "stateful_uniform_full_int"),
    ),
}


def replaced_names() -> list[tuple[ModuleType, str]]:
    """Return every function of TensorFlow that is replaced, as its module and name."""
    return [*(place for places in _SHAPED.values() for place in places), *_OTHERS]


def restart(rows: int | tf.Tensor = 1, first: int | tf.Tensor = 0) -> None:
    """Start the draws of this thread anew, when the tracing of a step begins.

    Args:
        rows: Rows that are computed, an integer or a scalar.
        first: Number of the first of them in the whole batch.
    """
    _drawn.count, _drawn.rows, _drawn.first = 0, rows, first


@contextlib.contextmanager
def by_row() -> Iterator[None]:
    """Return a context in which functions are traced whose draws belong to rows.

    Example:
        >>> with by_row():
        ...     restart(rows=3)
        ...     whole = tf.random.normal([3, 2]).numpy()
        ...     restart(rows=2, first=1)
        ...     part = tf.random.normal([2, 2]).numpy()
        >>> bool((whole[1:] == part).all())
        True
    """
    with contextlib.ExitStack() as stack:
        for draw, places in _SHAPED.items():
            for module, name in places:
                by_rows = _by_row_through(getattr(module, name), draw)
                stack.enter_context(_replaced(module, name, by_rows))
        for (module, name), padding_row in _OTHERS.items():
            original = getattr(module, name)
            stack.enter_context(_replaced(module, name, functools.wraps(original)(padding_row)))
        yield


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, replacement: Function[tf.Tensor]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def _by_row_through(
    original: Function[tf.Tensor], draw: Function[tf.Tensor]
) -> Function[tf.Tensor]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def drawn(*args: object, **kwargs: object) -> tf.Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments: dict[str, tf.Tensor] = given.arguments
        shape = tf.convert_to_tensor(arguments["shape"])
        known: dict[str, tf.Tensor] = {
            name: arguments[name] for name in ("minval", "maxval") if name in arguments
        }
        if "dtype" in arguments and not known:
            known = {"dtype": arguments["dtype"]}
        _drawn.count += 1
        # A generator's n-th number does not depend on how many are drawn.
        before = _rows_before(shape)
        drawn_shape = tf.concat([shape[:1] + before, shape[1:]], 0)
        found = draw(shape=drawn_shape, seed=[_drawn.count, 0], **known)
        if shape.shape[0] == 0:
            return found
        return tf.ensure_shape(found[before:], _sizes(shape))

    return drawn


def _rows_before(shape: tf.Tensor) -> tf.Tensor:
    """Count the entries along the first dimension of a draw that belong to rows before these."""
    if shape.shape[0] == 0:
        return tf.zeros([0], shape.dtype)
    if not tf.executing_eagerly() and _sizes(shape)[0] is not None:
        return tf.zeros([], shape.dtype)  # the same size whatever the batch
    rows, first = (tf.cast(n, shape.dtype) for n in (_drawn.rows, _drawn.first))
    for_each = tf.where(shape[0] % rows == 0, shape[0] // rows, 0)
    return first * for_each


def _sizes(shape: tf.Tensor) -> list[int | None]:
    """Return what a graph knows of a shape; None where it does not."""
    value = tf.get_static_value(shape, partial=True)
    if value is None:
        return [None] * shape.shape[0]
    return [None if size is None else int(size) for size in value]


def _in_order(value: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
    return tf.identity(value)


def _likeliest(
    logits: tf.Tensor, num_samples: int | tf.Tensor, *args: object, **kwargs: object
) -> tf.Tensor:
    dtype = kwargs.get("output_dtype", tf.int64)
    best = tf.argmax(logits, -1, output_type=tf.as_dtype(dtype))
    return tf.repeat(best[:, None], num_samples, 1)


def _mean_of_gamma(
    shape: tf.Tensor, alpha: tf.Tensor, *args: object, **kwargs: object
) -> tf.Tensor:
    return tf.broadcast_to(alpha, tf.concat([shape, tf.shape(alpha)], 0))


def _mean_of_stateless_gamma(
    shape: tf.Tensor, *args: tf.Tensor, alpha: tf.Tensor | None = None, **kwargs: object
) -> tf.Tensor:
    return tf.broadcast_to(args[-1] if alpha is None else alpha, shape)


def _mean_of_poisson(
    shape: tf.Tensor, rate: tf.Tensor, *args: object, **kwargs: object
) -> tf.Tensor:
    whole = tf.broadcast_to(tf.round(rate), tf.concat([shape, tf.shape(rate)], 0))
    return tf.cast(whole, kwargs.get("dtype", tf.int64))


def _mean_of_binomial(
    shape: tf.Tensor,
    seed: tf.Tensor,
    counts: tf.Tensor,
    probs: tf.Tensor,
    dtype: tf.DType = tf.int64,
    **kwargs: object,
) -> tf.Tensor:
    return tf.cast(tf.broadcast_to(tf.round(counts * probs), shape), dtype)


_OTHERS: dict[tuple[ModuleType, str], Function[tf.Tensor]] = {
    (gen_random_ops, "random_shuffle"): _in_order,
    (tf.random.experimental, "stateless_shuffle"): _in_order,
    (keras_random, "shuffle"): _in_order,  # sorts by numbers it draws for each row
    (gen_random_ops, "multinomial"): _likeliest,
    (gen_stateless_random_ops, "stateless_multinomial"): _likeliest,
    (gen_random_ops, "random_gamma"): _mean_of_gamma,
    (gen_stateless_random_ops, "stateless_random_gamma_v2"): _mean_of_stateless_gamma,
    (gen_stateless_random_ops_v2, "stateless_random_gamma_v3"): _mean_of_stateless_gamma,
    (gen_random_ops, "random_poisson_v2"): _mean_of_poisson,
    (gen_stateless_random_ops, "stateless_random_binomial"): _mean_of_binomial,
}
