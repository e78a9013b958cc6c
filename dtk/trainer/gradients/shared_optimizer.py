"""Optimizers that many replicas share.

Gradients are reduced once, before loss-scale checks, accumulation and clipping; with accumulation,
once per window. Under parameter servers, an optimizer only notes a step's gradients and applies
them later.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import keras
import tensorflow as tf

from dtk.compat import fused_kernels, keras_optimizers, tf_replicas
from dtk.compat.keras_optimizers import Apply, Clip
from dtk.errors import at_rank
from dtk.nests import Gradients, Nest
from dtk.trainer.gradients import partitioned_variables, replaced_variables, shards
from dtk.trainer.gradients.gradient_exchange import GradientExchange, check_exchange
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step

_Variables: TypeAlias = Sequence[keras.Variable]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the model's optimizer and any other it holds as an attribute (a GAN has two).

    An optimizer inside another one is left out: an attribute may be a second name of it.
    """
    found = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    unique = {id(optimizer): optimizer for optimizer in found}
    for optimizer in found:
        for member in partitioned_variables.members(optimizer)[1:]:
            unique.pop(id(member), None)
    return list(unique.values())


def accumulators_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of an unfinished accumulation window."""
    inner = keras_optimizers.chain(optimizer)[-1]
    accumulated = zip(
        keras_optimizers.accumulated(inner), keras_optimizers.trained_variables(inner), strict=False
    )
    return [a for a, v in accumulated if a is not None and not replaced_variables.is_replaced(v)]


def schedule_of(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return the schedule of an optimizer's learning rate, if it has one."""
    return keras_optimizers.given_rate(keras_optimizers.chain(optimizer)[-1])


def accumulates(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer sums gradients over several steps before it applies them."""
    return bool(keras_optimizers.chain(optimizer)[-1].gradient_accumulation_steps)


# Reducing.


@dataclasses.dataclass
class _Bond:
    """The record of an optimizer that a strategy has taken over."""

    strategy: Strategy
    # set for the outermost optimizer only
    exchange: GradientExchange | None = None
    # the optimizer's own `apply`, where steps only note gradients; for the outermost only
    apply: Apply | None = None


def bind(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make an optimizer reduce its gradients once, before it checks, accumulates or clips them."""
    bond = _own(optimizer, strategy)
    for member in partitioned_variables.members(optimizer):
        keras_optimizers.index_variables(member)
    if bond.exchange is not None:
        return
    outer, inner = optimizer, keras_optimizers.chain(optimizer)[-1]
    bond.exchange = exchange = GradientExchange(outer, inner, strategy)
    keras_optimizers.patch_scale_loss(outer, _weighed)
    if inner.gradient_accumulation_steps:
        _reduce_windows(outer, inner, strategy, exchange)
    else:
        _reduce_each(outer, inner, strategy, exchange)


def _weighed(loss: tf.Tensor) -> tf.Tensor:
    """Weigh the loss by the replica's share, in Keras's own step, when Keras scales the loss."""
    step = traced_step.current()
    return step.weighed(loss) if step is not None and step.own else loss


def _own(optimizer: keras.Optimizer, strategy: Strategy) -> _Bond:
    """Take over an optimizer and those inside it, so that none reduces gradients by itself."""
    for member in partitioned_variables.members(optimizer):
        if not _is_bound(member, strategy):
            _check_owner(member, strategy)
            check_exchange(member, strategy)
            keras_optimizers.own_optimizer(member, strategy)
            shards.take_shards(member, strategy)
            fused_kernels.fuse_updates(member)
            keras_optimizers.set_note(member, _Bond(strategy))
    return _bond_of(optimizer)


def _bond_of(optimizer: keras.Optimizer) -> _Bond:
    return cast(_Bond, keras_optimizers.note_of(optimizer, _Bond))


def _is_bound(member: keras.Optimizer, strategy: Strategy) -> bool:
    bond = keras_optimizers.note_of(member, _Bond)
    return bond is not None and bond.strategy is strategy


def gradient_exchanges_of(model: keras.Model) -> list[GradientExchange]:
    """Return the gradient exchanges of a model's optimizers."""
    bonds = [keras_optimizers.note_of(o, _Bond) for o in optimizers_of(model)]
    return [b.exchange for b in bonds if b is not None and b.exchange is not None]


def _reduce_windows(
    outer: keras.Optimizer,
    inner: keras.Optimizer,
    strategy: Strategy,
    gradient_exchange: GradientExchange,
) -> None:
    """Reduce the sum of an accumulation window once, at its end."""
    # Holds the variables that the running step changes; replicas are traced in threads.
    running = threading.local()

    def clip_reduced(grads: Gradients, variables: _Variables, clip: Clip) -> Gradients:
        del variables
        _note_reduction()
        if not replaced_variables.in_replica(strategy):
            return clip(grads)
        # The sums of earlier steps of the window count even if this step has no rows.
        with tf_replicas.counted_if(None):
            return clip(gradient_exchange.reduce_window(list(grads), running.changed))

    def accumulate(grads: Gradients, variables: _Variables | None, apply: Apply) -> Nest:
        _build_in_time(outer, variables, strategy)
        grads, only_noted = _taken(outer, grads, variables)
        if only_noted:
            return None
        trained = list(variables or keras_optimizers.trained_variables(inner))
        replacing = replaced_variables.replacements(grads, trained, strategy)
        present = tf_replicas.if_present(replaced_variables.without(replacing, grads))
        running.changed = [v for g, v in zip(present, trained, strict=True) if g is not None]
        result = apply(replaced_variables.merged(replacing, present), variables)
        if replaced_variables.in_replica(strategy):
            gradient_exchange.count(running.changed)
        return result

    keras_optimizers.patch_clip(inner, clip_reduced)
    keras_optimizers.patch_apply(outer, accumulate)
    if outer is not inner:
        keras_optimizers.patch_check_finite(outer, _everywhere)


def _reduce_each(
    outer: keras.Optimizer,
    inner: keras.Optimizer,
    strategy: Strategy,
    gradient_exchange: GradientExchange,
) -> None:
    """Exchange every step's gradients before the optimizer sees them."""

    def exchange(grads: Gradients, variables: _Variables | None, apply: Apply) -> Nest:
        _build_in_time(outer, variables, strategy)
        grads, only_noted = _taken(outer, grads, variables)
        if only_noted:
            return None
        _note_reduction()
        if not replaced_variables.in_replica(strategy):
            return apply(grads, variables)
        trained = list(variables or keras_optimizers.trained_variables(inner))
        replacing = replaced_variables.replacements(grads, trained, strategy)
        changing = replaced_variables.without(replacing, grads)
        reduced, applied = gradient_exchange.update(changing, trained)
        reduced = replaced_variables.merged(replacing, reduced)
        result = _apply_if(applied, lambda: apply(reduced, variables))
        gradient_exchange.count(trained)
        return result

    keras_optimizers.patch_apply(outer, exchange)


def _apply_if(condition: tf.Tensor | None, apply: Callable[[], Nest]) -> Nest:
    if condition is None:
        return apply()

    def applied() -> bool:
        apply()
        return True

    return tf.cond(condition, applied, lambda: False)


def _taken(
    optimizer: keras.Optimizer, gradients: Gradients, variables: _Variables | None
) -> tuple[Gradients, bool]:
    """Weigh a step's gradients by its share of the rows; return them and whether only noted."""
    step = traced_step.current()
    if step is None:
        return gradients, False
    gradients = step.handed_over(gradients)
    if step.noted is None:
        return gradients, False
    _note_reduction()
    step.noted.note(
        optimizer, gradients, list(variables or keras_optimizers.trained_variables(optimizer))
    )
    return gradients, True


def _check_owner(member: keras.Optimizer, strategy: Strategy) -> None:
    """Take over an optimizer's variables, unless another strategy owns it."""
    owner = keras_optimizers.optimizer_owner(member)
    if owner is strategy:
        return
    if type(owner).__name__ != "_DefaultDistributionStrategy":
        raise ValueError(
            at_rank(
                strategy.rank,
                f"optimizer {member.name!r} was made for another strategy "
                f"({type(owner).__name__}); make a new optimizer inside this strategy's scope",
            )
        )
    strategy.take_variables(member.variables)


def _build_in_time(
    optimizer: keras.Optimizer, variables: _Variables | None, strategy: Strategy
) -> None:
    """Make an optimizer's variables outside the step being traced.

    Keras builds the optimizer given to `compile` before the first step. Any other is built by its
    first `apply`, inside a step, where new variables would tie one replica's step to another's. A
    new thread is outside every graph, device and replica.
    """
    if optimizer.built or variables is None:
        return

    def build() -> None:
        with strategy.scope():
            optimizer.build(list(variables))
        _own(optimizer, strategy)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(build).result()


def _note_reduction() -> None:
    step = traced_step.current()
    if step is not None:
        step.reductions += 1


def _everywhere(flag: tf.Tensor) -> tf.Tensor:
    """True where `flag` is true on every replica."""
    replica = tf.distribute.get_replica_context()
    misses = tf.cast(tf.logical_not(flag), tf.int32)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, misses) == 0


