"""Random numbers of a step: a rank's own in training, and a row's own where steps are tried.

Ranks hold the same seeds and trace the same step; inside `apart` the draws for the rows of a batch
are the rank's own.

A step that draws random numbers for its rows (dropout, the noise of a variational autoencoder)
gives different results for a batch and for its parts, even if it is correct. Inside `by_row` the
n-th draw of a step is a constant of the graph, and each row has its own part of it. Shuffles keep
the order, and draws with a distribution per row (categorical, gamma, Poisson, binomial) return the
likeliest or mean value.

The size of a draw shows how many numbers a row has, but not which. For rows a, b and c, computed
as `a b` and `c`, with two numbers each:

    BLOCKS      [a b c | a b c]     fakes, then reals       parts [a b | a b] and [c | c]
    REPEATED    [a a | b b | c c]   patches of an image     parts [a a | b b] and [c c]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import random
import re
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import cast

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random
from tensorflow.python.ops import (
    gen_candidate_sampling_ops,
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from dtk.compat.tf_replicas import running
from dtk.nests import Function, Tree
from dtk.patches import patch_around, temporarily

BLOCKS, REPEATED = LAYOUTS = ("blocks", "repeated")


@dataclasses.dataclass
class Draws:
    """The draws of this thread's replica since `restart`."""

    rows: int | tf.Tensor  # whose numbers are drawn
    first: int | tf.Tensor  # the number of the first one
    all_rows: int | tf.Tensor  # of all replicas
    count: int = 0


def _draws() -> Draws:
    return cast(Draws, running.draws)


_GENERATED = (
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)
# TensorFlow has several operations that draw numbers of one distribution and shape, such as
# `random_standard_normal` and `stateless_random_normal_v2`.
_SHAPED = re.compile(
    r"(?:state(?:less|ful)_)?(?:random_|standard_)*"
    r"(normal|truncated_normal|uniform|uniform_int|uniform_full_int)(?:_v\d)?"
)
# Between the seeds of two ranks: spreads them over the 31 bits of a seed (2^32 / golden ratio).
_APART = 0x9E3779B1
_SAMPLERS = (
    "all_candidate_sampler",
    "fixed_unigram_candidate_sampler",
    "log_uniform_candidate_sampler",
    "uniform_candidate_sampler",
)


def _draw_for(name: str) -> Function[tf.Tensor] | None:
    """Return the stateless operation that draws the same distribution as another; None if none."""
    match = _SHAPED.fullmatch(name)
    if match is None:
        return None
    start = "stateless_" if match[1].startswith("truncated") else "stateless_random_"
    draw: Function[tf.Tensor] = getattr(gen_stateless_random_ops, start + match[1])
    return draw


def restart(
    rows: int | tf.Tensor = 1,
    first: int | tf.Tensor = 0,
    of: int | tf.Tensor | None = None,
    of_python: bool = True,
) -> None:
    """Restart this thread's draws before a step is traced; see `by_row` for `of_python`."""
    running.draws = Draws(rows, first, first + rows if of is None else of)
    if of_python:
        np.random.seed(0)
        random.seed(0)


@contextlib.contextmanager
def by_row(
    layouts: Mapping[int, str] = MappingProxyType({}), of_python: bool = True
) -> Iterator[list[int]]:
    """Return a context in which functions are traced so that their draws belong to rows.

    Each `tf.function` that a step calls is traced anew and the trace discarded: earlier draws were
    not of these rows, and draws made here are not random. Layers that a step builds still get their
    usual first weights.

    NumPy's and Python's generators are left alone unless `of_python`: all threads share them, and
    one may read data ahead and draw.

    Example:
        >>> with by_row():
        ...     restart(rows=3)
        ...     whole = tf.random.normal([3, 2]).numpy()
        ...     restart(rows=2, first=1)
        ...     part = tf.random.normal([2, 2]).numpy()
        >>> bool((whole[1:] == part).all())
        True
    """
    of_rows: list[int] = []
    with contextlib.ExitStack() as stack:
        own = _Generators(of_python)
        stack.callback(own.swap)  # restores the generators that `restart` has seeded
        build = functools.partial(_with_own_numbers, own)
        stack.enter_context(patch_around(keras.Layer, _maybe_build=build))
        stack.enter_context(patch_around(keras.random.SeedGenerator, __init__=build))
        stack.enter_context(patch_around(type(tf.function(lambda: None)), __call__=_call_anew))
        # Listed first: all draw by functions of gen_stateless_random_ops, which are patched, too.
        for module, name, draw in [*_replacements(layouts, of_rows)]:
            draw = functools.partial(_unless_building, draw)
            stack.enter_context(patch_around(module, **{name: draw}))
        yield of_rows


