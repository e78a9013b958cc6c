"""Optimizers that many replicas share: which a model has, and whose they are.

`replica_step` makes them exchange each step's gradients. Under parameter servers, an optimizer only
notes a step's gradients and applies them later.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, cast

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables
from dtk.compat.keras_optimizers import Apply
from dtk.compat.keras_variables import copy_mark, flat_shard_of, is_of_all, path_of, shard_of
from dtk.compat.tf_replicas import on_values
from dtk.errors import at_rank
from dtk.exchange.local_steps import LocalOp
from dtk.kernels import optimizer_updates
from dtk.nests import Array, Gradients, Tree
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
    found = [value for value in held if isinstance(value, keras.optimizers.Optimizer)]
    unique = {id(optimizer): optimizer for optimizer in found}
    for optimizer in found:
        for member in keras_optimizers.members(optimizer)[1:]:
            unique.pop(id(member), None)
    return list(unique.values())


def _each(value: object) -> Collection[object]:
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else (value,)


def gradient_exchanges_of(model: keras.Model) -> list[GradientExchange]:
    """Return the gradient exchanges of a model's optimizers."""
    records = [keras_optimizers.note_of(o, OptimizerRecord) for o in optimizers_of(model)]
    return [b.exchange for b in records if b is not None and b.exchange is not None]


def sharded_of(model: keras.Model) -> list[ShardedOptimizer]:
    """Return what divides a model's optimizers over ranks."""
    records = [keras_optimizers.note_of(o, OptimizerRecord) for o in optimizers_of(model)]
    return [b.sharded for b in records if b is not None and b.sharded is not None]


def blocks_of(model: keras.Model) -> list[LocalOp]:
    """Return the blocks of local steps of a model's optimizers; none if weights stay equal."""
    return [block for exchange in gradient_exchanges_of(model) for block in exchange.blocks]


def windows_of(model: keras.Model) -> list[tuple[OptimizerRecord, list[keras.Variable]]]:
    """Return the records of accumulating optimizers, and the variables they accumulate in."""
    found = []
    for optimizer in optimizers_of(model):
        record = keras_optimizers.note_of(optimizer, OptimizerRecord)
        # A sharded optimizer accumulates sums over all ranks.
        variables = [v for v in accumulators_of(optimizer) if flat_shard_of(v) is None]
        if record is not None and variables:
            found.append((record, variables))
    return found


def accumulators_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of an unfinished accumulation window."""
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
    return step.weighed(loss) if step is not None and step.own and is_mean else loss


# Whose an optimizer is.


@dataclasses.dataclass
class OptimizerRecord:
    """The record of an optimizer that a strategy has taken over."""

    strategy: Strategy
    # set for the outermost optimizer only
    exchange: GradientExchange | None = None
    # what divides the optimizer over ranks; for the outermost only
    sharded: ShardedOptimizer | None = None
    # the optimizer's own `apply`, where steps only note gradients; for the outermost only
    apply: Apply | None = None
    # whether each replica holds its own part of an accumulation window, and not the whole
    divided: bool = False
    told: bool = False  # that a file was written while they did
    saves_wholes: bool = False  # see `_save_wholes`
    # the moving statistics that steps of a script's own loop assign, too
    statistics: dict[int, keras.Variable] = dataclasses.field(default_factory=dict)

    @property
    def in_window(self) -> bool:
        """Whether an accumulation window is open, by the number of steps: alike on all ranks."""
        return self.exchange is not None and not bool(self.exchange.is_between_windows())


def take_over_optimizer(optimizer: keras.Optimizer, strategy: Strategy) -> OptimizerRecord:
    """Take over an optimizer and those inside it, so that none reduces gradients by itself."""
    for member in keras_optimizers.members(optimizer):
        record = keras_optimizers.note_of(member, OptimizerRecord)
        if record is None or record.strategy is not strategy:
            _check_owner(member, strategy)
            check_exchange(member, strategy)
            keras_optimizers.own_optimizer(member, strategy)
            take_parts(member, strategy)
            if strategy.supports_jit:  # servers run Keras's own updates
                optimizer_updates.fuse_updates(member, strategy.num_replicas_in_sync)
            keras_optimizers.set_note(member, OptimizerRecord(strategy))
    return _record_of(optimizer)


def _record_of(optimizer: keras.Optimizer) -> OptimizerRecord:
    return cast(OptimizerRecord, keras_optimizers.note_of(optimizer, OptimizerRecord))


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
        take_over_optimizer(optimizer, strategy)

    outside_graph(build)
    # The step has scaled its loss already: by a constant. What is cut is refused for that instead.
    if hasattr(optimizer, "initial_scale") and not cut:
        message = (
            f"optimizer {optimizer.name!r} scales losses and is not built yet, so this step would "
            "keep its first scale for ever. Call optimizer.build(model.trainable_variables) inside "
            "`with strategy.scope():`, before the first step"
        )
        raise ValueError(at_rank(strategy.rank, message))


# Behind parameter servers.


def note_applies(
    optimizer: keras.Optimizer, strategy: Strategy, parts_of: Callable[[keras.Variable], Variables]
) -> None:
    """Make an optimizer note a traced step's gradients, and see partitioned variables as parts."""
    record = take_over_optimizer(optimizer, strategy)
    if record.apply is not None:
        return
    keras_optimizers.patch_scale_loss(optimizer, weighed_in_scale)
    built_for: list[keras.Variable] = []

    def note(grads: Gradients, variables: Variables | None, apply: Apply) -> Tree:
        step = traced_step.current()
        if step is None or step.noted is None:
            return apply(grads, variables)
        if not optimizer.built and variables is not None:
            cut = any(len(parts_of(variable)) > 1 for variable in variables)
            build_outside_step(optimizer, variables, strategy, cut)
        noted = variables or built_for or keras_optimizers.trained_variables(optimizer)
        _refuse_replaced(noted, strategy)
        step.noted.note(optimizer, step.handed_over(grads), list(noted))
        return None

    def expanded(variables: Variables) -> list[keras.Variable]:
        return [part for variable in variables for part in parts_of(variable)]

    def built(variables: Variables) -> None:
        built_for[:] = variables
        take_over_optimizer(
            optimizer, strategy
        )  # a MultiOptimizer may make members while it is built
        _save_wholes(optimizer)

    _save_wholes(optimizer)
    record.apply = keras_optimizers.patch_apply(optimizer, note)
    keras_optimizers.patch_build(optimizer, expanded, built)


