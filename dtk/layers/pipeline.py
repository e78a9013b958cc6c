"""A model cut into stages, one per rank: layer-wise model parallelism.

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

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, TypeAlias, TypedDict

import keras
import tensorflow as tf

from dtk.communicators.aligned_slices import concatenated
from dtk.communicators.base import Communicator
from dtk.communicators.shard import OneRanks
from dtk.compat import keras_models, keras_steps
from dtk.compat.keras_variables import set_owner
from dtk.errors import at_rank
from dtk.even_division import even_bounds
from dtk.layers.collectives import with_gradient
from dtk.layers.regions import model_group
from dtk.nests import Function, Tree
from dtk.patches import patch_around, temporarily
from dtk.schedules.runs import is_count

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


def counting_rows() -> AbstractContextManager[None]:
    """Return a context in which a microbatch without rows counts for nothing.

    Where a batch has fewer rows than there are microbatches, `BatchNormalization` would divide by
    zero, and its moving statistics stay NaN.
    """
    return patch_around(keras.layers.BatchNormalization, call=_normalize)


def _normalize(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    """Normalize a row of zeros where there is none, and put the statistics back."""
    if not (training and layer.trainable) or layer.synchronized:  # that counts rows itself
        return original(layer, inputs, training=training, mask=mask)
    rows, statistics = rows_of(inputs), layer.non_trainable_variables
    before = [tf.convert_to_tensor(v) for v in statistics]

    def filled(tensor: tf.Tensor) -> tf.Tensor:
        padding = [[0, tf.maximum(1 - rows, 0)], *([[0, 0]] * (tensor.shape.rank - 1))]
        return tf.ensure_shape(tf.pad(tensor, padding), [None, *tensor.shape[1:]])

    mask = None if mask is None else filled(mask)
    output = original(layer, filled(inputs), training=training, mask=mask)[:rows]
    for variable, value in zip(statistics, before, strict=True):
        variable.assign(tf.where(rows > 0, tf.convert_to_tensor(variable), value))
    return output


def rows_of(inputs: Tree) -> tf.Tensor:
    """Return the number of rows of a batch."""
    return tf.shape(tf.nest.flatten(inputs)[0])[0]


def inputs_of(received: list[tf.Tensor], inputs: Tree) -> Tree:
    """Return what a stage takes: outputs of other stages, or else the model's inputs."""
    return received if len(received) > 1 else (received or [inputs])[0]


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
        tensor = group.recv(shape, dtype, source, _FIRST_TAG + number)
    return tf.ensure_shape(tensor, static)


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

        def sent(tensor: tf.Tensor) -> tf.Tensor:
            _send(tensor, dest, self._group, number)
            return tf.zeros([], tensor.dtype)

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
            tensor: tf.Tensor, *tokens: tf.Tensor
        ) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
            def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
                return (upstream, *map(tf.zeros_like, tokens))

            result = self._group.broadcast(tensor, self._group.size - 1)
            return tf.ensure_shape(result, tensor.shape), gradient

        return shared(value, *self._tokens)