def _replacements(
    layouts: Mapping[int, str], of_rows: list[int]
) -> Iterator[tuple[ModuleType, str, Function[Tree]]]:
    """Yield every function of TensorFlow and Keras that draws, and what takes its place."""
    for module in _GENERATED:
        for name, original in [*vars(module).items()]:
            draw = _draw_for(name)
            if draw is not None:
                yield module, name, _by_row(original, draw, layouts, of_rows)
    for (module, name), same_for_all in _OTHERS.items():
        yield module, name, same_for_all
    for name in _SAMPLERS:
        sampler = getattr(gen_candidate_sampling_ops, name)
        yield gen_candidate_sampling_ops, name, functools.partial(_seeded, sampler)


@contextlib.contextmanager
def apart(rank: int) -> Iterator[None]:
    """Return a context in which this thread traces draws for the rows of a batch as a rank's own.

    Ranks trace the same step with the same seeds. A draw whose size does not depend on the batch
    stays the same on all ranks: noise that is added to a weight has to, and so has a coin by which
    a step branches.
    """
    thread = threading.get_ident()

    def drawn(*args: object, original: Function[tf.Tensor], **kwargs: object) -> tf.Tensor:
        if threading.get_ident() == thread and not tf.executing_eagerly():
            bound = inspect.signature(original).bind(*args, **kwargs)
            if _is_of_batch(bound.arguments):
                _fold(bound.arguments, rank)
            args, kwargs = bound.args, bound.kwargs
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in _GENERATED:
            names = [name for name in vars(module) if _draw_for(name) is not None]
            others = ((n, same) for (m, n), same in _OTHERS.items() if m is module)
            names += [name for name, same in others if same is not _in_order]
            stack.enter_context(patch_around(module, **dict.fromkeys(names, drawn)))
        yield


def _is_of_batch(arguments: Mapping[str, object]) -> bool:
    """Return whether the size of a draw depends on the batch."""
    shape = arguments.get("shape")
    known = shape is None or None not in _sizes(tf.convert_to_tensor(shape))
    shapes = [one.shape for one in arguments.values() if isinstance(one, tf.Tensor)]
    return not known or not all(one.is_fully_defined() for one in shapes)


def _fold(arguments: dict[str, object], rank: int) -> None:
    """Change the seed among a draw's arguments by rank, by 0 for rank 0."""
    for name in ("key", "seed"):
        if isinstance(value := arguments.get(name), tf.Tensor):
            arguments[name] = value + tf.cast(tf.constant(rank * _APART, tf.int64), value.dtype)
            return
    if arguments.get("seed") or arguments.get("seed2"):  # else TensorFlow draws a seed
        seed = arguments.get("seed2") or 0
        assert isinstance(seed, int)
        arguments["seed2"] = spread_seed(seed, rank)


def spread_seed(seed: int, rank: int) -> int:
    """Derive one rank's seed; rank 0 keeps the given one."""
    return (seed + rank * _APART) % 2**31 if rank else seed


class _Generators:
    """Saved states of NumPy's and Python's generators, to swap with the present ones."""

    def __init__(self, swapped: bool) -> None:
        self._swapped = swapped
        self._states = np.random.get_state(), random.getstate()

    def swap(self) -> None:
        if not self._swapped:
            return
        of_numpy, of_python = self._states
        self._states = np.random.get_state(), random.getstate()
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _with_own_numbers(
    own: _Generators, *args: object, original: Function[None], **kwargs: object
) -> None:
    """Make weights and seeds as without `by_row`, since they outlive it."""
    if running.building:  # a nested layer
        return original(*args, **kwargs)
    own.swap()
    try:
        with temporarily(running, building=True):
            return original(*args, **kwargs)
    finally:
        own.swap()