def _save_wholes(optimizer: keras.Optimizer) -> None:
    """Make an optimizer save whole slots, and cut what it loads: files do not tell of parts."""
    for member in keras_optimizers.members(optimizer):
        record = _record_of(member)
        if not record.saves_wholes:
            record.saves_wholes = True
            save, load = (functools.partial(f, member) for f in (_save_whole, _load_whole))
            keras_optimizers.patch_state(member, save, load)


def _save_whole(optimizer: keras.Optimizer, store: dict[str, Array]) -> None:
    for i, parts in enumerate(keras_variables.in_wholes(optimizer.variables)):
        values = [keras.ops.convert_to_numpy(part) for part in parts]
        store[str(i)] = values[0] if len(values) == 1 else np.concatenate(values)


def _load_whole(
    optimizer: keras.Optimizer,
    store: dict[str, Array],
    load: Callable[[dict[str, Array]], None],
) -> None:
    wholes = keras_variables.in_wholes(optimizer.variables)
    if len(store.keys()) != len(wholes):
        load(store)  # Keras warns
        return
    places = {id(variable): str(i) for i, variable in enumerate(optimizer.variables)}
    cut: dict[str, Array] = {}
    for i, parts in enumerate(wholes):
        pieces = [np.asarray(store[str(i)])]
        if len(parts) > 1:
            ends = itertools.accumulate(part.shape[0] for part in parts[:-1])
            pieces = np.split(pieces[0], list(ends))
        cut |= {places[id(part)]: piece for part, piece in zip(parts, pieces, strict=True)}
    load(cut)


def _refuse_replaced(variables: Variables, strategy: Strategy) -> None:
    replaced = [path_of(v) for v in variables if keras_optimizers.is_replaced(v)]
    if replaced:
        message = (
            f"workers send gradients, and {replaced[0]!r} is a variable that each step "
            "replaces (overwrite_with_gradient), as float8 layers have them; train those with "
            "MirroredStrategy or AllReduceStrategy, or quantize after training"
        )
        raise ValueError(at_rank(strategy.rank, message))


def apply_now(
    optimizer: keras.Optimizer, gradients: Gradients, variables: list[keras.Variable]
) -> None:
    """Apply gradients by the optimizer's own `apply`, without noting them."""
    apply = _record_of(optimizer).apply
    assert apply is not None
    apply(gradients, variables)


# Parts of variables: let optimizers update parts of variables as they would update the whole.
#
# A large variable is cut by rows over several servers, a rank of a model-parallel group holds one
# part of it, or each rank updates one part of it (`sharded_optimizer`). An optimizer sees each part
# as a separate variable. The result is the same if an element's step (on servers: a row's) depends
# on that element only. The exceptions:
#
#     clipping to a norm          the squares of the parts are summed here; in float64, as ranks may
#                                 hold parts of different dtypes
#     finite gradients            a loss scale falls when any part is not finite
#     one ratio, mean or matrix   Lamb, LARS, Adafactor, Muon: refused
#     constraints over rows       UnitNorm(axis=0) and the like: refused on servers


