"""Optimizers whose variables are on servers: steps note gradients, and servers apply them later.

A large variable is cut by rows over several servers. The optimizer sees its parts, and saves whole
slots: files do not tell of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables
from dtk.compat.keras_variables import path_of
from dtk.errors import at_rank
from dtk.nests import Array, Gradients, Tree
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.sharded_optimizer import needs_whole
from dtk.trainer.gradients.shared_optimizer import SharedOptimizer, Variables
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step


class ServedOptimizer(SharedOptimizer):
    """An optimizer that notes a traced step's gradients, and holds parts of variables."""

    _dtk_servers: Servers

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weigh the loss, then scale it."""
        return super().scale_loss(shared_optimizer.weighed_in_scale(loss))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Gradients, trainable_variables: Variables | None = None) -> Tree:
        """Note gradients in a step; apply them outside."""
        step, servers, variables = traced_step.current(), self._dtk_servers, trainable_variables
        if step is None or step.noted is None:
            return super().apply(grads, variables)
        if not self.built and variables is not None:
            cut = any(len(servers.parts_of(variable)) > 1 for variable in variables)
            shared_optimizer.build_outside_step(self, variables, servers.strategy, cut)
        noted = list(variables or servers.built_for or keras_optimizers.trained_variables(self))
        _refuse_replaced(noted, servers.strategy)
        step.noted.note(traced_step.Applied(self, step.handed_over(list(grads)), noted))
        return None

    def build(self, variables: Variables) -> None:
        """Make the optimizer's variables, for parts of variables."""
        servers = self._dtk_servers
        with keras_optimizers.marking_slots():
            super().build(servers.divided(variables))
        servers.built_for = list(variables)
        # A MultiOptimizer may have made members.
        take_over(self, servers.strategy, servers.parts_of)

    def finalize_variable_values(self, var_list: Variables) -> None:
        """Set the last values of variables, such as their averages."""
        super().finalize_variable_values(self._dtk_servers.divided(var_list))

    def save_own_variables(self, store: dict[str, Array]) -> None:
        """Save whole slots."""
        for i, parts in enumerate(keras_variables.in_wholes(self.variables)):
            values = [keras.ops.convert_to_numpy(part) for part in parts]
            store[str(i)] = values[0] if len(values) == 1 else np.concatenate(values)

    def load_own_variables(self, store: dict[str, Array]) -> None:
        """Load whole slots."""
        wholes = keras_variables.in_wholes(self.variables)
        if len(store.keys()) != len(wholes):
            super().load_own_variables(store)  # Keras warns
            return
        places = {id(variable): str(i) for i, variable in enumerate(self.variables)}
        cut: dict[str, Array] = {}
        for i, parts in enumerate(wholes):
            pieces = [np.asarray(store[str(i)])]
            if len(parts) > 1:
                ends = itertools.accumulate(part.shape[0] for part in parts[:-1])
                pieces = np.split(pieces[0], list(ends))
            cut |= {places[id(part)]: piece for part, piece in zip(parts, pieces, strict=True)}
        super().load_own_variables(cut)


class Servers:
    """What an optimizer knows of the servers: how variables are cut there."""

    def __init__(self, strategy: Strategy, parts_of: Callable[[keras.Variable], Variables]):
        self.strategy, self.parts_of = strategy, parts_of
        self.built_for: list[keras.Variable] = []  # whole variables

    def divided(self, variables: Variables) -> list[keras.Variable]:
        """Return the parts of variables; a part is its own."""
        return [part for variable in variables for part in self.parts_of(variable)]


def take_over(
    optimizer: keras.Optimizer, strategy: Strategy, parts_of: Callable[[keras.Variable], Variables]
) -> None:
    """Make a `ServedOptimizer` of an optimizer, and of those inside it."""
    shared_optimizer.check(optimizer, strategy)
    for member in keras_optimizers.members(optimizer):
        vars(member).setdefault("_dtk_servers", Servers(strategy, parts_of))
    shared_optimizer.take_over(optimizer, strategy, ServedOptimizer)


def _refuse_replaced(variables: Variables, strategy: Strategy) -> None:
    replaced = [path_of(v) for v in variables if keras_optimizers.is_replaced(v)]
    if replaced:
        message = (
            f"workers send gradients, and {replaced[0]!r} is a variable that each step "
            "replaces (overwrite_with_gradient), as float8 layers have them; train those with "
            "MirroredStrategy or AllReduceStrategy, or quantize after training"
        )
        raise ValueError(at_rank(strategy.rank, message))


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
