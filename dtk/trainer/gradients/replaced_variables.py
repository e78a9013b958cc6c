"""Variables that an optimizer replaces by their gradient (`overwrite_with_gradient`).

Keras's layers in float8 do so with their scales, and with the largest values they have seen. What
counts of the replicas' is not the sum, but the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from dtk.compat import tf_replicas
from dtk.errors import at_rank
from dtk.nests import Gradients
from dtk.trainer.strategy import Strategy


def is_replaced(variable: keras.Variable) -> bool:
    """Return whether what an optimizer is given as a variable's gradient is its next value."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def replacements(
    grads: Gradients, variables: Sequence[keras.Variable], strategy: Strategy
) -> dict[int, tf.Tensor]:
    """Compute what is to replace variables: the largest over the replicas.

    Each replica knows of its own rows. Keras takes the largest, too, over the steps of an
    accumulation window.
    """
    mine = {
        i: grads[i]
        for i, v in enumerate(variables)
        if getattr(v, "overwrite_with_gradient", False) and grads[i] is not None
    }
    # Replicas that take local steps send nothing, and average their weights later.
    local_steps = strategy.exchange is not None and strategy.exchange.local
    if mine and not local_steps and in_replica(strategy):
        given = tf_replicas.if_present(list(mine.values()))
        largest = strategy.extended.reduce_over_replicas(given, "max")
        mine = dict(zip(mine, largest, strict=True))
    return mine


def without(replacing: Mapping[int, tf.Tensor], grads: Gradients) -> Gradients:
    """Leave out the gradients of variables that are replaced."""
    return [None if i in replacing else g for i, g in enumerate(grads)] if replacing else grads


def merged(replacing: Mapping[int, tf.Tensor], grads: Gradients) -> Gradients:
    """Put replacements in the places of gradients."""
    return [replacing.get(i, g) for i, g in enumerate(grads)] if replacing else grads


def refuse(variables: Sequence[keras.Variable], strategy: Strategy) -> None:
    """Refuse variables that are replaced, where workers send gradients to servers."""
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


def in_replica(strategy: Strategy) -> bool:
    """Return whether this thread is in a replica context of a strategy."""
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.strategy is strategy
