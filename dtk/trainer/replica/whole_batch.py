"""What is computed on the rows of all replicas, in place of each replica's own.

A loss that divides by the positives of a batch, or compares its rows, does not add up over
replicas. Each of them then gathers outputs and targets, computes the loss as one process does, and
differentiates it by its own rows:

    P                the outputs of all replicas, in the order of ranks
    L(P)             equal on all replicas, so weighed by their shares it sums to itself
    dL/dP            the replica's own rows, divided by its share, by which gradients are weighed

Metrics that do not add up are counted by one replica, on the rows of all. What a script calls by
itself, in layers and steps of its own, is `sum_over_batch` and `gather_over_batch`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import keras
import tensorflow as tf

from dtk.compat import keras_models, keras_steps, tf_replicas
from dtk.errors import UncompilableError
from dtk.nests import Args, Function, Kwargs, Leaf, Tree
from dtk.patches import temporarily
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.loss_terms import BATCH

_Summed = TypeVar("_Summed", bound=Tree)


def sum_over_replicas(value: _Summed) -> _Summed:
    """Sum tensors over the replicas, in a replica context."""
    if not tf.nest.flatten(value):
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


# Losses that do not add up over replicas.


def losses_of_all_rows(model: keras.Model) -> AbstractContextManager[None]:
    """Return a context in which losses of kind BATCH are computed on the rows of all replicas."""
    return keras_steps.patch_loss_calls(_loss_of_compile, keras_models.foreign_losses(model))


def _loss_of_compile(
    loss: keras.Loss,
    y_true: Tree,
    y_pred: Tree,
    sample_weight: tf.Tensor | None = None,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    step = traced_step.current()
    own = functools.partial(original, loss)
    if step is None or loss.reduction in (None, "none") or not keras_models.is_foreign_loss(loss):
        return own(y_true, y_pred, sample_weight)
    sums = not keras_models.compares_rows(loss)
    name = f"loss {loss.name!r}"
    if step.loss == name:  # a `__call__` of the script's calls Keras's
        return own(y_true, y_pred, sample_weight)
    value = loss_of_batch(step, name, own, (y_true, y_pred, sample_weight), adds_up=sums)
    return _to_mean(step, name, value) if keras_steps.has_own_call(loss) else value


def compute_loss(
    model: keras.Model, compute: Function[tf.Tensor | None], args: Args, kwargs: Kwargs
) -> tf.Tensor | None:
    """Compute a model's loss, by the rule even if the model overrides it."""
    step = traced_step.current()
    if step is None:
        return compute(*args, **kwargs)
    if keras_models.computes_own_loss(model):
        loss = compute(*args, **kwargs)
        return loss if loss is None else step.terms.mark_mean(tf.convert_to_tensor(loss))
    loss = loss_of_batch(step, "compute_loss", compute, args, kwargs)
    return None if loss is None else _to_mean(step, "compute_loss", loss)


def _to_mean(step: traced_step.Step, name: str, loss: tf.Tensor) -> tf.Tensor:
    """Convert a loss that a script has reduced to a mean over rows."""
    if step.kinds.get(name) == BATCH:
        return loss
    loss = tf.convert_to_tensor(loss)
    with temporarily(step, loss=name):
        step.note_loss(loss)
    return step.terms.to_mean(name, loss)


def loss_of_batch(
    step: traced_step.Step,
    name: str,
    compute: Function[tf.Tensor | None],
    args: Args,
    kwargs: Kwargs | None = None,
    adds_up: bool = True,
) -> tf.Tensor | None:
    """Compute a loss; where it is of kind BATCH, on the rows of all replicas."""
    arguments = args, kwargs or {}
    tensors = [leaf for leaf in _with_masks(arguments) if _is_joined(leaf)]
    # No communication in a branch or loop: perhaps not all replicas enter it.
    inside = tf.compat.v1.get_default_graph() is step.graph
    if step.kinds.get(name) != BATCH or not inside:
        with temporarily(step, loss=name):
            if step.notes_losses and inside:
                step.begin_loss(tensors, adds_up)
            return compute(*args, **arguments[1])
    if step.present is None:
        raise UncompilableError(f"{name} is computed on the rows of all workers")
    args, kwargs = _on_all_rows(arguments, functools.partial(_joined, step))
    whole = traced_step.Step(
        tf.ones([]), step.model, tf.identity, step.rows, weighs_loss=step.weighs_loss
    )
    counted_once = keras_steps.patch_metrics(
        keras_models.metrics_of(step.model), "update_state", _count_once
    )
    with traced_step.tracing(whole), tf_replicas.as_only_replica(), counted_once:
        value = compute(*args, **kwargs)
    step.take_assignments(whole)
    return value if value is None else step.terms.mark_mean(tf.convert_to_tensor(value))


