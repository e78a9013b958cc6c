"""Send an optimizer's gradients through the strategy's exchange."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from dtk import placement
from dtk.compat import keras_optimizers, keras_variables, tf_replicas
from dtk.compat.keras_variables import is_of_all
from dtk.errors import at_rank
from dtk.exchange import Auto, Dense
from dtk.exchange.contract import (
    BatchPart,
    Exchange,
    ExchangeOp,
    ExchangeState,
    Gradient,
    Trained,
    Update,
)
from dtk.exchange.factors import Factored, factored
from dtk.exchange.local_steps import LocalOp
from dtk.nests import Array, Gradients
from dtk.trainer.gradients.sharded_optimizer import ScatterOp, ShardedOptimizer
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import lookups, own_loops


class GradientExchange:
    """One optimizer's exchange: an `ExchangeOp` for each list of variables it applies."""

    def __init__(
        self,
        outer: keras.Optimizer,
        strategy: Strategy,
        sharded: ShardedOptimizer | None = None,
    ):
        self.outer, self.inner = outer, keras_optimizers.chain(outer)[-1]
        self.strategy, self.sharded = strategy, sharded
        alone = strategy.communicator.size == 1
        self.exchange: Exchange = (None if alone else strategy.exchange) or Dense()
        # The moving statistics that steps of a script's own loop assign.
        self.statistics: dict[int, keras.Variable] = {}
        # Whether each replica holds its own part of an accumulation window, and not the whole.
        self.divided = False
        self._ops: dict[tuple[int, ...], ExchangeOp] = {}
        self._of_step: list[ExchangeOp] = []  # those of the last traced update
        self._notes: NonFiniteNotes | None = None
        self.chooses = isinstance(self.exchange, Auto)
        # Specs of the gradients that are summed whole, and of those that may go as factors.
        self.whole_specs: list[tf.TensorSpec] = []
        self.factored_specs: list[tf.TensorSpec] = []
        self.state = ExchangeState(strategy.communicator, placement.keeping(strategy))

    @property
    def window(self) -> int:
        """Number of steps per exchange of gradients."""
        return self.inner.gradient_accumulation_steps if self.exchanges_windows else 1

    @property
    def exchanges_windows(self) -> bool:
        """Whether windows of accumulated gradients are exchanged, not each step's gradients.

        The windows of a sharded optimizer are divided over ranks, so each step is exchanged.
        """
        return self._accumulates and self.sharded is None and not self.sums_each_step

    @property
    def sums_each_step(self) -> bool:
        """Whether a method of the script's takes each step's gradients: those of all ranks."""
        return any(
            keras_optimizers.own_methods(member, outermost=member is self.outer, of_steps=True)
            for member in keras_optimizers.members(self.outer)
        )

    @property
    def _accumulates(self) -> bool:
        return (self.inner.gradient_accumulation_steps or 1) > 1

    @property
    def in_window(self) -> bool:
        """Whether an accumulation window is open, by the number of steps: alike on all ranks."""
        return not bool(keras_optimizers.is_between_windows(self.inner))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the optimizer was built for."""
        if self.sharded is not None:
            return self.sharded.variables
        return keras_optimizers.trained_variables(self.inner)

    @property
    def local(self) -> bool:
        """Whether replicas also take local steps."""
        return self.exchange.local

    @property
    def is_traced(self) -> bool:
        """Whether a step has been traced."""
        return bool(self._ops)

    @property
    def blocks(self) -> list[LocalOp]:
        """The blocks of local steps that traced steps open and close."""
        return [op.block for op in self._ops.values() if isinstance(op.block, LocalOp)]

    def use(self, exchange: Exchange) -> None:
        """Use another exchange from the next step on; the caller must trace that step anew."""
        self.exchange = exchange
        self._ops.clear()

    def update(
        self, gradients: Gradients, variables: Sequence[keras.Variable], part: BatchPart | None
    ) -> Update:
        """Exchange this replica's gradients; return those for the optimizer to apply.

        Of a sharded optimizer, those of this rank's parts of the variables. A window of accumulated
        gradients is exchanged as one; a sharded optimizer accumulates exchanged ones.
        """
        updated: Gradients = [None] * len(gradients)
        flags = []
        self._of_step = []
        for group in self._groups(variables):
            of_group = [variables[i] for i in group]
            exchanged, applied = self._update_group([gradients[i] for i in group], of_group, part)
            for i, gradient in zip(group, exchanged, strict=True):
                updated[i] = gradient
            flags += [] if applied is None else [applied]
        if not flags:
            return updated, None
        # A step is applied only if every group of variables applies it.
        everywhere = self.strategy.model_communicator
        return updated, everywhere.allreduce(tf.reduce_all(tf.stack(flags)), "min")

    def _update_group(
        self, gradients: Gradients, variables: Sequence[keras.Variable], part: BatchPart | None
    ) -> Update:
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        paths = [keras_variables.path_of(variables[i]) for i in places]
        # What an exchange remembers belongs to the gradients that were there; blocks of local steps
        # average all weights.
        trained = list(variables) if self.local else [variables[i] for i in places]
        op = self._op(trained)
        self._of_step.append(op)
        grads = [_with_static_shape(gradients[i], variables[i]) for i in places]
        if op.factors:
            grads = [factored(gradient) for gradient in grads]
        self._see(grads)
        # A replica that computed only a padding row counts as zero.
        grads = tf_replicas.if_present(grads)
        if self._notes is not None and grads:
            replica = self.strategy.local_index()
            self._notes.note(self.inner.iterations, replica, paths, grads)
        exchanged, applied = self._exchanged(op, grads, paths, trained, part)
        if applied is not None and self._accumulates:
            raise ValueError(
                f"exchange={self.exchange} does not go with gradient accumulation, whose windows "
                "sum several steps already; use one of the two"
            )
        by_place = dict(zip(places, exchanged, strict=True))
        return [by_place.get(i) for i in range(len(gradients))], applied

    def _exchanged(
        self,
        op: ExchangeOp,
        grads: Gradients,
        paths: Sequence[str],
        trained: Sequence[keras.Variable],
        part: BatchPart | None,
    ) -> Update:
        """Exchange gradients without the scale of the loss, sparse ones by origin."""
        scale = self._scale()
        if scale is not None:  # divided, since 1 / scale may be too small a number
            grads = [_scaled(tf.divide, gradient, scale) for gradient in grads]
        join, sums = None, not self.local and self.strategy.num_replicas_in_sync > 1
        if sums and any(isinstance(g, tf.IndexedSlices) for g in grads):
            linear = keras_optimizers.is_linear(self.outer)
            grads, join = lookups.divided(grads, paths, self.strategy.rank, linear)
        update = functools.partial(op.update, part=part)
        grads, applied = own_loops.comparing_losses(update, grads, self.strategy, beside=op.exact)
        grads = grads if join is None else join(grads)
        if self.sharded is not None:
            grads = self.sharded.parts_of_slices(grads, trained)
        if scale is not None:
            grads = [_scaled(tf.multiply, gradient, scale) for gradient in grads]
        return grads, applied

    def count(self, part: BatchPart | None) -> None:
        """Count a step once its gradients are applied or accumulated."""
        for op in self._of_step:
            op.count(part)

    def _groups(self, variables: Sequence[keras.Variable]) -> list[list[int]]:
        """Divide variables into whole ones and parts, each with its own buckets.

        Ranks that hold different parts must sum whole variables in the same order, or their copies
        would drift apart; parts may differ in size.
        """
        everything = list(range(len(variables)))
        if self.strategy.model_communicator.size == 1:
            return [everything]
        wholes = [i for i in everything if is_of_all(variables[i])]
        parts = [i for i in everything if not is_of_all(variables[i])]
        return [group for group in (wholes, parts) if group] or [[]]

    def _op(self, variables: Sequence[keras.Variable]) -> ExchangeOp:
        key = tuple(id(v) for v in variables)
        if key not in self._ops:
            self._ops[key] = self._make(variables)
        return self._ops[key]

    def _make(self, trained: Sequence[keras.Variable]) -> ExchangeOp:
        strategy = self.strategy
        if strategy.communicator.size == 1:
            return ReplicaSum(strategy, self.state)
        if self.local and not self._ops:
            for i, slot in enumerate(_slots_of(self.outer)):
                self.state.keep(f"slot_{i}", "mean", keras_variables.stored(slot))
        if self.sharded is not None:
            assert isinstance(self.exchange, Dense)
            return ScatterOp(self.sharded, trained, self.state, self.exchange)
        # Each list of variables has its own state; unfreezing layers gives another list.
        places = {id(v): i for i, v in enumerate(keras_optimizers.trained_variables(self.inner))}
        key = str([places.get(id(v)) for v in trained])
        state = self.state.part(f"{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}/")
        momenta = [v for v in self.inner.variables if v.path.endswith("_momentum")]
        return self.exchange.init(
            strategy.communicator,
            state,
            Trained(*([keras_variables.stored(v) for v in some] for some in (trained, momenta))),
        )

    def _see(self, gradients: list[Gradient]) -> None:
        self.whole_specs, self.factored_specs = [], []
        for g in gradients:
            if not isinstance(g, tf.IndexedSlices) and g.shape.is_fully_defined():
                alike = self.factored_specs if isinstance(g, Factored) else self.whole_specs
                alike.append(tf.TensorSpec(g.shape, g.dtype))

    def _scale(self) -> tf.Tensor | None:
        """Return the loss scale, which divides gradients before they are exchanged.

        The scale changes, so gradients that the exchange remembers must not depend on it. The sum
        of a window is divided by it already.
        """
        scale = getattr(self.outer, "dynamic_scale", None)
        if scale is None or not self.exchange.remembers or self.exchanges_windows:
            return None
        return tf.convert_to_tensor(scale)

    def watch(self, wanted: bool) -> None:
        """Start or stop noting gradients that are not finite, from the step's next trace."""
        scaled = self.outer is not self.inner
        self._notes = NonFiniteNotes(self.strategy.world.rank, scaled) if wanted else None

    def non_finite(self, loss_is_finite: bool) -> list[NonFinite]:
        """Return the gradients of this rank that were not finite since `watch` was called."""
        if self._notes is None:
            return []
        return self._notes.found(int(self.inner.iterations.numpy()), loss_is_finite)


