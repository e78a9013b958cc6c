"""Collectives with gradients, for layers, losses and custom training loops.

Each returns the result of the `Communicator` method of the same name. Its gradient is of the sum of
the losses of all ranks; if every rank computes the same loss, use the functions of
`dtk.layers.regions`. Forward, and the backward pass:

    allreduce sum, mean     the same
    allgather               reduce-scatter: a rank gets the sum of the gradients of its rows
    reduce_scatter          allgather
    alltoall                alltoall, with splits transposed
    broadcast               sum on the root, zeros elsewhere
    scatter, gather         gather, scatter
    send, recv              recv, send

After Fukuda et al. (ChainerMN, arXiv:1710.11351). Gradients of gradients are right, since the
backward pass consists of these functions.

The rule of `Communicator` holds for the backward pass, too: all ranks must reach the same
collectives in the same order.

- The backward pass reaches a collective whatever its input is: gradients pass wherever the result
  is used, since every call reads `Communicator.watched`. (A tape made with
  `watch_accessed_variables=False` must watch that variable.) For values without gradients use the
  communicator's own methods.
- The shape of a graph alone decides in which order TensorFlow walks backwards through it, so you
  need to do nothing if the functions of all ranks have the same shape. If they do not, as at the
  ends of `send` and `recv`, each collective must depend on the one before: see `pseudo_connect`.
- A tape may be in a loop (`steps_per_execution`), but not around a `tf.while_loop` with collectives
  in it: TensorFlow refuses to trace their backward pass. Write such a loop in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from dtk.communicators.base import Communicator, unconverted
from dtk.communicators.row_blocks import checked_splits
from dtk.errors import at_rank
from dtk.even_division import even_sizes, even_sizes_in_graph
from dtk.nests import Function

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

_Rows: TypeAlias = "Sequence[int] | tf.Tensor"
_Map: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
# Messages of gradients have another tag, so that they never meet messages of values.
_GRADIENT_TAG = 1 << 20


@unconverted
def with_gradient(value: tf.Tensor, forward: _Map, backward: _Map) -> tf.Tensor:
    """Return `forward(value)`; its gradient is `backward` of the result's gradient."""

    @tf.custom_gradient
    def mapped(x: tf.Tensor) -> tuple[tf.Tensor, _Map]:
        return forward(x), lambda dy: unconverted(backward)(tf.convert_to_tensor(dy))

    return mapped(tf.convert_to_tensor(value))