def _unless_building(
    draw: Function[Tree], *args: object, original: Function[Tree], **kwargs: object
) -> Tree:
    return (original if running.building else draw)(*args, **kwargs)


def _call_anew(
    self: tf.types.experimental.PolymorphicFunction,
    *args: object,
    original: Function[Tree],
    **kwargs: object,
) -> Tree:
    """Call a copy of a `tf.function` object, without its traces."""
    return original(self._clone(None), *args, **kwargs)


def _seeded(sampler: Function[Tree], *args: object, **kwargs: object) -> Tree:
    return sampler(*args, **kwargs | {"seed": 1, "seed2": 1})


def _by_row(
    original: Function[tf.Tensor],
    draw: Function[tf.Tensor],
    layouts: Mapping[int, str],
    of_rows: list[int],
) -> Function[tf.Tensor]:
    signature = inspect.signature(original)

    def drawn(*args: object, **kwargs: object) -> tf.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments: dict[str, tf.Tensor] = bound.arguments
        shape = tf.convert_to_tensor(arguments["shape"])
        known: dict[str, tf.Tensor] = {
            name: arguments[name] for name in ("minval", "maxval") if name in arguments
        }
        if "dtype" in arguments and not known:
            known = {"dtype": arguments["dtype"]}
        draws = _draws()
        draws.count += 1
        axis = _batch_axis(shape)
        if axis is None:
            return draw(shape=shape, seed=[draws.count, 0], **known)
        of_rows.append(draws.count)
        size, mine = _places(shape[axis], layouts.get(draws.count, BLOCKS))
        of_all = tf.concat([shape[:axis], size[None], shape[axis + 1 :]], 0)
        numbers = draw(shape=of_all, seed=[draws.count, 0], **known)
        return tf.ensure_shape(tf.gather(numbers, mine, axis=axis), _sizes(shape))

    return drawn


def _batch_axis(shape: tf.Tensor) -> int | None:
    """Return the first axis whose size depends on the batch; None if all sizes are known."""
    sizes = _sizes(shape)
    if tf.executing_eagerly():
        return 0 if sizes else None
    return sizes.index(None) if None in sizes else None


def _places(size: tf.Tensor, layout: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Return how many numbers all rows draw along the batch axis, and the places of these rows."""
    draws = _draws()
    rows, first, all_rows = (
        tf.cast(n, size.dtype) for n in (draws.rows, draws.first, draws.all_rows)
    )
    each = size // rows
    place = tf.range(size)
    if layout == BLOCKS:
        mine = place // rows * all_rows + first + place % rows
    else:
        mine = first * each + place
    # False where the sizes do not fit, as on an idle replica, which computes a padding row.
    are_rows = tf.logical_and(size % rows == 0, first + rows <= all_rows)
    return tf.where(are_rows, each * all_rows, size), tf.where(are_rows, mine, place)


def _sizes(shape: tf.Tensor) -> list[int | None]:
    """Return the sizes in a shape that a graph knows; None for unknown ones."""
    known = tf.fill(shape, False).shape
    return [None] * shape.shape[0] if known.rank is None else known.as_list()


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
    (keras_random, "shuffle"): _in_order,  # it draws a number for each row and sorts by it
    (gen_random_ops, "multinomial"): _likeliest,
    (gen_stateless_random_ops, "stateless_multinomial"): _likeliest,
    (gen_random_ops, "random_gamma"): _mean_of_gamma,
    (gen_stateless_random_ops, "stateless_random_gamma_v2"): _mean_of_stateless_gamma,
    (gen_stateless_random_ops_v2, "stateless_random_gamma_v3"): _mean_of_stateless_gamma,
    (gen_random_ops, "random_poisson_v2"): _mean_of_poisson,
    (gen_stateless_random_ops, "stateless_random_binomial"): _mean_of_binomial,
}
