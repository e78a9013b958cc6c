"""Optimizers that a strategy has taken over: which a model has, and how they treat parts.

    parameter_server.served_optimizer   notes a step's gradients, and servers apply them
    replica.reducing_optimizer          exchanges a step's gradients, then applies them

A large variable is cut by rows over several servers, a rank of a model-parallel group holds one
part of it, or each rank updates one part of it (`sharded_optimizer`). An optimizer sees each part
as a separate variable. The result is the same if an element's step (on servers: a row's) depends
on that element only. The exceptions:

    clipping to a norm          the squares of the parts are summed here; in float64, as ranks may
                                hold parts of different dtypes
    finite gradients            a loss scale falls when any part is not finite
    one ratio, mean or matrix   Lamb, LARS, Adafactor, Muon: refused
    constraints over rows       UnitNorm(axis=0) and the like: refused on servers
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, cast

import keras
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat import keras_optimizers, keras_variables
from dtk.compat.keras_variables import copy_mark, flat_shard_of, is_of_all, path_of, shard_of
from dtk.compat.made_classes import make_subclass
from dtk.compat.tf_replicas import on_values
from dtk.errors import at_rank
from dtk.exchange.local_steps import LocalOp
from dtk.kernels import optimizer_updates
from dtk.nests import Gradients
from dtk.placement import outside_graph
from dtk.trainer.gradients.gradient_exchange import GradientExchange, check_exchange
from dtk.trainer.gradients.sharded_optimizer import ShardedOptimizer, needs_whole
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step

Variables: TypeAlias = Sequence[keras.Variable]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the model's optimizer and any other it holds, also in a list or dict (a GAN has two).

    An optimizer inside another one is left out: an attribute may be a second name of it.
    """
    held = [value for attribute in vars(model).values() for value in _each(attribute)]
    optimizers = [value for value in held if isinstance(value, keras.optimizers.Optimizer)]
    unique = {id(optimizer): optimizer for optimizer in optimizers}
    for optimizer in optimizers:
        for member in keras_optimizers.members(optimizer)[1:]:
            unique.pop(id(member), None)
    return list(unique.values())


def _each(value: object) -> Collection[object]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


def gradient_exchanges_of(model: keras.Model) -> list[GradientExchange]:
    """Return the gradient exchanges of a model's optimizers."""
    exchanges = [exchange_of(optimizer) for optimizer in optimizers_of(model)]
    return [exchange for exchange in exchanges if exchange is not None]


def exchange_of(optimizer: keras.Optimizer) -> GradientExchange | None:
    """Return the exchange of an optimizer's gradients, if a strategy of replicas has made one."""
    return getattr(optimizer, "_dtk_exchange", None)


def set_exchange(optimizer: keras.Optimizer, exchange: GradientExchange) -> None:
    """Give an optimizer the exchange of its gradients, which Keras is neither to track nor save."""
    vars(optimizer)["_dtk_exchange"] = exchange


def sharded_of(model: keras.Model) -> list[ShardedOptimizer]:
    """Return what divides a model's optimizers over ranks."""
    sharded = [exchange.sharded for exchange in gradient_exchanges_of(model)]
    return [one for one in sharded if one is not None]


def blocks_of(model: keras.Model) -> list[LocalOp]:
    """Return the blocks of local steps of a model's optimizers; none if weights stay equal."""
    return [block for exchange in gradient_exchanges_of(model) for block in exchange.blocks]


def windows_of(model: keras.Model) -> list[tuple[GradientExchange, list[keras.Variable]]]:
    """Return the exchanges of accumulating optimizers, and the variables they accumulate in."""
    windows = []
    for exchange in gradient_exchanges_of(model):
        # A sharded optimizer accumulates sums over all ranks.
        variables = [v for v in accumulators_of(exchange.outer) if flat_shard_of(v) is None]
        if variables:
            windows.append((exchange, variables))
    return windows


