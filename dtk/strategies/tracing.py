"""The step being traced, and what Keras's losses count in it.

Keras traces one replica's step without knowing of the others. While it does, this thread has a
`Step`, and Keras's losses go through the functions here: each replica's loss counts with its share
of the rows, so uneven slices sum to the single process's loss. For n_w of N rows the share is
n_w / N: Keras divides its mean losses by the number of replicas, and that division is replaced by
the share. Losses that are sums need no factor, and masked or sample-weight-normalised means get the
world's denominator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from dtk.strategies import adopt

# What a step needs to know while Keras traces it; one per thread, because a mirrored strategy
# traces its replicas in threads.
_running = threading.local()


class Applied(NamedTuple):
    """Gradients that a step handed to an optimizer."""

    optimizer: Any
    gradients: list
    variables: list


class Parts:
    """The losses of a step, each one replica's part: over the replicas they add up to the world's.

    Whatever else a step computes, such as a mean over its rows, must be weighed by share to add up.
    `in` tells them apart: a loss, and in a graph what was computed from one, is a part. Eagerly,
    only what `compute_loss` or a loss object returned is.
    """

    def __init__(self) -> None:
        self._parts: set = set()
        self._others: set = set()

    def add(self, loss: Any) -> Any:
        """Note a loss, and return it."""
        self._parts.add(loss.ref())
        return loss

    def made_whole(self, loss: Any) -> Any:
        """Note what Keras records of a loss, and return it: no part any more."""
        self._others.add(loss.ref())
        return loss

    def __contains__(self, value: Any) -> bool:
        seen: set = set()
        left = [value] if isinstance(value, tf.Tensor) else []
        while left:
            tensor = left.pop()
            if tensor.ref() in self._parts:
                return True
            if tensor.ref() not in seen and tensor.ref() not in self._others:
                seen.add(tensor.ref())
                left.extend([] if tf.executing_eagerly() else tensor.op.inputs)
        self._others |= seen
        return False


class Step:
    """One replica's step being traced.

    Attributes:
        share: n_w / N, this replica's part of the global batch's rows (float32 scalar).
        size: Number of replicas.
        model: Whose step it is.
        world_sum: Sums a tensor over the replicas.
        rows: N (int64 scalar); None where only shares are known.
        noted: Takes what is to be applied, where steps only note it (see `noting`); else None.
        rows_read: Bytes of table rows looked up so far, int64 scalars.
        reductions: How many times gradients were reduced.
        assigned: Keras variables assigned so far, by id.
        per_output: True while Keras computes the losses of single outputs.
        parts: The losses computed so far.
    """

    def __init__(
        self, share: tf.Tensor, size: Any, model: Any, world_sum: Callable, rows: Any = None
    ):
        self.share = share
        self.size = size
        self.model = model
        self.world_sum = world_sum
        self.rows = rows
        self.noted: Any = None
        self.rows_read: list[tf.Tensor] = [tf.constant(0, tf.int64)]
        self._graph = tf.compat.v1.get_default_graph()
        self.reductions = 0
        self.assigned: dict[int, Any] = {}
        self.per_output = False
        self.parts = Parts()

    def note_read(self, rows: tf.Tensor) -> None:
        """Count bytes read; not inside a loop or branch, whose tensors cannot leave it."""
        if tf.compat.v1.get_default_graph() is self._graph:
            self.rows_read.append(tf.size(rows, tf.int64) * rows.dtype.size)


def current() -> Step | None:
    """The step this thread is tracing."""
    return getattr(_running, "step", None)


@contextlib.contextmanager
def tracing(step: Step) -> Iterator[None]:
    """While inside, this thread traces `step`."""
    outer, _running.step = current(), step
    try:
        yield
    finally:
        _running.step = outer


@contextlib.contextmanager
def in_shares() -> Iterator[None]:
    """While inside, Keras scales losses by row share; outside nothing is patched."""
    with (
        adopt.losses_through(_scale, _unscale, _weigh),
        adopt.assigns_through(_note_assign),
        adopt.means_through(_update_mean),
    ):
        yield


def _scale(value: Any, original: Callable) -> Any:
    step = current()
    if step is None:
        return original(value)
    # multiply_no_nan: a mean over no rows may be 0/0, and must count as nothing.
    return step.parts.add(tf.math.multiply_no_nan(value, tf.cast(step.share, value.dtype)))


def _unscale(value: Any, original: Callable) -> Any:
    step = current()
    if step is None:
        return original(value)
    if step.per_output and not tf.executing_eagerly():
        # In a graph, trackers of single outputs count one per batch on every replica: the mean
        # over replicas of size * (share * mean) is the batch's mean. Eagerly they count rows, as
        # the loss tracker does.
        return step.parts.made_whole(value * tf.cast(step.size, value.dtype))
    return step.parts.made_whole(tf.math.divide_no_nan(value, tf.cast(step.share, value.dtype)))


def _weigh(
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
    *,
    original: Callable,
) -> Any:
    result = original(values, sample_weight, mask, reduction, dtype)
    step = current()
    if step is None or reduction in (None, "none"):
        return result
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weight = adopt.masked_weight(sample_weight, mask, dtype, reduction)
        counted = tf.reduce_sum(tf.cast(weight, result.dtype))
    elif reduction in ("sum_over_batch_size", "mean") and mask is not None:
        counted = tf.reduce_sum(tf.cast(mask, result.dtype))
    else:
        return step.parts.add(result)
    # `result` is share * (local sum / local count); wanted is local sum / global count.
    counted = tf.stop_gradient(counted)
    total = step.world_sum(counted)
    part = tf.math.divide_no_nan(counted, total * tf.cast(step.share, result.dtype))
    return step.parts.add(result * part)


def noting_loss(compute_loss: Callable) -> Callable:
    """A model's `compute_loss`, whose result is a part; eagerly nothing else would tell."""

    @functools.wraps(compute_loss)
    def noting(*args: Any, **kwargs: Any) -> Any:
        loss, step = compute_loss(*args, **kwargs), current()
        return loss if step is None else step.parts.add(tf.convert_to_tensor(loss))

    return noting


def _update_mean(self: Any, values: Any, sample_weight: Any = None, *, original: Callable) -> Any:
    """A custom step that records a loss means the world's, as one batch or as the rows it tells."""
    step = current()
    if step is not None and values in step.parts:
        share = tf.cast(step.share, values.dtype)
        values = tf.math.divide_no_nan(values, share)
        sample_weight = share if sample_weight is None else sample_weight
    return original(self, values, sample_weight)


def _note_assign(variable: Any) -> None:
    step = current()
    if step is not None:
        step.assigned[id(variable)] = variable


def flag_outputs(compile_loss: Any) -> None:
    """Make a step know when its model's loss computes the losses of single outputs.

    Args:
        compile_loss: What computes them; None in a model without a loss.
    """
    if compile_loss is None or "call" in vars(compile_loss):
        return
    call = compile_loss.call

    @functools.wraps(call)
    def flagged(*args: Any, **kwargs: Any) -> Any:
        step = current()
        if step is None:
            return call(*args, **kwargs)
        step.per_output = True
        try:
            return call(*args, **kwargs)
        finally:
            step.per_output = False

    compile_loss.call = flagged
