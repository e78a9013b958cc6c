"""Optimizers that many replicas share.

Gradients are reduced once, before loss-scale checks, accumulation and clipping see them; with
accumulation once per window. Where steps run behind parameter servers, an optimizer only notes what
a step hands it, and applies it later.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtk.compat import keras_optimizers, tf_replicas
from dtk.errors import at_rank
from dtk.trainer.contract import Strategy
from dtk.trainer.gradients import partitioned_variables, replaced_variables
from dtk.trainer.gradients.gradient_exchange import (
    GradientExchange,
    check_exchange,
    make_gradient_exchange,
    shaped,
)
from dtk.trainer.tracing import traced_step


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the model's optimizer and any other it holds as an attribute (a GAN has two).

    Those that one of them applies are left out: an attribute may be a second name of one.

    Args:
        model: The model.
    """
    found = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    unique = {id(optimizer): optimizer for optimizer in found}
    for optimizer in found:
        for member in partitioned_variables.members(optimizer)[1:]:
            unique.pop(id(member), None)
    return list(unique.values())


def _chain(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and those it wraps, outermost first."""
    chain = [optimizer]
    while hasattr(chain[-1], "inner_optimizer"):
        chain.append(chain[-1].inner_optimizer)
    return chain


def accumulators_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of an unfinished accumulation window.

    Args:
        optimizer: The optimizer.
    """
    inner = _chain(optimizer)[-1]
    accumulated = zip(
        keras_optimizers.accumulated(inner), keras_optimizers.trained_variables(inner), strict=False
    )
    return [a for a, v in accumulated if a is not None and not replaced_variables.is_replaced(v)]


def schedule_of(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return what an optimizer computes its learning rate with.

    Args:
        optimizer: The optimizer.

    Returns:
        A schedule or function; None when the rate is a plain number.
    """
    return keras_optimizers.given_rate(_chain(optimizer)[-1])


def accumulates(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer sums gradients over several steps before it applies them.

    Args:
        optimizer: The optimizer.
    """
    return bool(_chain(optimizer)[-1].gradient_accumulation_steps)


def is_linear(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer makes the same of two gradients and of their sum.

    Args:
        optimizer: The optimizer.
    """
    chain = _chain(optimizer)
    inner = chain[-1]
    clips = inner.clipnorm or inner.global_clipnorm or inner.clipvalue
    return type(inner) is keras.optimizers.SGD and len(chain) == 1 and not clips


# Reducing.


def bind(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make an optimizer reduce its gradients once, where every later step sees the reduced ones.

    Args:
        optimizer: The optimizer.
        strategy: The strategy of its model.

    Raises:
        ValueError: The optimizer belongs to another strategy, or cannot work with the exchange.
    """
    _own(optimizer, strategy)
    for member in partitioned_variables.members(optimizer):
        keras_optimizers.index_variables(member)

    chain = _chain(optimizer)
    outer, inner = chain[0], chain[-1]
    if getattr(outer, "_dtk_bound", None) is strategy:
        return
    outer._dtk_exchanging = gradient_exchange = make_gradient_exchange(outer, inner, strategy)
    outer._dtk_bound = strategy
    _weigh_own_loss(outer)
    if inner.gradient_accumulation_steps:
        _reduce_windows(outer, inner, strategy, gradient_exchange)
    else:
        _reduce_each(outer, inner, strategy, gradient_exchange)


def _weigh_own_loss(outer: keras.Optimizer) -> None:
    """Weigh the loss of Keras's own step by the replica's share, where Keras scales it."""
    scale_loss = outer.scale_loss

    @functools.wraps(scale_loss)
    def weighed(loss: tf.Tensor) -> tf.Tensor:
        step = traced_step.current()
        return scale_loss(step.weighed(loss) if step is not None and step.own else loss)

    outer.scale_loss = weighed


def _own(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Take over an optimizer and all that it applies; none is to reduce gradients by itself."""
    for member in partitioned_variables.members(optimizer):
        if getattr(member, "_dtk_member_of", None) is strategy:
            continue
        _check_owner(member, strategy)
        check_exchange(member, strategy)
        keras_optimizers.own_optimizer(member, strategy)
        member._dtk_member_of = strategy


def gradient_exchanges_of(model: keras.Model) -> list[GradientExchange]:
    """Return what exchanges the gradients of a model's optimizers.

    Args:
        model: The model.

    Returns:
        One per optimizer that has one.
    """
    bound = [getattr(o, "_dtk_exchanging", None) for o in optimizers_of(model)]
    return [gradient_exchange for gradient_exchange in bound if gradient_exchange is not None]


def _reduce_windows(
    outer: keras.Optimizer,
    inner: keras.Optimizer,
    strategy: Strategy,
    gradient_exchange: GradientExchange | None,
) -> None:
    """Reduce the sum of an accumulation window where it closes, which is all that is needed."""
    apply_own = outer.apply
    # The variables that the running step changes; replicas are traced in threads.
    running = threading.local()

    def clip_reduced(grads: Sequence, clip: Callable) -> Any:
        # What earlier steps of the window left counts, whether or not this one has rows.
        with tf_replicas.counted_if(None):
            return clip(_reduce_gradients(grads, running.changed, strategy, gradient_exchange))

    @tf.autograph.experimental.do_not_convert
    def apply_present(grads: Sequence, trainable_variables: Sequence | None = None) -> Any:
        _build_in_time(outer, trainable_variables, strategy)
        grads, only_noted = _taken(outer, grads, trainable_variables)
        if only_noted:
            return None
        trained = list(trainable_variables or keras_optimizers.trained_variables(inner))
        replacing = replaced_variables.replacements(grads, trained, strategy)
        present = tf_replicas.if_present(replaced_variables.without(replacing, grads))
        running.changed = [v for g, v in zip(present, trained, strict=True) if g is not None]
        result = apply_own(replaced_variables.merged(replacing, present), trainable_variables)
        if gradient_exchange is not None and replaced_variables.in_replica(strategy):
            gradient_exchange.count(running.changed)
        return result

    keras_optimizers.clip_through(inner, clip_reduced)
    outer.apply = apply_present
    if outer is not inner:
        check_finite = outer.check_finite
        outer.check_finite = lambda grads: _everywhere(check_finite(grads))


def _reduce_each(
    outer: keras.Optimizer,
    inner: keras.Optimizer,
    strategy: Strategy,
    gradient_exchange: GradientExchange | None,
) -> None:
    apply = outer.apply

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(apply)
    def reduced_apply(grads: Sequence, trainable_variables: Sequence | None = None) -> Any:
        _build_in_time(outer, trainable_variables, strategy)
        grads, only_noted = _taken(outer, grads, trainable_variables)
        if only_noted:
            return None
        trained = list(trainable_variables or keras_optimizers.trained_variables(inner))
        replacing = replaced_variables.replacements(grads, trained, strategy)
        changing = replaced_variables.without(replacing, grads)

        def go(reduced: list) -> Any:
            return apply(replaced_variables.merged(replacing, reduced), trainable_variables)

        if gradient_exchange is None or not replaced_variables.in_replica(strategy):
            return go(_reduce_gradients(changing, trained, strategy))
        _note_reduction()
        return gradient_exchange.apply(changing, trainable_variables, go)

    outer.apply = reduced_apply


def _taken(
    optimizer: keras.Optimizer, gradients: Sequence, variables: Sequence | None
) -> tuple[list, bool]:
    """Weigh the gradients that a step hands to its optimizer by its share of the rows.

    Returns:
        The gradients, and whether the step only notes them.
    """
    step = traced_step.current()
    if step is None:
        return list(gradients), False
    gradients = step.handed_over(list(gradients))
    if step.noted is None:
        return gradients, False
    _note_reduction()
    step.noted.note(
        optimizer, gradients, list(variables or keras_optimizers.trained_variables(optimizer))
    )
    return gradients, True


def _check_owner(member: keras.Optimizer, strategy: Strategy) -> None:
    """Take over an optimizer that no other strategy has."""
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
    optimizer: keras.Optimizer, variables: Sequence | None, strategy: Strategy
) -> None:
    """Make an optimizer's variables outside the step being traced.

    Keras builds the optimizer given to `compile` before the first step; others are built by their
    first `apply`, in the middle of a step. Variables made there tie one replica's step to
    another's. A new thread is outside every graph, device and replica.
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


def _reduce_gradients(
    grads: Sequence, variables: list, strategy: Strategy, exchange: GradientExchange | None = None
) -> list:
    """Sum the gradients of these variables over all replicas; None stays None."""
    grads = shaped(list(grads), variables)
    _note_reduction()
    present = [g for g in grads if g is not None]
    if not present or not replaced_variables.in_replica(strategy):
        return grads
    if exchange is not None:
        return exchange.reduce_window(grads, variables)
    reduced = iter(strategy.reduce_gradients(present))
    return [None if g is None else next(reduced) for g in grads]


def _everywhere(flag: tf.Tensor) -> tf.Tensor:
    """True where `flag` is true on every replica."""
    replica = tf.distribute.get_replica_context()
    misses = tf.cast(tf.logical_not(flag), tf.int32)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, misses) == 0


# Noting.


def note_applies(
    optimizer: keras.Optimizer, strategy: Strategy, parts_of: Callable[[keras.Variable], list]
) -> None:
    """Make an optimizer note what a traced step hands it, and see partitioned variables as parts.

    Args:
        optimizer: The model's optimizer.
        strategy: Its strategy.
        parts_of: Keras variable -> itself in a list, or its parts.

    Raises:
        ValueError: The optimizer belongs to another strategy.
    """
    outer = optimizer
    if getattr(outer, "_dtk_bound", None) is strategy:
        return
    _take_members(outer, strategy)
    outer._dtk_bound = strategy
    _weigh_own_loss(outer)
    apply, build, finalize = outer.apply, outer.build, outer.finalize_variable_values
    built_for: list = []

    @functools.wraps(apply)
    def noted_apply(grads: Sequence, trainable_variables: Sequence | None = None) -> Any:
        step = traced_step.current()
        if step is None or step.noted is None:
            return apply(grads, trainable_variables)
        _build_in_time(outer, trainable_variables, strategy)
        variables = trainable_variables or built_for or keras_optimizers.trained_variables(outer)
        replaced_variables.refuse(variables, strategy)
        step.noted.note(outer, step.handed_over(list(grads)), list(variables))
        return None

    def expanded(variables: Sequence) -> list:
        return [part for variable in variables for part in parts_of(variable)]

    def build_parts(variables: Sequence) -> None:
        built_for[:] = variables
        build(expanded(variables))
        _take_members(outer, strategy)  # a MultiOptimizer may make them while it is built

    outer.apply = noted_apply
    outer._dtk_apply = apply
    outer.build = build_parts
    outer.finalize_variable_values = lambda variables: finalize(expanded(variables))


def _take_members(outer: keras.Optimizer, strategy: Strategy) -> None:
    for member in partitioned_variables.members(outer):
        if getattr(member, "_dtk_member_of", None) is not strategy:
            _check_owner(member, strategy)
            keras_optimizers.own_optimizer(member, strategy)
            partitioned_variables.clip_wholes(member)
            member._dtk_member_of = strategy


def apply_now(optimizer: keras.Optimizer, gradients: list, variables: list) -> None:
    """Apply gradients by the optimizer's own `apply`, which is not noted.

    Args:
        optimizer: One that `note_applies` was called with.
        gradients: Gradients; None where there is none.
        variables: Keras variables, or parts of them, in the same order.
    """
    optimizer._dtk_apply(gradients, variables)