def _joined(step: traced_step.Step, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sum the rows of all replicas; each replica's rows get their part of the loss's gradient."""

    @tf.custom_gradient
    def joined(*numbers: tf.Tensor) -> tuple[list[tf.Tensor], Function[list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            wide = [tf.cast(one, tf.float64) for one in upstream]
            share = tf.cast(step.share, tf.float64)
            return [
                tf.cast(tf.math.divide_no_nan(one, share), number.dtype)
                for one, number in zip(wide, numbers, strict=True)
            ]

        return sum_over_replicas([*numbers]), gradient

    of_numbers = [part for part in parts if part.dtype.is_floating]
    others = iter(sum_over_replicas([part for part in parts if not part.dtype.is_floating]))
    numbers = iter(joined(*of_numbers) if of_numbers else ())
    return [next(numbers) if part.dtype.is_floating else next(others) for part in parts]


def _count_once(
    metric: keras.Metric, original: Function[object], *args: object, **kwargs: object
) -> object:
    """Count the rows of all replicas on the first one."""
    del metric
    return None if tf_replicas.replica_index() else original(*args, **kwargs)


# Metrics that do not add up over replicas: one replica counts the rows of all.


def counted_on_all_rows(metrics: Sequence[keras.Metric]) -> AbstractContextManager[None]:
    """Return a context in which traced steps gather the rows of these metrics."""
    return keras_steps.patch_metrics(metrics, "update_state", _count_all_rows)


def _count_all_rows(
    metric: keras.Metric, original: Function[object], *args: object, **kwargs: object
) -> object:
    step = traced_step.current()
    # No communication in a branch or loop: perhaps not all replicas enter it.
    if step is None or tf.compat.v1.get_default_graph() is not step.graph:
        return original(*args, **kwargs)
    if step.present is None:
        raise UncompilableError(f"metric {metric.name!r} counts rows of all workers")
    args, kwargs = _on_all_rows((args, kwargs), sum_over_replicas)
    # The first replica counts as one process would, from what all have: a reset to other numbers
    # than zero gives each a part. The others have zero from then on.
    variables = metric.variables
    step.counted_once |= {id(variable) for variable in variables}
    with tf_replicas.counted_if(None):
        counts = sum_over_replicas([tf.convert_to_tensor(v) for v in variables])
    is_first = not tf_replicas.replica_index()
    with traced_step.tracing(None):
        for variable, count in zip(variables, counts, strict=True):
            variable.assign(count if is_first else tf.zeros_like(count))
        if not is_first:
            return None
        with tf_replicas.as_only_replica():
            return original(*args, **kwargs)


def _with_masks(arguments: Tree) -> list[Leaf]:
    """Return the leaves of arguments, and then their masks."""
    leaves = tf.nest.flatten(arguments)
    return [*leaves, *map(keras_steps.mask_of, leaves)]


def _is_joined(leaf: Leaf) -> bool:
    """Whether the rows of an argument are joined; words, which no sum joins, stay a replica's."""
    return tf.is_tensor(leaf) and leaf.dtype != tf.string


def _on_all_rows(
    arguments: tuple[Args, Kwargs], join: Callable[[list[tf.Tensor]], list[tf.Tensor]]
) -> tuple[Args, Kwargs]:
    """Return arguments and their masks with the rows of all replicas."""
    leaves = _with_masks(arguments)
    rows = iter(_rows_of_all([leaf for leaf in leaves if _is_joined(leaf)], join)[0])
    leaves = [next(rows) if _is_joined(leaf) else leaf for leaf in leaves]
    masked = map(keras_steps.with_mask, leaves, leaves[len(leaves) // 2 :])
    whole: tuple[Args, Kwargs] = tf.nest.pack_sequence_as(arguments, [*masked])
    return whole


def _rows_of_all(
    tensors: Sequence[tf.Tensor],
    join: Callable[[list[tf.Tensor]], list[tf.Tensor]] = sum_over_replicas,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gather rows in the order of replicas; returns them, and the number of the first own one.

    Each replica pads its rows with zeros, and a sum joins them.
    """
    index, size = tf_replicas.replica_index(), tf.distribute.get_strategy().num_replicas_in_sync
    mine = tf_replicas.if_present(tf.shape(tensors[0])[0])
    counts = sum_over_replicas(mine * tf.one_hot(index, size, dtype=tf.int32))
    before, after = tf.reduce_sum(counts[:index]), tf.reduce_sum(counts[index + 1 :])

    def placed(tensor: tf.Tensor) -> tf.Tensor:
        known = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor
        ends = [[before, after], *([0, 0] for _ in range(tensor.shape.rank - 1))]
        return tf.pad(known[:mine], ends)

    with tf_replicas.counted_if(None):
        whole = join([placed(tensor) for tensor in tensors])
    rows = [tf.cast(rows, tensor.dtype) for rows, tensor in zip(whole, tensors, strict=True)]
    return rows, before


def sum_over_batch(value: tf.Tensor) -> tf.Tensor:
    """Sum a tensor over the parts of a batch that workers and devices compute.

    For a loss or metric that is one number of all rows, such as a quotient of sums: with it, N
    workers compute the number of one process, and its gradient. It sends one message in each
    direction, in which every replica must take part: call it outside `tf.cond` and `tf.while_loop`.

    Args:
        value: Sums over the rows at hand, floating-point, of any shape; alike on all workers.

    Returns:
        The sum over the rows of the whole batch, in the shape of `value`. Where one process
        computes all rows, `value` itself.

    Raises:
        ValueError: Within `jit_compile=True`, since XLA can compile no communication.

    Example:
        >>> import dtk, keras
        >>> def dice(y_true, y_pred):
        ...     both = dtk.layers.sum_over_batch(keras.ops.sum(y_true * y_pred))
        ...     either = dtk.layers.sum_over_batch(keras.ops.sum(y_true + y_pred))
        ...     return 1 - 2 * both / either
        >>> float(dice(keras.ops.ones((4, 1)), keras.ops.ones((4, 1))))
        0.0
    """
    _note_call("sum_over_batch")
    replica = tf.distribute.get_replica_context()
    if (
        replica is None
        or replica.num_replicas_in_sync == 1
        or tf_replicas.computes_as_one_replica()
    ):
        return value
    return sum_with_gradient(value)


def gather_over_batch(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int]:
    """Gather the rows of a tensor from the parts of a batch that workers and devices compute.

    For a loss that compares rows with each other, such as a contrastive one: with it, N workers
    compute the numbers of one process, and their gradients. Compare the rows at hand with all rows,
    for one value per row; `keras.losses.circle` takes all rows as its references. It sends two
    messages forward and one backward, in which every replica must take part: call it outside
    `tf.cond` and `tf.while_loop`. Rows that are looked up are gathered after the lookup.

    Args:
        value: Rows at hand, numbers or booleans, `[rows, ...]`; other sizes alike on all workers.

    Returns:
        The rows of the whole batch in their order, `[rows of all, ...]`, and the number of the
        first row at hand among them. Where one process computes all rows, `value` itself and 0.

    Raises:
        ValueError: Not a dense tensor of rows; or `jit_compile=True`, since XLA can compile no
            communication.

    Example:
        >>> import dtk, keras
        >>> def contrastive(one, other):
        ...     others, first = dtk.layers.gather_over_batch(other)
        ...     likeness = keras.ops.matmul(one, keras.ops.transpose(others))
        ...     own = first + keras.ops.arange(keras.ops.shape(one)[0])  # each row's partner
        ...     return keras.losses.sparse_categorical_crossentropy(own, likeness, from_logits=True)
        >>> [round(float(loss), 4) for loss in contrastive(keras.ops.eye(2), keras.ops.eye(2))]
        [0.3133, 0.3133]
    """
    unfit = isinstance(value, keras.KerasTensor | tf.RaggedTensor | tf.SparseTensor)
    if unfit or not (value := tf.convert_to_tensor(value)).shape.rank:
        raise ValueError(
            f"gather_over_batch was given {value}; expected a dense tensor [rows, ...], in a loss, "
            "a step, or the call of a layer"
        )
    _note_call("gather_over_batch")
    replica = tf.distribute.get_replica_context()
    if replica is None or tf_replicas.computes_as_one_replica():
        return value, 0
    if replica.num_replicas_in_sync == 1:
        sum_over_replicas(tf.zeros([]))  # workers behind parameter servers may refuse
        return value, 0
    (rows,), first = _rows_of_all([value], lambda parts: [sum_with_gradient(*parts)])
    return rows, first


@contextlib.contextmanager
def noting_calls() -> Iterator[list[str]]:
    """Return a context that lists the calls by which this thread's script asks for other rows."""
    calls: list[str] = []
    with temporarily(tf_replicas.running, calls_for_rows=calls):
        yield calls


def _note_call(name: str) -> None:
    """Note that a script asks for other rows; the loss being computed then adds up by itself."""
    if tf_replicas.running.calls_for_rows is not None:
        tf_replicas.running.calls_for_rows.append(name)
    step = traced_step.current()
    if step is not None and step.loss in step.losses:
        step.losses[step.loss].is_cured = True


def summed_by_losses(
    x: tf.Tensor,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    """Sum as Keras's losses do; sums of everything (Dice, Tversky) are over all replicas."""
    value = original(x, axis, keepdims)
    return sum_over_batch(value) if axis is None else value


@tf.custom_gradient
def sum_with_gradient(
    value: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Sum a tensor over the replicas; weigh its gradient as the tape's target will be weighed."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        step = traced_step.current()
        if step is None or not step.weighed_later:
            return sum_with_gradient(upstream)
        share = tf.cast(step.share, upstream.dtype)
        return tf.math.divide_no_nan(sum_with_gradient(step.weighed(upstream)), share)

    return sum_over_replicas(value), gradient
