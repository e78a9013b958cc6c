"""Messages between two ranks, with gradients; see `dtk.layers.collectives`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.layers.gradients import Map, pseudo_connect, unconverted, watched, with_gradient

__all__ = ["pseudo_connect", "recv", "send"]

# Messages of gradients have another tag, so that they never meet messages of values.
_GRADIENT_TAG = 1 << 20


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