class InterleavedStep:
    """A stage's step in which forward and backward passes of microbatches take turns.

    Args:
        stage: The model of this rank.
        group: The ranks of the pipeline.
        sources: The stages it takes inputs from, in the order of its inputs; none for the first.
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
        self._inputs, self._sources, self._dests = sources, sorted(set(sources)), dests
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
        self, number: int, batch: Tree, gradient_of_loss: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> None:
        received = []
        for source in self._sources:
            row, dtype = self._specs[source].shape[1:], self._specs[source].dtype
            shape = [rows_of(batch), *row]
            received.append(_receive(shape, [None, *row], dtype, source, self._group, number))
        with tf.control_dependencies(self._before), tf.GradientTape() as tape:
            taken = [tf.identity(value) for value in received]
            tape.watch(taken)
            own = tf.nest.map_structure(tf.identity, batch)
            outputs = dict(zip(self._sources, taken, strict=True))
            inputs = inputs_of([outputs[source] for source in self._inputs], own)
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
            gradients = tape.gradient(
                output,
                [*(v.value for v in variables), *taken],
                output_gradients=tf.add_n(upstream),
                unconnected_gradients=tf.UnconnectedGradients.NONE,
            )
        mine, of_taken = gradients[: len(variables)], gradients[len(variables) :]
        self.gradients = [added(*pair) for pair in zip(self.gradients, mine, strict=True)]
        for source, value, gradient in zip(self._sources, taken, of_taken, strict=True):
            sent = tf.zeros_like(value) if gradient is None else gradient
            _send(sent, source, self._group, number)
        self._before = [g for g in gradients if isinstance(g, tf.Tensor)][:1]


def added(one: Gradient, other: Gradient) -> Gradient:
    """Add two gradients of a variable."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return concatenated([one, other])
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


class PipelineConfig(TypedDict):
    """Configuration of a pipeline."""

    stages: list[dict[str, object]]  # configuration of each stage
    microbatches: int  # see `Pipeline`
    schedule: str  # see `Pipeline`
    links: list[tuple[int, list[int]]]  # pairs of a stage and its sources
    name: str  # name of the model