def check_parts(
    optimizer: keras.Optimizer, variable: keras.Variable, parts: Sequence[keras.Variable]
) -> None:
    """Refuse an optimizer or a constraint that needs a whole variable, if servers hold parts."""
    if len(parts) == 1:
        return
    for member in keras_optimizers.members(optimizer):
        reason = needs_whole(member, variable) if _updates(member, parts) else None
        if reason is not None:
            raise ValueError(
                f"optimizer {optimizer.name!r} ({type(member).__name__}) {reason}, but "
                f"variable_partitioner= has cut {path_of(variable)!r} into {len(parts)} parts on "
                "several servers. Make the strategy without variable_partitioner, or with one that "
                "leaves this variable whole; or use an optimizer that takes each row for itself, "
                "such as Adagrad or Adam"
            )
    if variable.constraint is not None and not _is_by_rows(variable.constraint, variable):
        raise ValueError(
            f"the constraint {type(variable.constraint).__name__} of {path_of(variable)!r} needs "
            "more than a row at a time, but variable_partitioner= has cut the variable into "
            f"{len(parts)} parts on several servers. Use a constraint of each row (axis=1), or "
            "a partitioner that leaves this variable whole"
        )


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


def _updates(member: keras.Optimizer, parts: Sequence[keras.Variable]) -> bool:
    """Return whether an optimizer updates these parts; several may share a model's variables."""
    if not member.built:
        return True
    known = {id(variable) for variable in keras_optimizers.trained_variables(member)}
    return any(id(part) in known for part in parts)


def _is_by_rows(constraint: Callable[[tf.Tensor], tf.Tensor], variable: keras.Variable) -> bool:
    """Return whether a constraint gives two rows together the same values as each row alone."""
    shape = (2, *variable.shape[1:])
    values = np.random.default_rng(0).normal(size=shape)
    values[1] *= 100.0
    with tf.init_scope():
        rows = keras.ops.convert_to_tensor(values, variable.dtype)
        separate = [constraint(rows[:1]), constraint(rows[1:])]
        return np.allclose(constraint(rows), np.concatenate(separate), rtol=1e-3)


# Clipping.


def take_parts(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make an optimizer treat parts of variables as it would treat whole ones."""
    group = strategy.part_communicator
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if group.size > 1:
            everywhere = functools.partial(group.allreduce, op="min")
            keras_optimizers.patch_check_finite(optimizer, everywhere)
    elif group.size > 1 or optimizer.clipnorm:
        clip = functools.partial(_clip, optimizer, strategy)
        keras_optimizers.patch_clip(optimizer, clip)


def _clip(
    optimizer: keras.Optimizer,
    strategy: Strategy,
    gradients: Gradients,
    variables: Sequence[keras.Variable],
    clip: keras_optimizers.Clip,
) -> Gradients:
    """Clip gradients as the optimizer would clip the gradients of whole variables."""
    group = strategy.part_communicator
    _check_shards(optimizer, variables, strategy)
    # Keras has removed every None already.
    if optimizer.global_clipnorm and not optimizer.clipnorm and group.size > 1:
        squares = [tf.zeros([], tf.float64), tf.zeros([], tf.float64)]
        for gradient, variable in zip(gradients, variables, strict=True):
            squares[is_of_all(variable)] += _square_sum(gradient)
        norm = tf.sqrt(group.allreduce(squares[False]) + squares[True])
        most = tf.constant(optimizer.global_clipnorm, norm.dtype)
        # NaN where the norm is not finite, as in Keras.
        factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
        # Keras's product makes slices dense, too.
        return [_times(factor)(tf.convert_to_tensor(gradient)) for gradient in gradients]
    clipped = list(clip(gradients))
    wholes: dict[int, list[int]] = {}  # the parts of each variable that is in parts
    for i, variable in enumerate(variables if optimizer.clipnorm else ()):
        if isinstance(variable, keras_variables.VariablePart):
            wholes.setdefault(id(variable.whole), []).append(i)
        elif shard_of(variable) is not None:
            wholes[id(variable)] = [i]
    if not wholes:
        return clipped
    sums = [tf.add_n([_square_sum(gradients[i]) for i in parts]) for parts in wholes.values()]
    squares = tf.stack(sums) if group.size == 1 else group.allreduce(tf.stack(sums))
    most = tf.constant(optimizer.clipnorm, tf.float64)
    for square, parts in zip(tf.unstack(squares, len(wholes)), wholes.values(), strict=True):
        factor = most / tf.maximum(tf.sqrt(square), most)
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