# Noting.


def note_applies(
    optimizer: keras.Optimizer, strategy: Strategy, parts_of: Callable[[keras.Variable], _Variables]
) -> None:
    """Make an optimizer note a traced step's gradients, and see partitioned variables as parts."""
    outer = optimizer
    bond = _take_members(outer, strategy)
    if bond.apply is not None:
        return
    keras_optimizers.patch_scale_loss(outer, _weighed)
    built_for: list[keras.Variable] = []

    def note(grads: Gradients, variables: _Variables | None, apply: Apply) -> Nest:
        step = traced_step.current()
        if step is None or step.noted is None:
            return apply(grads, variables)
        _build_in_time(outer, variables, strategy)
        noted = variables or built_for or keras_optimizers.trained_variables(outer)
        replaced_variables.refuse(noted, strategy)
        step.noted.note(outer, step.handed_over(grads), list(noted))
        return None

    def expanded(variables: _Variables) -> list[keras.Variable]:
        return [part for variable in variables for part in parts_of(variable)]

    def built(variables: _Variables) -> None:
        built_for[:] = variables
        _take_members(outer, strategy)  # a MultiOptimizer may make members while it is built

    bond.apply = keras_optimizers.patch_apply(outer, note)
    keras_optimizers.patch_build(outer, expanded, built)


def _take_members(outer: keras.Optimizer, strategy: Strategy) -> _Bond:
    for member in partitioned_variables.members(outer):
        if not _is_bound(member, strategy):
            _check_owner(member, strategy)
            keras_optimizers.own_optimizer(member, strategy)
            partitioned_variables.clip_wholes(member)
            keras_optimizers.set_note(member, _Bond(strategy))
    return _bond_of(outer)


def apply_now(
    optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
) -> None:
    """Apply gradients by the optimizer's own `apply`, without noting them."""
    bond = _bond_of(optimizer)
    assert bond.apply is not None
    bond.apply(gradients, variables)