@unconverted
def pseudo_connect(token: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Make a tensor depend on a token, so that the backward pass reaches the `send` behind it.

    Args:
        token: The token from `send`, or another tensor that must not be left out.
        value: The tensor that you use further.

    Returns:
        `value`. Its gradient goes to `value`, and zeros to `token`.
    """

    @tf.custom_gradient
    def connected(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
        zeros = tf.zeros_like(a)
        return tf.identity(b), lambda dy: (zeros, dy)

    return connected(token, tf.convert_to_tensor(value))


def watched(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Return the same tensor, made to depend on a variable that every tape watches.

    Otherwise, if a rank's value depends on no variable, its backward pass would leave out the
    collective for which the other ranks wait.
    """
    return pseudo_connect(tf.convert_to_tensor(communicator.watched), value)


@unconverted
def allreduce(value: tf.Tensor, communicator: Communicator, op: str = "sum") -> tf.Tensor:
    """Combine a tensor over all ranks.

    Args:
        value: A tensor of equal shape on all ranks.
        communicator: Communicator of the ranks.
        op: "sum" or "mean".

    Returns:
        The sum or mean, on every rank.

    Raises:
        ValueError: Another op, which has no gradient here.
    """
    if op not in ("sum", "mean"):
        raise ValueError(
            at_rank(communicator.rank, f"allreduce with a gradient got op={op!r}; 'sum' or 'mean'")
        )
    return _allreduce(watched(value, communicator), communicator, op)


@unconverted
def allgather(value: tf.Tensor, communicator: Communicator, rows: _Rows | None = None) -> tf.Tensor:
    """Concatenate every rank's rows, in rank order.

    Args:
        value: Shape `[rows, ...]`; row counts may differ. A scalar counts as one row.
        communicator: Communicator of the ranks.
        rows: Row count of each rank, if every rank knows it; saves a message.

    Returns:
        All rows, on every rank.
    """
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        value = value[None]
    counts = _counts(value, communicator) if rows is None else rows
    return _allgather(watched(value, communicator), communicator, counts)


@unconverted
def reduce_scatter(value: tf.Tensor, communicator: Communicator, op: str = "sum") -> tf.Tensor:
    """Combine a tensor over all ranks, and keep this rank's block of rows.

    Args:
        value: Shape `[rows, ...]`, equal on all ranks; `rows` is known when a function is traced.
        communicator: Communicator of the ranks.
        op: "sum" or "mean".

    Returns:
        This rank's rows, see `dtk.even_division.even_sizes`.

    Raises:
        ValueError: Another op, or the number of rows is not known.
    """
    value = tf.convert_to_tensor(value)
    if op not in ("sum", "mean") or value.shape.rank == 0 or value.shape[0] is None:
        message = (
            f"reduce_scatter with a gradient got op={op!r} and shape {value.shape}; it takes "
            "'sum' or 'mean', and a number of rows that is known"
        )
        raise ValueError(at_rank(communicator.rank, message))
    if op == "mean":
        value = value / communicator.size
    rows = even_sizes(value.shape[0], communicator.size)
    return _reduce_rows(watched(value, communicator), communicator, rows)


@unconverted
def alltoall(
    value: tf.Tensor, communicator: Communicator, splits: _Rows | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send block j of the rows to rank j.

    Args:
        value: Shape `[rows, ...]`.
        communicator: Communicator of the ranks.
        splits: Rows for each rank, shape `[size]`; equal blocks when None. If every rank knows all
            others' splits, give them as shape `[size, size]`, row i for rank i; saves a message.

    Returns:
        The received rows in rank order, and how many came from each rank (int32, shape `[size]`).

    Raises:
        ValueError: `splits` is None and the rows do not divide evenly; or `splits` has a wrong
            shape or, eagerly, a wrong sum.
    """
    size, rank = communicator.size, communicator.rank
    value = tf.convert_to_tensor(value)
    matrix = checked_splits(value, splits, rank, size)
    if matrix.shape.rank == 1:
        matrix = communicator.allgather(matrix[None], [1] * size)
    received = exchange(watched(value, communicator), communicator, matrix)
    return received, tf.cast(matrix[:, rank], tf.int32)


@unconverted
def broadcast(value: tf.Tensor, communicator: Communicator, root: int = 0) -> tf.Tensor:
    """Give every rank the root's value.

    Args:
        value: A tensor of equal shape and dtype on all ranks; only `root`'s values count.
        communicator: Communicator of the ranks.
        root: The rank whose value counts.

    Returns:
        The root's value, on every rank.
    """
    return _broadcast(watched(value, communicator), communicator, root)


@unconverted
def reduce(value: tf.Tensor, communicator: Communicator, root: int = 0) -> tf.Tensor:
    """Add a tensor up on the root: the gradient of `broadcast`.

    Args:
        value: A tensor of equal shape on all ranks.
        communicator: Communicator of the ranks.
        root: The rank that gets the sum.

    Returns:
        The sum on `root`, zeros elsewhere.
    """
    return _reduce(watched(value, communicator), communicator, root)


@unconverted
def scatter(
    value: tf.Tensor, communicator: Communicator, root: int = 0, rows: Sequence[int] | None = None
) -> tf.Tensor:
    """Divide the root's rows among all ranks.

    Args:
        value: Shape `[rows, ...]`, of equal row shape and dtype on all ranks; only `root`'s values
            count.
        communicator: Communicator of the ranks.
        root: The rank whose rows are divided.
        rows: How many rows each rank gets, if every rank knows it; saves a message. As even as
            possible when None.

    Returns:
        This rank's rows.

    Raises:
        ValueError: `value` is a scalar, or `rows` does not have one number for each rank.
    """
    value = _with_rows(value, rows, communicator, "scatter")
    size, rank = communicator.size, communicator.rank
    counts: _Rows
    if rows is None:  # only the root knows how many rows there are
        counts = even_sizes_in_graph(
            communicator.broadcast(tf.shape(value, tf.int64)[0], root), size
        )
    else:
        counts = list(rows)
    mine = watched(value if rank == root else value[:0], communicator)
    received = exchange(mine, communicator, _from_root(counts, root, size))
    return tf.ensure_shape(received, [None if rows is None else rows[rank], *value.shape[1:]])


@unconverted
def gather(
    value: tf.Tensor, communicator: Communicator, root: int = 0, rows: Sequence[int] | None = None
) -> tf.Tensor:
    """Concatenate every rank's rows on the root.

    The other ranks get a tensor without rows. They need it for their gradient: connect it to the
    tensor that they differentiate (`pseudo_connect`).

    Args:
        value: Shape `[rows, ...]`.
        communicator: Communicator of the ranks.
        root: The rank that gets the rows.
        rows: Row count of each rank, if every rank knows it; saves a message.

    Returns:
        All rows on `root`, a tensor of no rows elsewhere.

    Raises:
        ValueError: `value` is a scalar, or `rows` does not have one number for each rank, or does
            not fit this rank's rows.
    """
    value = _with_rows(value, rows, communicator, "gather")
    size, rank = communicator.size, communicator.rank
    counts = _counts(value, communicator) if rows is None else rows
    matrix = tf.transpose(_from_root(counts, root, size))
    received = exchange(watched(value, communicator), communicator, matrix)
    total = None if rows is None else sum(rows)
    return tf.ensure_shape(received, [total if rank == root else 0, *value.shape[1:]])


@unconverted
def send(value: tf.Tensor, communicator: Communicator, dest: int, tag: int = 0) -> tf.Tensor:
    """Send one tensor to `dest`, which calls `recv` with the same tag.

    The gradient comes back the same way, once the backward pass reaches the token: connect the
    token to the tensor that this rank differentiates. A rank with nothing else to differentiate can
    differentiate the token itself.

    Args:
        value: A floating-point tensor of any shape; `dest` must know the shape.
        communicator: Communicator of the two ranks.
        dest: The rank that receives.
        tag: Tells messages between the same two ranks apart.

    Returns:
        A token, a scalar zero of the dtype of `value`; see `pseudo_connect`.

    Example:
        Two ranks compute y = f(g(x)), and both differentiate:

            if rank == 0:
                token = send(g(x), communicator, dest=1)
                gradients = tape.gradient(token, g_weights)
            else:
                loss = f(recv([8, 4], tf.float32, communicator, source=0))
                gradients = tape.gradient(loss, f_weights)
    """
    value = watched(tf.convert_to_tensor(value), communicator)
    shape = value.shape if value.shape.is_fully_defined() else tf.shape(value)
    none = tf.reshape(value, [-1])[:0]  # empty, but depends on the value

    def forward(x: tf.Tensor) -> tf.Tensor:
        communicator.send(x, dest, tag)
        return tf.zeros([], x.dtype)

    def receive(x: tf.Tensor) -> tf.Tensor:
        return communicator.recv(shape, x.dtype, dest, tag + _GRADIENT_TAG)

    def refuse_second(_: tf.Tensor) -> tf.Tensor:
        message = (
            "a gradient of a gradient that came by recv: the other rank sends no second one; use "
            "alltoall, allgather or broadcast, whose gradients have gradients"
        )
        raise NotImplementedError(at_rank(communicator.rank, message))

    return with_gradient(value, forward, lambda _: with_gradient(none, receive, refuse_second))


@unconverted
def recv(
    shape: Sequence[int] | tf.Tensor,
    dtype: tf.DType | str,
    communicator: Communicator,
    source: int,
    tag: int = 0,
    token: tf.Tensor | None = None,
) -> tf.Tensor:
    """Receive one tensor of known shape and dtype from `source`; its gradient is sent back.

    Args:
        shape: Shape of the tensor sent.
        dtype: Dtype of the tensor sent, floating point.
        communicator: Communicator of the two ranks.
        source: The rank that sends.
        tag: The sender's tag.
        token: Token of a `send` before this `recv`: in the backward pass, this rank first sends the
            gradient of the `recv`, then receives the gradient of the `send`.

    Returns:
        The tensor.
    """
    anchor = watched(tf.zeros([]) if token is None else token, communicator)

    def backward(dy: tf.Tensor) -> tf.Tensor:
        communicator.send(dy, source, tag + _GRADIENT_TAG)
        return tf.zeros_like(anchor)

    return with_gradient(anchor, lambda _: communicator.recv(shape, dtype, source, tag), backward)


def _counts(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Return how many rows each rank has, int64, shape `[size]`."""
    ones = [1] * communicator.size
    counts = communicator.allgather(tf.shape(value, tf.int64)[:1], ones)
    return tf.ensure_shape(counts, [communicator.size])


def _with_rows(
    value: tf.Tensor, rows: Sequence[int] | None, communicator: Communicator, called: str
) -> tf.Tensor:
    """Return the value; raise if it is a scalar or `rows` is not one number per rank."""
    value = tf.convert_to_tensor(value)
    size = communicator.size
    if value.shape.rank == 0 or (rows is not None and len(rows) != size):
        arguments = (
            f"a scalar and rows={rows}" if value.shape.rank == 0 else f"rows={list(rows or ())}"
        )
        message = (
            f"{called} got {arguments}, expected rows, and a number of them for each of {size} "
            "ranks"
        )
        raise ValueError(at_rank(communicator.rank, message))
    return value


def _from_root(rows: _Rows, root: int, size: int) -> tf.Tensor:
    """Return how many rows each rank sends to each, shape `[size, size]`; only the root sends."""
    counts = tf.cast(tf.convert_to_tensor(rows), tf.int64)
    return tf.one_hot(root, size, dtype=tf.int64)[:, None] * counts


# The gradients of these functions consist of each other.


def _allreduce(value: tf.Tensor, communicator: Communicator, op: str) -> tf.Tensor:
    return with_gradient(
        value, lambda x: communicator.allreduce(x, op), lambda dy: _allreduce(dy, communicator, op)
    )


def _allgather(value: tf.Tensor, communicator: Communicator, rows: _Rows) -> tf.Tensor:
    total = None if tf.is_tensor(rows) else sum(rows)
    return with_gradient(
        value,
        lambda x: tf.ensure_shape(communicator.allgather(x, rows), [total, *x.shape[1:]]),
        lambda dy: _reduce_rows(dy, communicator, rows),
    )


def _reduce_rows(value: tf.Tensor, communicator: Communicator, rows: _Rows) -> tf.Tensor:
    """Add up, and keep this rank's block; `rows` is the length of each rank's block."""
    size, rank = communicator.size, communicator.rank

    def forward(x: tf.Tensor) -> tf.Tensor:
        if not tf.is_tensor(rows) and list(rows) == even_sizes(sum(rows), size):
            return communicator.reduce_scatter(x)
        counts = tf.cast(tf.convert_to_tensor(rows), tf.int64)
        received, _ = communicator.alltoall(x, tf.tile(counts[None], [size, 1]))
        shape = tf.concat([[size], counts[rank][None], tf.shape(x, tf.int64)[1:]], axis=0)
        added = tf.reduce_sum(tf.reshape(received, shape), axis=0)
        kept = None if tf.is_tensor(rows) else rows[rank]
        return tf.ensure_shape(added, [kept, *x.shape[1:]])

    return with_gradient(value, forward, lambda dy: _allgather(dy, communicator, rows))


def exchange(value: tf.Tensor, communicator: Communicator, matrix: tf.Tensor) -> tf.Tensor:
    """Send `matrix[i, j]` rows from rank i to rank j, as `alltoall` does.

    Unlike `alltoall`, the backward pass sends nothing if `value` does not depend on a source of the
    gradient; this must be the same on all ranks.
    """
    return with_gradient(
        value,
        lambda x: communicator.alltoall(x, matrix)[0],
        lambda dy: exchange(dy, communicator, tf.transpose(matrix)),
    )


def _broadcast(value: tf.Tensor, communicator: Communicator, root: int) -> tf.Tensor:
    return with_gradient(
        value, lambda x: communicator.broadcast(x, root), lambda dy: _reduce(dy, communicator, root)
    )


def _reduce(value: tf.Tensor, communicator: Communicator, root: int) -> tf.Tensor:
    def forward(x: tf.Tensor) -> tf.Tensor:
        added = communicator.allreduce(x)
        return added if communicator.rank == root else tf.zeros_like(added)

    return with_gradient(value, forward, lambda dy: _broadcast(dy, communicator, root))
