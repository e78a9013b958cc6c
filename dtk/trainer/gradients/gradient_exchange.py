"""Send an optimizer's gradients through the strategy's exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtk.communicators.base import with_values
from dtk.compat import keras_optimizers, keras_variables, tf_replicas
from dtk.compat.keras_variables import is_of_all
from dtk.errors import at_rank
from dtk.exchange import Auto, Dense
from dtk.exchange.base import BatchPart, Exchange, ExchangeOp, Gradient, Trained, Update
from dtk.exchange.factors import Factored, factored
from dtk.exchange.state import ExchangeState
from dtk.nests import Gradients
from dtk.trainer.gradients import lookup_slices
from dtk.trainer.gradients.non_finite import NonFinite, NonFiniteNotes
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step


class GradientExchange:
    """One optimizer's exchange: an `ExchangeOp` for each list of variables it applies."""

    def __init__(self, outer: keras.Optimizer, inner: keras.Optimizer, strategy: Strategy):
        self._outer = outer
        self._inner = inner
        self._strategy = strategy
        alone = strategy.communicator.size == 1
        self._exchange = (None if alone else strategy.exchange) or Dense()
        self._ops: dict[tuple[int, ...], ExchangeOp] = {}
        self._notes: NonFiniteNotes | None = None
        self.chooses = isinstance(self._exchange, Auto)
        self.seen: list[tf.TensorSpec] = []
        self.factored: list[tf.TensorSpec] = []
        self.state = ExchangeState(strategy.communicator, strategy.extended.worker_devices[0])

    @property
    def exchange(self) -> Exchange:
        """The exchange in use."""
        return self._exchange

    @property
    def window(self) -> int:
        """Number of steps per exchange of gradients."""
        return self._inner.gradient_accumulation_steps or 1

    def use(self, exchange: Exchange) -> None:
        """Use another exchange from the next step on; the caller must trace that step anew."""
        self._exchange = exchange
        self._ops.clear()

    @property
    def local(self) -> bool:
        """Whether replicas also take local steps."""
        return self._exchange.local

    @property
    def is_traced(self) -> bool:
        """Whether a step has been traced."""
        return bool(self._ops)

    def of(self, variables: Sequence[keras.Variable]) -> ExchangeOp:
        """Return the `ExchangeOp` for the gradients of some variables."""
        key = tuple(id(v) for v in variables)
        if key not in self._ops:
            self._ops[key] = self._make(variables)
        return self._ops[key]

    def _make(self, trained: Sequence[keras.Variable]) -> ExchangeOp:
        strategy = self._strategy
        if strategy.communicator.size == 1:
            return ReplicaSum(strategy, self.state)
        if self.local and not self._ops:
            for i, slot in enumerate(slots_of(self._outer)):
                self.state.keep(f"slot_{i}", "mean", keras_variables.stored(slot))
        # Each list of variables has its own state; unfreezing layers gives another list.
        places = {id(v): i for i, v in enumerate(keras_optimizers.trained_variables(self._inner))}
        key = str([places.get(id(v)) for v in trained])
        state = self.state.part(f"{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}/")
        return self._exchange.init(
            strategy.communicator,
            state,
            Trained(
                [keras_variables.stored(v) for v in trained],
                [keras_variables.stored(v) for v in momenta_of(self._inner)],
            ),
        )

    def update(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> Update:
        """Exchange this replica's gradients; return those for the optimizer to apply."""
        groups = _wholes_and_parts(variables)
        if len(groups) == 1:
            return self._update(gradients, variables)
        updated: Gradients = [None] * len(gradients)
        flags = []
        for group in groups:
            found = self._update([gradients[i] for i in group], [variables[i] for i in group])
            flags += [] if found.applied is None else [found.applied]
            for i, gradient in zip(group, found.gradients, strict=True):
                updated[i] = gradient
        return Update(updated, self._all_applied(flags))

    def _all_applied(self, flags: list[tf.Tensor]) -> tf.Tensor | None:
        """Return whether a step is applied: only if every group of variables applies it."""
        if not flags:
            return None
        return self._strategy.model_communicator.allreduce(tf.reduce_all(tf.stack(flags)), "min")

    def _update(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> Update:
        present, found = _with_static_shapes(gradients, variables)
        op, scale = self.of(variables), self._scale()
        if op.factors:
            found = [factored(gradient) for gradient in found]
        self._see(found)
        # A replica that computed only a padding row counts as zero.
        found = tf_replicas.if_present(found)
        self._note(found, [variables[i].path for i in present])
        if scale is not None:  # divided, since 1 / scale may be too small a number
            found = [_scaled(tf.divide, gradient, scale) for gradient in found]
        divided, join = self._division([variables[i].path for i in present]).of(found)
        update = op.update(divided, batch_part())
        found = join(update.gradients)
        if scale is not None:
            found = [_scaled(tf.multiply, gradient, scale) for gradient in found]
        return update._replace(gradients=_placed(present, found, len(gradients)))

    def reduce_window(self, gradients: Gradients, variables: Sequence[keras.Variable]) -> Gradients:
        """Sum the gradients of an accumulation window over the replicas."""
        summed: Gradients = [None] * len(gradients)
        for group in _wholes_and_parts(variables):
            of_group = [variables[i] for i in group]
            found = self._reduce_window([gradients[i] for i in group], of_group)
            for i, gradient in zip(group, found, strict=True):
                summed[i] = gradient
        return summed

    def _reduce_window(
        self, gradients: Gradients, variables: Sequence[keras.Variable]
    ) -> Gradients:
        present, found = _with_static_shapes(gradients, variables)
        self._see(found)
        self._note(found, [variables[i].path for i in present])
        divided, join = self._division([variables[i].path for i in present]).of(found)
        summed = join(self.of(variables).reduce(divided, batch_part()))
        return _placed(present, summed, len(gradients))

    def _division(self, paths: Sequence[str]) -> lookup_slices.Division:
        linear = keras_optimizers.is_linear(self._outer)
        return lookup_slices.Division(
            paths, self._strategy.rank, needed=not self.local, linear=linear
        )

    def watch(self, wanted: bool) -> None:
        """Start or stop noting gradients that are not finite, from the step's next trace."""
        scaled = self._outer is not self._inner
        self._notes = NonFiniteNotes(self._strategy.world.rank, scaled) if wanted else None

    def non_finite(self, loss_is_finite: bool) -> list[NonFinite]:
        """Return the gradients of this rank that were not finite since `watch` was called."""
        if self._notes is None:
            return []
        return self._notes.found(int(self._inner.iterations.numpy()), loss_is_finite)

    def _note(self, gradients: list[Gradient], paths: Sequence[str]) -> None:
        if self._notes is not None and gradients:
            replica = self._strategy.local_index()
            self._notes.note(self._inner.iterations, replica, paths, gradients)

    def _see(self, gradients: list[Gradient]) -> None:
        self.seen, self.factored = [], []
        for g in gradients:
            if not isinstance(g, tf.IndexedSlices) and g.shape.is_fully_defined():
                alike = self.factored if isinstance(g, Factored) else self.seen
                alike.append(tf.TensorSpec(g.shape, g.dtype))

    def count(self, variables: Sequence[keras.Variable]) -> None:
        """Count a step once its gradients are applied or accumulated."""
        for group in _wholes_and_parts(variables):
            self.of([variables[i] for i in group]).count(batch_part())

    def _scale(self) -> tf.Tensor | None:
        """Return the loss scale, which divides gradients before they are exchanged.

        The scale changes, so gradients that the exchange remembers must not depend on it.
        """
        scale = getattr(self._outer, "dynamic_scale", None)
        if scale is None or not self._exchange.remembers:
            return None
        return tf.convert_to_tensor(scale)

    def close(self) -> None:
        """Make all ranks hold the same weights."""
        for op in self._ops.values():
            op.close()

    def together(self) -> list[tf.Tensor]:
        """Return for each `ExchangeOp` with local steps whether all ranks hold the same weights."""
        flags = [op.together() for op in self._ops.values()]
        return [flag for flag in flags if flag is not None]

    def averaging_weight(self) -> tf.Tensor | None:
        """Return this rank's weight in a mean over all; see `ExchangeOp.averaging_weight`."""
        weights = [op.averaging_weight() for op in self._ops.values()]
        return next((weight for weight in weights if weight is not None), None)


def _with_static_shapes(
    gradients: Gradients, variables: Sequence[keras.Variable]
) -> tuple[list[int], list[Gradient]]:
    """Return the indices of the gradients that are not None, and these with static shapes.

    A gradient without a static shape is sent by itself, outside any bucket. A Dense layer on
    sequences gives such gradients where the batch size is not fixed.
    """
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    shaped = [
        gradients[i]
        if isinstance(gradients[i], tf.IndexedSlices)
        else tf.ensure_shape(gradients[i], variables[i].shape)
        for i in present
    ]
    return present, shaped


def _placed(present: list[int], found: list[Gradient], count: int) -> Gradients:
    by_place = dict(zip(present, found, strict=True))
    return [by_place.get(i) for i in range(count)]


def _scaled(
    operation: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], gradient: Gradient, scale: tf.Tensor
) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, _scaled(operation, gradient.values, scale))
    return operation(gradient, tf.cast(scale, gradient.dtype))


