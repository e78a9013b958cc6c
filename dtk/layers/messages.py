"""Messages between two ranks that gradients pass through; see `dtk.layers.collectives`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.layers.gradients import Map, pseudo_connect, unconverted, watched, with_gradient

__all__ = ["pseudo_connect", "recv", "send"]

# Messages of gradients have a tag of their own: they never meet those of values.
_GRADIENT_TAG = 1 << 20


@unconverted
def send(value: tf.Tensor, communicator: Communicator, dest: int, tag: int = 0) -> tf.Tensor:
    """Send one tensor to `dest`, which calls `recv` with the same tag.

    The gradient comes back the same way, once the backward pass reaches the token: connect it to
    what this rank differentiates. If this rank has nothing else to differentiate, the token itself
    will do.

    Args:
        value: Floating point, of any shape; `dest` must know it.
        communicator: Of the two ranks.
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
    none = tf.reshape(value, [-1])[:0]  # depends on what the value does

    def forward(x: tf.Tensor) -> tf.Tensor:
        communicator.send(x, dest, tag)
        return tf.zeros([], x.dtype)

    def receive(x: tf.Tensor) -> tf.Tensor:
        return communicator.recv(shape, x.dtype, dest, tag + _GRADIENT_TAG)

    def backward(dy: tf.Tensor) -> tf.Tensor:
        del dy
        return with_gradient(none, receive, _refuse_second(communicator))

    return with_gradient(value, forward, backward)


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
        shape: Of what is sent.
        dtype: Of what is sent, floating point.
        communicator: Of the two ranks.
        source: The rank that sends.
        tag: As the sender gives it.
        token: Of a `send` that comes first: its gradient comes after this one's is sent.

    Returns:
        The tensor.
    """
    given = watched(tf.zeros([]) if token is None else token, communicator)

    def backward(dy: tf.Tensor) -> tf.Tensor:
        communicator.send(dy, source, tag + _GRADIENT_TAG)
        return tf.zeros_like(given)

    return with_gradient(given, lambda _: communicator.recv(shape, dtype, source, tag), backward)


def _refuse_second(communicator: Communicator) -> Map:
    def refuse(dy: tf.Tensor) -> tf.Tensor:
        del dy
        raise NotImplementedError(
            at_rank(
                communicator.rank,
                "a gradient of a gradient that came by recv: the other rank sends no second one; "
                "use alltoall, allgather or broadcast, whose gradients have gradients",
            )
        )

    return refuse
