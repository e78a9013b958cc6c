"""A pipeline's stages: which take from which, what they send each other, and a step of "1f1b".

Time goes to the right; three stages compute microbatches 0 to 3 forwards (f) and backwards (b):

    gpipe  stage 0   f0 f1 f2 f3 .  .  .  .  b3 b2 b1 b0      all forwards, then all backwards
           stage 1   .  f0 f1 f2 f3 .  .  b3 b2 b1 b0 .
           stage 2   .  .  f0 f1 f2 f3 b3 b2 b1 b0 .  .

    1f1b   stage 0   f0 f1 f2 .  .  b0 f3 b1 .  b2 .  b3      at most P - stage are held
           stage 1   .  f0 f1 .  b0 f2 b1 f3 b2 .  b3 .
           stage 2   .  .  f0 b0 f1 b1 f2 b2 f3 b3 .  .

With P stages and M microbatches a stage is idle for (P - 1) / (M + P - 1) of either step.

Sources: Huang et al. 2019 (arXiv:1811.06965), GPipe; Narayanan et al. 2021 (arXiv:2006.09503),
PipeDream-Flush.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.even_division import even_bounds
from dtk.layers.collectives import with_gradient
from dtk.nests import Function, Tree

# A stage, or a function without arguments that builds it.
Stage: TypeAlias = "keras.Model | Callable[[], keras.Model]"
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
FORWARD, BACKWARD = "f", "b"
# A computation of a stage: its direction, and the microbatch.
Slot: TypeAlias = tuple[str, int]
# Microbatch m is sent under this tag plus m, which leaves the tags below to layers of the user's.
_FIRST_TAG = 1 << 20


def gpipe(microbatches: int) -> list[Slot]:
    """Return GPipe's order.

    Example:
        >>> gpipe(2)
        [('f', 0), ('f', 1), ('b', 1), ('b', 0)]
    """
    forward = [(FORWARD, m) for m in range(microbatches)]
    return forward + [(BACKWARD, m) for m in reversed(range(microbatches))]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Slot]:
    """Return the order in which a stage holds activations of as few microbatches as can be.

    A stage first computes as many microbatches forwards as there are stages behind it, then one
    forwards and one backwards in turn.

    Example:
        >>> one_forward_one_backward(0, 2, 3)
        [('f', 0), ('f', 1), ('b', 0), ('f', 2), ('b', 1), ('b', 2)]
    """
    ahead = min(stages - stage - 1, microbatches)
    order = [(FORWARD, m) for m in range(ahead)]
    for m in range(microbatches - ahead):
        order += [(FORWARD, ahead + m), (BACKWARD, m)]
    return order + [(BACKWARD, m) for m in range(microbatches - ahead, microbatches)]


def microbatch(inputs: Tree, part: int, parts: int) -> Tree:
    """Cut the rows of one microbatch, as even as can be."""

    def rows(value: tf.Tensor) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        count = tf.shape(value)[0] if value.shape[0] is None else value.shape[0]
        begin, end = even_bounds(count, part, parts)
        return value[begin:end]

    return tf.nest.map_structure(rows, inputs)


def rows_of(inputs: Tree) -> tf.Tensor:
    """Return the number of rows of a batch."""
    return tf.shape(tf.nest.flatten(inputs)[0])[0]


def check(stages: Sequence[Stage], microbatches: int, schedule: str, group: Communicator) -> None:
    """Raise a ValueError for a pipeline that these ranks cannot make."""
    told = ""
    if schedule not in ("gpipe", "1f1b"):
        told = f"schedule={schedule!r}; expected 'gpipe' or '1f1b'"
    elif isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        told = f"microbatches={microbatches!r}; expected a number, 1 or more"
    elif not stages or group.size not in (1, len(stages)):
        told = (
            f"a pipeline of {len(stages)} stages on {group.size} ranks; each stage takes one: make "
            f"the strategy with model_parallel={max(1, len(stages))}, or cut the model into "
            f"{group.size} stages"
        )
    if told:
        raise ValueError(at_rank(group.rank, told))


def check_fits(
    number: int,
    stage: keras.Model,
    sources: Sequence[int],
    outputs: Sequence[keras.KerasTensor],
    rank: int,
) -> None:
    """Raise a ValueError for a stage that does not take what its sources put out."""

    def same(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
        return tf.TensorShape(one).is_compatible_with(other)

    taken = [tuple(one.shape[1:]) for one in stage.inputs]
    given = [tuple(outputs[source].shape[1:]) for source in sources]
    if sources and (len(taken) != len(given) or not all(map(same, taken, given))):
        told = (
            f"stage {number} ({stage.name!r}) takes inputs of the shapes {taken} of a row, and "
            f"the stages {list(sources)} that lead to it put out {given}; change an Input, or "
            "links="
        )
        raise ValueError(at_rank(rank, told))


def sources_of(count: int, links: Mapping[int, Sequence[int]], rank: int) -> list[list[int]]:
    """Return the stages that each stage takes its inputs from."""
    for stage, sources in links.items():
        if stage not in range(count) or not all(0 <= source < stage for source in sources):
            told = (
                f"links={{{stage}: {list(sources)}}} of {count} stages; a stage takes the outputs "
                "of stages before it, counted from 0"
            )
            raise ValueError(at_rank(rank, told))
    return [
        sorted(links[stage]) if stage in links else [stage - 1] if stage else []
        for stage in range(count)
    ]


def _send(value: tf.Tensor, dest: int, group: Communicator, number: int) -> None:
    """Send a tensor of a microbatch to another stage, as soon as it is there."""
    with group.concurrent(f"pipeline {group.rank}-{dest}/{number}"):
        group.send(value, dest, _FIRST_TAG + number)


def _receive(
    shape: Sequence[int] | tf.Tensor,
    static: Sequence[int | None] | tf.TensorShape,
    dtype: tf.DType | str,
    source: int,
    group: Communicator,
    number: int,
) -> tf.Tensor:
    """Receive a tensor of a microbatch from another stage, whenever it comes."""
    with group.concurrent(f"pipeline {source}-{group.rank}/{number}"):
        found = group.recv(shape, dtype, source, _FIRST_TAG + number)
    return tf.ensure_shape(found, static)


class StageTransfer:
    """What one pass through a pipeline sends and receives on this rank.

    The gradient of what is sent is received, that of what is received is sent. TensorFlow computes
    gradients only along a path from the loss to a variable: `anchor` and the tokens of `send` are
    that path where it leads through other ranks (as ChainerMN's `pseudo_connect`).

    A graph computes whatever is ready. What other stages wait for must come early, so one
    microbatch is computed behind the other, forwards (`begin`) and backwards (`end`).
    """

    def __init__(self, group: Communicator, anchor: tf.Tensor | None):
        self._group = group
        self._anchor = anchor
        self._tokens: list[tf.Tensor] = []
        self._forwards: list[tf.Tensor] = []
        self._backwards: list[tf.Tensor] = []

    def begin(self, inputs: Tree) -> Tree:
        """Return inputs of a microbatch that are there once the one before is computed."""
        with tf.control_dependencies(self._forwards):
            return tf.nest.map_structure(tf.identity, inputs)

    def end(self, output: tf.Tensor) -> tf.Tensor:
        """Return the output of a microbatch, before which the next one does not begin.

        Its gradient is there once those of the microbatch before, in the order backwards, are.
        """
        self._forwards = [output]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies(self._backwards):
                return tf.identity(upstream)

        return with_gradient(output, tf.identity, gradient)

    def send(self, value: tf.Tensor, dest: int, number: int) -> None:
        """Send a tensor to another rank, which receives it."""

        def sent(given: tf.Tensor) -> tf.Tensor:
            _send(given, dest, self._group, number)
            return tf.zeros([], given.dtype)

        def gradient(_: tf.Tensor) -> tf.Tensor:
            return _receive(tf.shape(value), value.shape, value.dtype, dest, self._group, number)

        self._tokens.append(with_gradient(value, sent, gradient))

    def receive(
        self, rows: tf.Tensor, output: keras.KerasTensor, source: int, number: int
    ) -> tf.Tensor:
        """Receive a tensor like `output` from another rank, which sends it."""
        row = output.shape[1:]

        def received(_: tf.Tensor) -> tf.Tensor:
            return _receive([rows, *row], [None, *row], output.dtype, source, self._group, number)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            self._backwards = [upstream]
            _send(upstream, source, self._group, number)
            return tf.zeros_like(self._anchor)

        anchor = self._anchor
        return received(anchor) if anchor is None else with_gradient(anchor, received, gradient)

    def from_last(self, value: tf.Tensor) -> tf.Tensor:
        """Give every rank the last rank's tensor.

        The gradient goes to the last rank alone, which has computed the tensor: all ranks compute
        the same loss of it.
        """

        @tf.custom_gradient
        def shared(
            given: tf.Tensor, *tokens: tf.Tensor
        ) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
            def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
                return (upstream, *map(tf.zeros_like, tokens))

            found = self._group.broadcast(given, self._group.size - 1)
            return tf.ensure_shape(found, given.shape), gradient

        return shared(value, *self._tokens)


class InterleavedStep:
    """A stage's step in which forward and backward passes of microbatches take turns.

    Args:
        stage: The model of this rank.
        group: The ranks of the pipeline.
        sources: The stages it takes inputs from; none for the first.
        dests: The stages that take its outputs; none for the last.
        specs: What each stage puts out.

    Attributes:
        outputs: The output of each microbatch.
        gradients: Those of the stage's trainable variables, summed over microbatches.
    """

    def __init__(
        self,
        stage: keras.Model,
        group: Communicator,
        sources: Sequence[int],
        dests: Sequence[int],
        specs: Sequence[keras.KerasTensor],
    ):
        self._stage, self._group, self._specs = stage, group, specs
        self._sources, self._dests = sources, dests
        # What a forward pass leaves for the backward pass: its tape, and what was received.
        self._kept: dict[int, tuple[tf.GradientTape, list[tf.Tensor]]] = {}
        self._upstream: dict[int, tf.Tensor] = {}
        self._before: list[tf.Tensor] = []
        self.outputs: dict[int, tf.Tensor] = {}
        self.gradients: list[Gradient] = [None] * len(stage.trainable_variables)

    def run(
        self, parts: Sequence[Tree], gradient_of_loss: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> None:
        """Compute outputs and gradients of the microbatches.

        In a graph nothing is computed before what stands before it in the schedule, so that
        activations of few microbatches are held. Eagerly, where a message is waited for, all
        microbatches go forwards first.
        """
        order = one_forward_one_backward(self._group.rank, self._group.size, len(parts))
        for direction, number in gpipe(len(parts)) if tf.executing_eagerly() else order:
            if direction == FORWARD:
                self._forward(number, parts[number], gradient_of_loss)
            else:
                self._backward(number)

    def _forward(
        self, number: int, given: Tree, gradient_of_loss: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> None:
        received = []
        for source in self._sources:
            row, dtype = self._specs[source].shape[1:], self._specs[source].dtype
            shape = [rows_of(given), *row]
            received.append(_receive(shape, [None, *row], dtype, source, self._group, number))
        with tf.control_dependencies(self._before), tf.GradientTape() as tape:
            taken = [tf.identity(value) for value in received]
            tape.watch(taken)
            own = tf.nest.map_structure(tf.identity, given)
            inputs = taken if len(taken) > 1 else (taken or [own])[0]
            output = self._stage(inputs, training=True)
            if not self._dests:
                self._upstream[number] = gradient_of_loss(number, output)
        for dest in self._dests:
            _send(output, dest, self._group, number)
        self._kept[number], self.outputs[number] = (tape, taken), output
        self._before = [output]

    def _backward(self, number: int) -> None:
        (tape, taken), output = self._kept.pop(number), self.outputs[number]
        upstream = [
            _receive(tf.shape(output), output.shape, output.dtype, dest, self._group, number)
            for dest in self._dests
        ] or [self._upstream.pop(number)]
        variables = self._stage.trainable_variables
        with tf.control_dependencies(self._before):
            found = tape.gradient(
                output,
                [*(v.value for v in variables), *taken],
                output_gradients=tf.add_n(upstream),
                unconnected_gradients=tf.UnconnectedGradients.NONE,
            )
        mine, of_taken = found[: len(variables)], found[len(variables) :]
        self.gradients = [added(*pair) for pair in zip(self.gradients, mine, strict=True)]
        for source, value, gradient in zip(self._sources, taken, of_taken, strict=True):
            sent = tf.zeros_like(value) if gradient is None else gradient
            _send(sent, source, self._group, number)
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
