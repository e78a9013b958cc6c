"""A stage's step in which forward and backward passes of microbatches take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.layers.pipelining import transfer
from dtk.layers.pipelining.schedule import Pass, gpipe, one_forward_one_backward
from dtk.nests import Nest

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


class StagePlace(NamedTuple):
    """A stage, and what it exchanges with others."""

    stage: keras.Model  # the model of this rank
    group: Communicator  # the ranks of the pipeline
    sources: Sequence[int]  # the stages it takes inputs from; none for the first
    dests: Sequence[int]  # the stages that take its outputs; none for the last
    outputs: Sequence[keras.KerasTensor]  # what each stage puts out


class _Kept(NamedTuple):
    """What a forward pass leaves for the backward pass."""

    tape: tf.GradientTape
    taken: list[tf.Tensor]
    output: tf.Tensor


class ComputedStep(NamedTuple):
    """What a step has computed."""

    outputs: list[tf.Tensor]  # of every microbatch, in order
    gradients: list[Gradient]  # of the stage's trainable variables, summed over microbatches


def train(
    place: StagePlace,
    microbatches: Sequence[Nest],
    gradient_of_loss: Callable[[int, tf.Tensor], tf.Tensor],
) -> ComputedStep:
    """Compute the gradients of a stage, one microbatch forwards and one backwards in turn.

    In a graph nothing is computed before what stands before it in the schedule, so that activations
    of few microbatches are held. Eagerly, where a message is waited for, all microbatches go
    forwards first.
    """
    step = _StageStep(place, microbatches, gradient_of_loss)
    group, count = place.group, len(microbatches)
    eager = tf.executing_eagerly()
    order = gpipe(count) if eager else one_forward_one_backward(group.rank, group.size, count)
    for slot in order:
        if slot.direction is Pass.FORWARD:
            step.forward(slot.microbatch)
        else:
            step.backward(slot.microbatch)
    return ComputedStep([step.outputs[m] for m in range(count)], step.gradients)


class _StageStep:
    """One step of a stage."""

    def __init__(
        self,
        place: StagePlace,
        microbatches: Sequence[Nest],
        gradient_of_loss: Callable[[int, tf.Tensor], tf.Tensor],
    ):
        self._place, self._microbatches = place, microbatches
        self._gradient_of_loss = gradient_of_loss
        self._kept: dict[int, _Kept] = {}
        self._upstream: dict[int, tf.Tensor] = {}
        self._before: list[tf.Tensor] = []
        self.outputs: dict[int, tf.Tensor] = {}
        self.gradients: list[Gradient] = [None] * len(place.stage.trainable_variables)

    def forward(self, number: int) -> None:
        """Compute a microbatch, and send what comes out."""
        place, given = self._place, self._microbatches[number]
        rows = tf.shape(tf.nest.flatten(given)[0])[0]
        received = [self._receive(rows, source, number) for source in place.sources]
        with tf.control_dependencies(self._before), tf.GradientTape() as tape:
            taken = [tf.identity(value) for value in received]
            tape.watch(taken)
            own = tf.nest.map_structure(tf.identity, given)
            inputs = taken if len(taken) > 1 else (taken or [own])[0]
            output = place.stage(inputs, training=True)
            if not place.dests:
                self._upstream[number] = self._gradient_of_loss(number, output)
        for dest in place.dests:
            transfer.send(output, dest, place.group, number)
        self._kept[number] = _Kept(tape, taken, output)
        self.outputs[number] = output
        self._before = [output]

    def _receive(self, rows: tf.Tensor, source: int, number: int) -> tf.Tensor:
        spec, group = self._place.outputs[source], self._place.group
        shape = spec.shape[1:]
        return transfer.receive([rows, *shape], [None, *shape], spec.dtype, source, group, number)

    def backward(self, number: int) -> None:
        """Compute the gradients of a microbatch, and send those of what was received."""
        place, kept = self._place, self._kept.pop(number)
        shape, dtype = tf.shape(kept.output), kept.output.dtype
        upstream = [
            transfer.receive(shape, kept.output.shape, dtype, dest, place.group, number)
            for dest in place.dests
        ] or [self._upstream.pop(number)]
        variables = place.stage.trainable_variables
        with tf.control_dependencies(self._before):
            found = kept.tape.gradient(
                kept.output,
                [*(v.value for v in variables), *kept.taken],
                output_gradients=tf.add_n(upstream),
                unconnected_gradients=tf.UnconnectedGradients.NONE,
            )
        for i, gradient in enumerate(found[: len(variables)]):
            self.gradients[i] = added(self.gradients[i], gradient)
        back = zip(place.sources, kept.taken, found[len(variables) :], strict=True)
        for source, taken, gradient in back:
            sent = tf.zeros_like(taken) if gradient is None else gradient
            transfer.send(sent, source, place.group, number)
        self._before = [g for g in found if isinstance(g, tf.Tensor)][:1]


def added(one: Gradient, other: Gradient) -> Gradient:
    """Add two gradients of a variable."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0),
            tf.concat([one.indices, other.indices], 0),
            one.dense_shape,
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