def _with_static_shape(
    gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable
) -> tf.Tensor | tf.IndexedSlices:
    """Return a gradient with a static shape; without one it is sent by itself, outside any bucket.

    A Dense layer on sequences gives such gradients where the batch size is not fixed.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.ensure_shape(gradient, variable.shape)


def _scaled(
    operation: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], gradient: Gradient, scale: tf.Tensor
) -> Gradient:
    return tf_replicas.on_values(gradient, lambda v: operation(v, tf.cast(scale, v.dtype)))


class ReplicaSum(ExchangeOp):
    """Sum over the replicas of one process."""

    exact = True

    def __init__(self, strategy: Strategy, state: ExchangeState):
        super().__init__(strategy.communicator, state)
        self._strategy = strategy

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`."""
        # Last layers first: their gradients are ready first and are sent during the backward pass.
        return self._strategy.extended.reduce_over_replicas(gradients[::-1])[::-1], None


def check_exchange(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Check that an optimizer and the strategy's exchange can work together."""
    exchange = strategy.exchange
    if strategy.communicator.size == 1 or exchange is None or not exchange.local:
        return
    why = ""
    if optimizer.gradient_accumulation_steps:
        why = (
            f"gradient_accumulation_steps with exchange={exchange}: a block is a window of steps "
            "that send nothing already"
        )
    elif optimizer.use_ema:
        why = (
            f"use_ema=True averages the weights of every step, and with exchange={exchange} each "
            "worker has weights of its own between blocks"
        )
    if why:
        raise ValueError(at_rank(strategy.rank, f"{why}; leave one of the two out"))


def _slots_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's floating-point state without its learning rate."""
    return [
        v
        for v in optimizer.variables
        if keras.backend.is_float_dtype(v.dtype) and not v.path.endswith("learning_rate")
    ]


# Gradients that are not finite are noted before ranks sum them: afterwards all ranks hold the same
# NaN.


class NonFinite(NamedTuple):
    """Gradients of one rank's replica that were not finite."""

    step: int  # number of the optimizer's steps before it, accumulated steps included
    rank: int
    replica: int  # number of the replica on its rank, from 0
    variables: tuple[str, ...]  # paths of the variables


class NonFiniteNotes:
    """Notes about one optimizer's gradients on this rank."""

    def __init__(self, rank: int, scaled: bool) -> None:
        self._rank = rank
        self._scaled = scaled
        self._taken: list[NonFinite] = []
        self._lock = threading.Lock()

    def note(
        self, steps: tf.Tensor, replica: int, paths: Sequence[str], gradients: list[Gradient]
    ) -> None:
        """Add ops to the step that note which of its gradients are not finite."""
        finite = tf.stack([_is_finite(g) for g in gradients])

        def take(step: Array, finite: Array) -> bool:
            self.take(int(step), replica, paths, finite.tolist())
            return True

        def note() -> tf.Tensor:
            return tf.numpy_function(take, [tf.cast(steps, tf.int64), finite], tf.bool)

        tf.cond(tf.reduce_all(finite), lambda: tf.constant(True), note)

    def take(self, step: int, replica: int, paths: Sequence[str], finite: Sequence[bool]) -> None:
        """Note a step's gradients: the first such step is kept; under a loss scale, the last."""
        bad = tuple(path for path, good in zip(paths, finite, strict=True) if not good)
        with self._lock:
            if self._taken and self._taken[0].step != step:
                if not self._scaled:
                    return
                self._taken.clear()
            self._taken.append(NonFinite(step, self._rank, replica, bad))

    def found(self, steps: int, loss_is_finite: bool) -> list[NonFinite]:
        """Return the notes; under a loss scale, only if the loss is not finite either."""
        with self._lock:
            if self._scaled:
                # `steps` does not count a step that was skipped because gradients overflowed.
                return [n for n in self._taken if n.step == steps and not loss_is_finite]
            return list(self._taken)


def _is_finite(gradient: Gradient) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    if isinstance(gradient, Factored):
        return _is_finite(gradient.left) & _is_finite(gradient.right)
    return tf.reduce_all(tf.math.is_finite(gradient))