class Pipeline(keras.Model):
    """Run a model's stages on one rank each, one part of the batch after the other.

    The batch is cut into microbatches. While one stage computes a microbatch, the stage before it
    computes the next one. Every rank of the group gets the outputs, losses and metrics of the whole
    batch, so plain `fit`, `evaluate` and `predict` work. Gradients equal those of all stages in a
    single process. With P stages and M microbatches a stage is idle for (P - 1) / (M + P - 1) of a
    step, if all take equally long.

    `BatchNormalization` normalizes each microbatch by itself, as in GPipe: it uses the statistics
    of the batch only if `microbatches` is 1. Masks do not travel between stages.

    Args:
        stages: Models with one output each, or functions that build them. Every rank builds all,
            one after the other, so that initial weights equal those of one process, and keeps its
            own.
        microbatches: Number of parts that a replica's batch is cut into.
        schedule: "gpipe": all microbatches forwards, then all backwards, for any loss. "1f1b": one
            forwards and one backwards in turn, which holds the activations of at most P instead of
            M microbatches, where the loss is one of Keras's that are means over rows. Other losses
            need all outputs before any gradient: steps are then those of "gpipe", and rank 0 says
            so.
        links: The source stages of a stage, by its number. A stage with several sources takes a
            list of their outputs, in this order; a source may stand there twice. A stage that is
            left out takes the output of the stage before it; stage 0 takes the model's inputs.
        communicator: Communicator with one rank for each stage, or with one rank that holds all
            stages, as in a script without a launcher. None: `model_communicator` of the strategy in
            whose scope the pipeline is made.
        name: Name of the model.

    Attributes:
        stage: The stage of this rank; None if one rank holds all stages.

    Raises:
        ValueError: The numbers of ranks and stages differ; or links do not lead to the last stage;
            or a stage has several outputs or inputs of unknown shape.

    Example:
        >>> import keras
        >>> from dtk.layers import Pipeline
        >>> front = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu")])
        >>> back = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model = Pipeline([front, back], microbatches=2)
        >>> model.compile("sgd", "mse")
        >>> model.predict(keras.ops.ones((6, 4)), verbose=0).shape
        (6, 1)
    """

    communicates = True

    def __new__(
        cls, stages: object, microbatches: int = 1, schedule: str = "gpipe", **kwargs: object
    ) -> Pipeline:
        """Make an instance of the class with the schedule's train step."""
        del stages, microbatches, kwargs
        wanted = InterleavedPipeline if cls is Pipeline and schedule == "1f1b" else cls
        return super().__new__(wanted)

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: int = 1,
        schedule: str = "gpipe",
        *,
        links: Mapping[int, Sequence[int]] | None = None,
        communicator: Communicator | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name or "pipeline")
        self._group = model_group(communicator)
        self._microbatches, self._schedule = microbatches, schedule
        self._check(stages)
        self._links = {stage: list(sources) for stage, sources in (links or {}).items()}
        self._sources = self._sources_of(len(stages))
        self._dests = [
            [to for to, sources in enumerate(self._sources) if stage in sources]
            for stage in range(len(stages))
        ]
        unused = [stage for stage, dests in enumerate(self._dests[:-1]) if not dests]
        if unused:
            self._refuse(
                f"stages {unused} of {len(self._dests)} lead nowhere; every stage but the last "
                "must be a source of a later one in links="
            )
        self.stage: keras.Model | None = None
        self._all: list[keras.Model] = []
        self._outputs: list[keras.KerasTensor] = []
        self._configs: list[dict[str, object]] = []
        self._is_regularized = self._told_of_loss = False
        self._counts_penalties = True
        for number, stage in enumerate(stages):
            self._take(number, stage if isinstance(stage, keras.Model) else stage())
        self.built = True

    @property
    def stages(self) -> dict[int, keras.Model]:
        """The stages that this rank holds, by number."""
        return dict(enumerate(self._all)) if self.stage is None else {self._group.rank: self.stage}

    @property
    def output_shape(self) -> tuple[int | None, ...]:
        """Shape of the last stage's output."""
        return tuple(self._outputs[-1].shape)

    def get_config(self) -> PipelineConfig:
        """Return the configuration, from which `from_config` makes such a pipeline."""
        return {
            "stages": self._configs,
            "microbatches": self._microbatches,
            "schedule": self._schedule,
            "links": list(self._links.items()),
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: PipelineConfig, communicator: Communicator | None = None
    ) -> Pipeline:
        """Make a pipeline from a configuration."""
        return Pipeline(
            [keras.saving.deserialize_keras_object(one) for one in config["stages"]],
            config["microbatches"],
            config["schedule"],
            links=dict(config["links"]),
            communicator=communicator,
            name=config["name"],
        )

    @property
    def losses(self) -> list[tf.Tensor]:
        """Weight penalties of all stages; the penalties of other ranks are constants here."""
        if not self._counts_penalties:
            return []
        own = super().losses
        if self.stage is None or not self._is_regularized:
            return own
        mine = tf.stop_gradient(tf.add_n([tf.zeros([]), *own]))
        return [*own, self._group.allreduce(mine) - mine]

    def _refuse(self, told: str) -> NoReturn:
        raise ValueError(at_rank(self._group.rank, told))

    def _named(self, stage: keras.Model) -> str:
        return f"stage {self._group.rank} ({stage.name!r})"

    def _check(self, stages: Sequence[Stage]) -> None:
        """Raise a ValueError for a pipeline that these ranks cannot make."""
        size = self._group.size
        if self._schedule not in ("gpipe", "1f1b"):
            self._refuse(f"schedule={self._schedule!r}; expected 'gpipe' or '1f1b'")
        if not is_count(self._microbatches):
            self._refuse(f"microbatches={self._microbatches!r}; expected a number, 1 or more")
        if not stages or size not in (1, len(stages)):
            self._refuse(
                f"a pipeline of {len(stages)} stages on {size} ranks; each stage takes one: make "
                f"the strategy with model_parallel={max(1, len(stages))}, or cut the model into "
                f"{size} stages"
            )

    def _sources_of(self, count: int) -> list[list[int]]:
        """Return the stages that each stage takes its inputs from."""
        for stage, sources in self._links.items():
            if stage not in range(count) or not all(0 <= source < stage for source in sources):
                self._refuse(
                    f"links={{{stage}: {sources}}} of {count} stages; a stage takes the outputs of "
                    "stages before it, counted from 0"
                )
        return [self._links.get(stage, [stage - 1] if stage else []) for stage in range(count)]

    def _take(self, number: int, stage: keras.Model) -> None:
        """Keep this rank's stage; of other stages only the configuration and the output's spec."""
        outputs = getattr(stage, "outputs", None) or []
        if len(outputs) != 1:
            self._refuse(
                f"stage {number} ({stage.name!r}) has {len(outputs)} outputs; a stage is a "
                "Sequential or functional model with an Input and one output"
            )
        sources = self._sources[number]
        taken = [tuple(one.shape[1:]) for one in stage.inputs]
        output_shapes = [tuple(self._outputs[source].shape[1:]) for source in sources]
        fit = map(lambda a, b: tf.TensorShape(a).is_compatible_with(b), taken, output_shapes)
        if sources and (len(taken) != len(output_shapes) or not all(fit)):
            self._refuse(
                f"stage {number} ({stage.name!r}) takes inputs of the shapes {taken} of a row, and "
                f"the stages {sources} that lead to it put out {output_shapes}; "
                "change an Input, or links="
            )
        self._outputs.append(outputs[0])
        self._configs.append(keras.saving.serialize_keras_object(stage))
        self._is_regularized |= any(v.regularizer is not None for v in stage.variables)
        if self._group.size == 1:
            self._all = [*self._all, stage]
        elif number == self._group.rank:
            self.stage = stage
            for variable in stage.variables:
                set_owner(variable, OneRanks(number, self._group))

    def call(self, inputs: Tree, training: bool | None = None) -> tf.Tensor:
        """Compute the outputs of the last stage, on every rank of the group."""
        with counting_rows():
            if self.stage is None:
                return self._alone(inputs, training)
            return self._piped(inputs, self.stage, training)

    def _piped(self, inputs: Tree, stage: keras.Model, training: bool | None) -> tf.Tensor:
        """Compute this rank's stage, between those of other ranks."""
        anchor = self._anchor(stage) if training else None
        link = StageTransfer(self._group, anchor)
        last = self._group.rank == self._group.size - 1
        outputs = []
        for part in range(self._microbatches):
            batch = microbatch(inputs, part, self._microbatches)
            sources = self._sources[self._group.rank]
            received = {
                source: link.receive(rows_of(batch), self._outputs[source], source, part)
                for source in sorted(set(sources))
            }
            taken = link.begin(inputs_of([received[source] for source in sources], batch))
            output = link.end(stage(taken, training=training))
            self._check_losses(stage)
            for dest in self._dests[self._group.rank]:
                link.send(output, dest, part)
            outputs.append(output)
        result = tf.concat(outputs, 0) if last else self._nothing(inputs)
        return link.from_last(result)

    def _check_losses(self, stage: keras.Model) -> None:
        penalties = sum(v.regularizer is not None for v in stage.trainable_variables)
        if self._microbatches > 1 and len(stage.losses) > penalties:
            self._refuse(
                f"{self._named(stage)} adds losses of its own (add_loss, or an activity "
                "regularizer), which would count once for every microbatch; use microbatches=1, or "
                "a loss of the outputs"
            )

    def _nothing(self, inputs: Tree) -> tf.Tensor:
        """Return zeros in place of outputs, on a rank without the last stage."""
        output = self._outputs[-1]
        value = tf.zeros([rows_of(inputs), *output.shape[1:]], output.dtype)
        return tf.ensure_shape(value, [None, *output.shape[1:]])

    def _anchor(self, stage: keras.Model) -> tf.Tensor:
        if not stage.trainable_variables:
            self._refuse(
                f"{self._named(stage)} has no trainable weights: gradients of the other stages "
                "cannot pass it; put its layers into a neighbouring stage"
            )
        return tf.convert_to_tensor(stage.trainable_variables[0])

    def _alone(self, inputs: Tree, training: bool | None) -> tf.Tensor:
        """Compute all stages in this process, with the same microbatches."""
        outputs = []
        for part in range(self._microbatches):
            batch = microbatch(inputs, part, self._microbatches)
            stage_outputs: list[tf.Tensor] = []
            for stage, sources in zip(self._all, self._sources, strict=True):
                taken = inputs_of([stage_outputs[source] for source in sources], batch)
                stage_outputs.append(stage(taken, training=training))
            outputs.append(stage_outputs[-1])
        return tf.concat(outputs, 0)