def _wholes_and_parts(variables: Sequence[keras.Variable]) -> list[list[int]]:
    """Divide variables into whole ones and parts, each with its own buckets.

    Ranks that hold different parts must sum whole variables in the same order, or their copies
    would drift apart; parts may differ in size.
    """
    parts = [not is_of_all(v) for v in variables]
    groups = [[i for i, part in enumerate(parts) if part == wanted] for wanted in (False, True)]
    return [group for group in groups if group] or [[]]


class ReplicaSum(ExchangeOp):
    """Sum over the replicas of one process."""

    def __init__(self, strategy: Strategy, state: ExchangeState):
        super().__init__(strategy.communicator, state)
        self._strategy = strategy

    def reduce(self, gradients: list[Gradient], part: BatchPart | None = None) -> list[Gradient]:
        """See `ExchangeOp.reduce`."""
        # Last layers first: their gradients are ready first and are sent during the backward pass.
        return self._strategy.extended.reduce_over_replicas(gradients[::-1])[::-1]


def check_exchange(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Check that an optimizer and the strategy's exchange can work together."""
    exchange = strategy.exchange or Dense()
    if not exchange.local or strategy.communicator.size == 1:
        return
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"gradient_accumulation_steps with exchange={exchange}: a block is a window of "
                "steps that send nothing already; leave one of the two out",
            )
        )
    if optimizer.use_ema:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"use_ema=True averages the weights of every step, and with exchange={exchange} "
                "each worker has weights of its own between blocks; leave one of the two out",
            )
        )


def slots_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's floating-point state without its learning rate."""
    return [
        v
        for v in optimizer.variables
        if keras.backend.is_float_dtype(v.dtype) and not v.path.endswith("learning_rate")
    ]


def momenta_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's momentum variables."""
    return [v for v in optimizer.variables if v.path.endswith("_momentum")]


def batch_part() -> BatchPart | None:
    """Return this replica's part of the batch of the step being traced."""
    step = traced_step.current()
    return None if step is None else BatchPart(step.rows, step.share)
