"""Optimizers that many replicas share: which a model has, and whose they are.

`replica_step` makes them exchange each step's gradients. Under parameter servers, an optimizer only
notes a step's gradients and applies them later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import keras
import tensorflow as tf

from dtk.compat import fused_kernels, keras_optimizers
from dtk.compat.keras_optimizers import Apply
from dtk.errors import at_rank
from dtk.exchange.local_steps import LocalOp
from dtk.nests import Gradients, Nest
from dtk.placement import outside_graph
from dtk.trainer.gradients import variable_parts
from dtk.trainer.gradients.gradient_exchange import GradientExchange, check_exchange
from dtk.trainer.gradients.sharded_optimizer import ShardedOptimizer
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step

Variables: TypeAlias = Sequence[keras.Variable]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the model's optimizer and any other it holds as an attribute (a GAN has two).

    An optimizer inside another one is left out: an attribute may be a second name of it.
    """
    found = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    unique = {id(optimizer): optimizer for optimizer in found}
    for optimizer in found:
        for member in variable_parts.members(optimizer)[1:]:
            unique.pop(id(member), None)
    return list(unique.values())


def gradient_exchanges_of(model: keras.Model) -> list[GradientExchange]:
    """Return the gradient exchanges of a model's optimizers."""
    bonds = [keras_optimizers.note_of(o, Bond) for o in optimizers_of(model)]
    return [b.exchange for b in bonds if b is not None and b.exchange is not None]


def sharded_of(model: keras.Model) -> list[ShardedOptimizer]:
    """Return what divides a model's optimizers over ranks."""
    bonds = [keras_optimizers.note_of(o, Bond) for o in optimizers_of(model)]
    return [b.sharded for b in bonds if b is not None and b.sharded is not None]


def updated(model: keras.Model, update: Callable[[], Nest]) -> Nest:
    """Call what updates the weights and slots of a model outside a step."""
    for one in sharded_of(model):
        update = functools.partial(one.updated, update)
    return update()


def blocks_of(model: keras.Model) -> list[LocalOp]:
    """Return the blocks of local steps of a model's optimizers; none if weights stay equal."""
    return [block for exchange in gradient_exchanges_of(model) for block in exchange.blocks]


def accumulators_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of an unfinished accumulation window."""
    inner = keras_optimizers.chain(optimizer)[-1]
    accumulated = zip(
        keras_optimizers.accumulated(inner), keras_optimizers.trained_variables(inner), strict=False
    )
    return [a for a, v in accumulated if a is not None and not is_replaced(v)]


def schedule_of(optimizer: keras.Optimizer) -> Callable[[], tf.Tensor] | None:
    """Return the schedule of an optimizer's learning rate, if it has one."""
    return keras_optimizers.given_rate(keras_optimizers.chain(optimizer)[-1])


def is_replaced(variable: keras.Variable) -> bool:
    """Return whether an optimizer replaces a variable by its gradient.

    Keras's float8 layers have it do this for their scales and for the largest values they have
    seen.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def weighed_in_scale(loss: tf.Tensor) -> tf.Tensor:
    """Weigh the loss by the replica's share, in Keras's own step, when Keras scales the loss."""
    step = traced_step.current()
    return step.weighed(loss) if step is not None and step.own else loss


# Whose an optimizer is.


@dataclasses.dataclass
class Bond:
    """The record of an optimizer that a strategy has taken over."""

    strategy: Strategy
    # set for the outermost optimizer only
    exchange: GradientExchange | None = None
    # what divides the optimizer over ranks; for the outermost only
    sharded: ShardedOptimizer | None = None
    # the optimizer's own `apply`, where steps only note gradients; for the outermost only
    apply: Apply | None = None


def own(optimizer: keras.Optimizer, strategy: Strategy) -> Bond:
    """Take over an optimizer and those inside it, so that none reduces gradients by itself."""
    for member in variable_parts.members(optimizer):
        bond = keras_optimizers.note_of(member, Bond)
        if bond is None or bond.strategy is not strategy:
            _check_owner(member, strategy)
            check_exchange(member, strategy)
            keras_optimizers.own_optimizer(member, strategy)
            variable_parts.take_parts(member, strategy)
            if strategy.supports_jit:  # servers run Keras's own updates
                fused_kernels.fuse_updates(member)
            keras_optimizers.set_note(member, Bond(strategy))
    return _bond_of(optimizer)


def _bond_of(optimizer: keras.Optimizer) -> Bond:
    return cast(Bond, keras_optimizers.note_of(optimizer, Bond))


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


def build_outside_step(
    optimizer: keras.Optimizer, variables: Variables, strategy: Strategy
) -> None:
    """Make an optimizer's variables outside the step being traced.

    Keras builds the optimizer given to `compile` before the first step. Any other is built by its
    first `apply`, inside a step, where new variables would tie one replica's step to another's.
    """

    def build() -> None:
        with strategy.scope():
            optimizer.build(list(variables))
        own(optimizer, strategy)

    outside_graph(build)


# Behind parameter servers.


def note_applies(
    optimizer: keras.Optimizer, strategy: Strategy, parts_of: Callable[[keras.Variable], Variables]
) -> None:
    """Make an optimizer note a traced step's gradients, and see partitioned variables as parts."""
    bond = own(optimizer, strategy)
    if bond.apply is not None:
        return
    keras_optimizers.patch_scale_loss(optimizer, weighed_in_scale)
    built_for: list[keras.Variable] = []

    def note(grads: Gradients, variables: Variables | None, apply: Apply) -> Nest:
        step = traced_step.current()
        if step is None or step.noted is None:
            return apply(grads, variables)
        if not optimizer.built and variables is not None:
            build_outside_step(optimizer, variables, strategy)
        noted = variables or built_for or keras_optimizers.trained_variables(optimizer)
        _refuse_replaced(noted, strategy)
        step.noted.note(optimizer, step.handed_over(grads), list(noted))
        return None

    def expanded(variables: Variables) -> list[keras.Variable]:
        return [part for variable in variables for part in parts_of(variable)]

    def built(variables: Variables) -> None:
        built_for[:] = variables
        own(optimizer, strategy)  # a MultiOptimizer may make members while it is built

    bond.apply = keras_optimizers.patch_apply(optimizer, note)
    keras_optimizers.patch_build(optimizer, expanded, built)


def _refuse_replaced(variables: Variables, strategy: Strategy) -> None:
    replaced = [v.path for v in variables if is_replaced(v)]
    if replaced:
        raise ValueError(
            at_rank(
                strategy.rank,
                f"workers send gradients, and {replaced[0]!r} is a variable that each step "
                "replaces (overwrite_with_gradient), as float8 layers have them; train those with "
                "MirroredStrategy or AllReduceStrategy, or quantize after training",
            )
        )


def apply_now(
    optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
) -> None:
    """Apply gradients by the optimizer's own `apply`, without noting them."""
    apply = _bond_of(optimizer).apply
    assert apply is not None
    apply(gradients, variables)
