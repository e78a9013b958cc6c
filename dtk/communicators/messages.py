"""Collectives about to run, and several of them side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.sequencer import CollectiveSequencer


class Message(NamedTuple):
    """A collective about to run.

    Attributes:
        inputs: Flat tensors, in dtypes the backend takes.
        send: Called with them, and how many inputs of others go before: its first lane.
        finish: Makes the result of what `send` returned: a tensor, `tf.IndexedSlices`, or a list.
    """

    inputs: list[tf.Tensor]
    send: Callable[[list[tf.Tensor], int], list[tf.Tensor]]
    finish: Callable[[list[tf.Tensor]], tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]


def run_together(
    messages: Sequence[Message], sequencer: CollectiveSequencer
) -> list[tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]:
    """Send messages side by side, each once its own values are there.

    A backend may have few lanes, and let those that share one wait for each other.

    Args:
        messages: What to send; every rank passes the same ones, in the same order.
        sequencer: Orders them, as one collective, among all others.

    Returns:
        The result of each message.
    """
    if not messages:
        return []
    lengths = []

    def send(flat: list[tf.Tensor]) -> list[tf.Tensor]:
        outputs: list[tf.Tensor] = []
        begin = 0
        for message in messages:
            end = begin + len(message.inputs)
            received = message.send(flat[begin:end], begin)
            lengths.append(len(received))
            outputs += received
            begin = end
        return outputs

    received = iter(sequencer.run([t for m in messages for t in m.inputs], send))
    return [
        message.finish(list(itertools.islice(received, length)))
        for message, length in zip(messages, lengths, strict=True)
    ]