def accumulators_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of an unfinished accumulation window."""
    exchange = exchange_of(optimizer)
    if exchange is not None and exchange.sums_each_step:
        return []  # they hold the whole
    inner = keras_optimizers.chain(optimizer)[-1]
    accumulated = zip(
        keras_optimizers.accumulated(inner), keras_optimizers.trained_variables(inner), strict=False
    )
    return [a for a, v in accumulated if a is not None and not keras_optimizers.is_replaced(v)]


def schedule_of(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return the schedule of an optimizer's learning rate, if it has one."""
    return keras_optimizers.given_rate(keras_optimizers.chain(optimizer)[-1])


def weighed_in_scale(loss: tf.Tensor) -> tf.Tensor:
    """Weigh the loss by the replica's share, in Keras's own step, when Keras scales the loss.

    Losses without a reduction stay as they are: Keras differentiates their sum over rows.
    """
    step = traced_step.current()
    is_mean = tf.convert_to_tensor(loss).shape.rank == 0
    return step.weighed(loss) if step is not None and step.weighs_loss and is_mean else loss


# Taking over.


class SharedOptimizer(keras_optimizers.TakenOver):
    """An optimizer that treats parts of variables as it would treat whole ones."""

    def _dtk_clip(self, gradients: Gradients, variables: Variables) -> Gradients:
        """Clip parts of variables as whole ones would be clipped; else as Keras (`TakenOver`)."""
        strategy = _strategy_of(self)
        group = strategy.part_communicator
        if group.size == 1 and not self.clipnorm:
            return super()._dtk_clip(gradients, variables)
        _check_shards(self, variables, strategy)
        if self.global_clipnorm and not self.clipnorm and group.size > 1:
            return _clip_to_norm_of_all(gradients, variables, self.global_clipnorm, group)
        clipped = list(super()._dtk_clip(gradients, variables))
        return _clip_parts(clipped, gradients, variables, self.clipnorm, group)

    def check_finite(self, grads: Gradients) -> tf.Tensor:
        """Check an optimizer's scaled gradients on all ranks that hold parts."""
        finite, group = super().check_finite(grads), _strategy_of(self).part_communicator
        return group.allreduce(finite, "min") if group.size > 1 else finite


def check(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Check that a strategy can take over an optimizer and those inside it."""
    for member in keras_optimizers.members(optimizer):
        _check_owner(member, strategy)
        check_exchange(member, strategy)


def take_over(optimizer: keras.Optimizer, strategy: Strategy, kind: type[SharedOptimizer]) -> None:
    """Take over an optimizer and those inside it, so that none reduces gradients by itself."""
    for member in keras_optimizers.members(optimizer):
        if not isinstance(member, kind):
            keras_optimizers.set_owner(member, strategy)
            make_subclass(member, kind)
            if strategy.supports_jit:  # servers run Keras's own updates
                optimizer_updates.fuse_updates(member, strategy.num_replicas_in_sync)


def _strategy_of(optimizer: keras.Optimizer) -> Strategy:
    return cast(Strategy, keras_optimizers.optimizer_owner(optimizer))


def _check_owner(member: keras.Optimizer, strategy: Strategy) -> None:
    """Take over an optimizer's variables, unless another strategy owns it."""
    owner = keras_optimizers.optimizer_owner(member)
    if owner is strategy:
        return
    if type(owner).__name__ != "_DefaultDistributionStrategy":
        message = (
            f"optimizer {member.name!r} was made for another strategy "
            f"({type(owner).__name__}); make a new optimizer inside this strategy's scope"
        )
        raise ValueError(at_rank(strategy.rank, message))
    strategy.take_variables(member.variables)


def build_outside_step(
    optimizer: keras.Optimizer, variables: Variables, strategy: Strategy, cut: bool = False
) -> None:
    """Make an optimizer's variables outside the step being traced.

    Keras builds the optimizer given to `compile` before the first step. Any other is built by its
    first `apply`, inside a step, where new variables would tie one replica's step to another's.
    """

    def build() -> None:
        with strategy.scope():
            optimizer.build(list(variables))

    outside_graph(build)
    # The step has scaled its loss already: by a constant. What is cut is refused for that instead.
    if hasattr(optimizer, "initial_scale") and not cut:
        message = (
            f"optimizer {optimizer.name!r} scales losses and is not built yet, so this step would "
            "keep its first scale for ever. Call optimizer.build(model.trainable_variables) inside "
            "`with strategy.scope():`, before the first step"
        )
        raise ValueError(at_rank(strategy.rank, message))


# Parts of variables.


def _check_shards(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], strategy: Strategy
) -> None:
    """Refuse an optimizer that needs a whole variable, of which this rank holds a part."""
    for variable in variables:
        in_parts = shard_of(variable) is not None and flat_shard_of(variable) is None
        reason = needs_whole(optimizer, variable) if in_parts else None
        if reason is not None:
            message = (
                f"optimizer {optimizer.name!r} ({type(optimizer).__name__}) {reason}, but this "
                f"rank holds only a part of {path_of(variable)!r}. Use an optimizer that takes "
                "each element for itself, such as SGD or Adam, or leave this layer whole"
            )
            raise ValueError(at_rank(strategy.rank, message))


