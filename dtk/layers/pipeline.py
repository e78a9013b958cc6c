"""A model cut into stages, one per rank: layer-wise model parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, TypedDict

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.shard import OneRanks
from dtk.compat.keras_variables import set_owner
from dtk.errors import at_rank
from dtk.layers.regions import model_group
from dtk.layers.stages import (
    Gradient,
    InterleavedStep,
    Stage,
    StageTransfer,
    added,
    check,
    check_fits,
    microbatch,
    rows_of,
    sources_of,
)
from dtk.nests import Tree


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
            M microbatches, for losses that are means over rows.
        links: The source stages of a stage, by its number. A stage with several sources takes a
            list of their outputs. A stage that is left out takes the output of the stage before it;
            stage 0 takes the model's inputs.
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
        cls,
        stages: Sequence[Stage],
        microbatches: int = 1,
        schedule: str = "gpipe",
        **kwargs: object,
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
        group = model_group(communicator)
        check(stages, microbatches, schedule, group)
        self._group = group
        self._microbatches, self._schedule = microbatches, schedule
        self._links = {stage: list(sources) for stage, sources in (links or {}).items()}
        self._sources = sources_of(len(stages), links or {}, group.rank)
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
        self._is_regularized = False
        self._counts_penalties = True
        for number, given in enumerate(stages):
            self._take(number, given if isinstance(given, keras.Model) else given())
        self.built = True

    @property
    def stages(self) -> dict[int, keras.Model]:
        """The stages that this rank holds, by number."""
        return dict(enumerate(self._all)) if self.stage is None else {self._group.rank: self.stage}

    @property
    def output_shape(self) -> tuple[int | None, ...]:
        """Shape of the last stage's output."""
        return tuple(self._outputs[-1].shape)

    def on_one_rank(self) -> Pipeline:
        """Build the pipeline again, with all stages in this process and new weights."""
        return type(self).from_config(self.get_config(), LocalCommunicator())

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

    def _take(self, number: int, stage: keras.Model) -> None:
        """Keep this rank's stage; of other stages only the configuration and the output's spec."""
        outputs = getattr(stage, "outputs", None) or []
        if len(outputs) != 1:
            self._refuse(
                f"stage {number} ({stage.name!r}) has {len(outputs)} outputs; a stage is a "
                "Sequential or functional model with an Input and one output"
            )
        check_fits(number, stage, self._sources[number], self._outputs, self._group.rank)
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
        if self.stage is None:
            return self._alone(inputs, training)
        anchor = self._anchor(self.stage) if training else None
        link = StageTransfer(self._group, anchor)
        last = self._group.rank == self._group.size - 1
        outputs = []
        for part in range(self._microbatches):
            given = microbatch(inputs, part, self._microbatches)
            received = [
                link.receive(rows_of(given), self._outputs[source], source, part)
                for source in self._sources[self._group.rank]
            ]
            taken = link.begin(received if len(received) > 1 else (received or [given])[0])
            output = link.end(self.stage(taken, training=training))
            self._check_losses(self.stage)
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
            given = microbatch(inputs, part, self._microbatches)
            found: list[tf.Tensor] = []
            for stage, sources in zip(self._all, self._sources, strict=True):
                outputs_of = [found[source] for source in sources]
                taken = outputs_of if len(outputs_of) > 1 else (outputs_of or [given])[0]
                found.append(stage(taken, training=training))
            outputs.append(found[-1])
        return tf.concat(outputs, 0)


class InterleavedPipeline(Pipeline):
    """Pipeline with schedule "1f1b": one microbatch forwards and one backwards in turn."""

    def train_step(self, data: Tree) -> dict[str, tf.Tensor]:
        """Train on one batch; replaces Keras's train step."""
        if self.stage is None:
            return super().train_step(data)
        self._check_reduction()
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        count = self._microbatches
        parts = [microbatch(x, m, count) for m in range(count)]
        rows, rank = rows_of(x), self._group.rank

        def gradient_of_loss(number: int, output: tf.Tensor) -> tf.Tensor:
            given = [None if v is None else microbatch(v, number, count) for v in (y, weight)]
            with tf.GradientTape() as tape:
                tape.watch(output)
                loss = self._loss_of_rows(parts[number], given[0], output, given[1])
                loss = self.optimizer.scale_loss(loss)
            # Weight the mean over a microbatch by the microbatch's share of the rows.
            share = tf.shape(output)[0] / rows
            return tape.gradient(loss, output) * tf.cast(share, output.dtype)

        self._anchor(self.stage)
        step = InterleavedStep(
            self.stage, self._group, self._sources[rank], self._dests[rank], self._outputs
        )
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
        self._counts_penalties = False
        try:
            return self.compute_loss(x, y, output, weight, training=True)
        finally:
            self._counts_penalties = True

    def _with_penalties(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Add the gradients of the penalties on this stage's weights."""
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            penalty = tf.add_n(
                [tf.zeros([])]
                + [v.regularizer(v.value) for v in variables if v.regularizer is not None]
            )
            penalty = self.optimizer.scale_loss(penalty)
        found = tape.gradient(penalty, [v.value for v in variables])
        return [added(one, other) for one, other in zip(gradients, found, strict=True)]

    def _check_reduction(self) -> None:
        for loss in keras.tree.flatten(self.loss):
            reduction = getattr(loss, "reduction", "sum_over_batch_size")
            if reduction != "sum_over_batch_size":
                self._refuse(
                    f"schedule='1f1b' with the loss {loss.name!r} of reduction {reduction!r}: the "
                    "loss of a batch must be a mean over its rows, so that it can be computed a "
                    "microbatch at a time; use schedule='gpipe', or "
                    "reduction='sum_over_batch_size'"
                )