class InterleavedPipeline(Pipeline):
    """Pipeline with schedule "1f1b": one microbatch forwards and one backwards in turn."""

    def train_step(self, data: Tree) -> dict[str, tf.Tensor]:
        """Train on one batch; replaces Keras's train step."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        if self.stage is None or not self._loss_is_mean():
            return super().train_step(data)
        count = self._microbatches
        parts = [microbatch(x, m, count) for m in range(count)]
        rows, rank = rows_of(x), self._group.rank

        def gradient_of_loss(number: int, output: tf.Tensor) -> tf.Tensor:
            labels, weights = (
                None if v is None else microbatch(v, number, count) for v in (y, weight)
            )
            output = tf.identity(output)  # else Keras's loss looks past a softmax that has made it
            with tf.GradientTape() as tape:
                tape.watch(output)
                loss = self._loss_of_rows(parts[number], labels, output, weights)
                loss = self.optimizer.scale_loss(loss)
            # Weight the mean over a microbatch by the microbatch's share of the rows.
            share = tf.shape(output)[0] / rows
            return tape.gradient(loss, output) * tf.cast(share, output.dtype)

        self._anchor(self.stage)
        step = InterleavedStep(
            self.stage, self._group, self._sources[rank], self._dests[rank], self._outputs
        )
        with counting_rows():
            step.run(parts, gradient_of_loss)
        self._check_losses(self.stage)
        result = self._nothing(x)
        if rank == self._group.size - 1:
            result = tf.concat([step.outputs[m] for m in range(count)], 0)
        predicted = StageTransfer(self._group, None).from_last(result)
        loss = self.compute_loss(x, y, predicted, weight, training=True)
        self._loss_tracker.update_state(loss, sample_weight=rows)
        self.optimizer.apply(self._with_penalties(step.gradients), self.trainable_variables)
        return self.compute_metrics(x, y, predicted, sample_weight=weight)

    def _loss_of_rows(
        self, x: Tree, y: Tree, output: tf.Tensor, weight: tf.Tensor | None
    ) -> tf.Tensor:
        """Compute the loss of a microbatch without penalties: these would need communication."""
        with temporarily(self, _counts_penalties=False):
            return self.compute_loss(x, y, output, weight, training=True)

    def _with_penalties(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Add the gradients of the penalties on this stage's weights."""
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            penalties = [v.regularizer(v.value) for v in variables if v.regularizer is not None]
            penalty = self.optimizer.scale_loss(tf.add_n([tf.zeros([]), *penalties]))
        of_penalty = tape.gradient(penalty, [v.value for v in variables])
        return [added(one, other) for one, other in zip(gradients, of_penalty, strict=True)]

    def _loss_is_mean(self) -> bool:
        """Return whether a batch's loss is the mean of its microbatches', weighed by their rows.

        That is known of Keras's own losses, where nothing masks rows.
        """
        is_masked = keras_steps.mask_of(self._outputs[-1]) is not None
        is_own = keras_models.computes_own_loss(self) and not keras_models.foreign_losses(self)
        if is_own and not is_masked and keras_models.losses_are_means(self):
            return True
        if not self._told_of_loss and self._group.rank == 0:
            print(
                f"dtk: {self.name!r} trains by schedule='gpipe', with activations of all "
                f"{self._microbatches} microbatches in memory: schedule='1f1b' is for Keras's "
                "own losses that are means over rows, without masks",
                file=sys.stderr,
                flush=True,
            )
        self._told_of_loss = True
        return False