def _clip_to_norm_of_all(
    gradients: Gradients, variables: Variables, most: float, group: Communicator
) -> Gradients:
    """Clip by the norm of the gradients of all variables; Keras has removed every None already."""
    squares = [tf.zeros([], tf.float64), tf.zeros([], tf.float64)]
    for gradient, variable in zip(gradients, variables, strict=True):
        squares[is_of_all(variable)] += _square_sum(gradient)
    norm = tf.sqrt(group.allreduce(squares[False]) + squares[True])
    limit = tf.constant(most, norm.dtype)
    # NaN where the norm is not finite, as in Keras.
    factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    # Keras's product makes slices dense, too.
    return [_times(factor)(tf.convert_to_tensor(gradient)) for gradient in gradients]


def _clip_parts(
    clipped: Gradients,
    gradients: Gradients,
    variables: Variables,
    most: float | None,
    group: Communicator,
) -> Gradients:
    """Replace the clipped gradients of parts: by the norm of the gradient of the whole variable."""
    # The parts of each variable that is in parts; one that has two gradients counts as two.
    wholes: dict[tuple[int, int], list[int]] = {}
    turns: collections.Counter[int] = collections.Counter()
    for i, variable in enumerate(variables if most else ()):
        turn = turns[id(variable)]
        turns[id(variable)] += 1
        if isinstance(variable, keras_variables.VariablePart):
            wholes.setdefault((id(variable.whole), turn), []).append(i)
        elif shard_of(variable) is not None:
            wholes[id(variable), turn] = [i]
    if not wholes:
        return clipped
    sums = [tf.add_n([_square_sum(gradients[i]) for i in parts]) for parts in wholes.values()]
    squares = tf.stack(sums) if group.size == 1 else group.allreduce(tf.stack(sums))
    limit = tf.constant(most, tf.float64)
    for square, parts in zip(tf.unstack(squares, len(wholes)), wholes.values(), strict=True):
        factor = limit / tf.maximum(tf.sqrt(square), limit)
        for i in parts:
            clipped[i] = on_values(gradients[i], _times(factor))
    return clipped


def _square_sum(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Return a gradient's sum of squares, computed as optimizers do for its norm."""
    return tf.cast(keras.ops.sum(keras.ops.square(gradient)), tf.float64)


def _times(factor: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda values: values * tf.cast(factor, values.dtype)


def mark_slots(optimizer: keras.Optimizer) -> None:
    """Mark the slot variables of parts of variables as parts of the same kind."""
    for member in keras_optimizers.members(optimizer):
        if member.built and not all(map(is_of_all, keras_optimizers.trained_variables(member))):
            for slot, variable, _ in keras_optimizers.slots_by_variable(member):
                if is_of_all(slot):
                    copy_mark(variable, slot)
