"""Variables that an optimizer replaces by their gradient (`overwrite_with_gradient`).

Keras's float8 layers do this for their scales and for the largest values they have seen. Replicas
take the largest of these "gradients", not the sum.
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
    """Return whether an optimizer replaces a variable by its gradient."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def replacements(
    grads: Gradients, variables: Sequence[keras.Variable], strategy: Strategy
) -> dict[int, tf.Tensor]:
    """Compute the values that replace variables: the largest over the replicas.

    Each replica has seen its own rows only. Keras, too, takes the largest over the steps of an
    accumulation window.
    """
    mine = {
        i: grads[i]
        for i, v in enumerate(variables)
        if getattr(v, "overwrite_with_gradient", False) and grads[i] is not None
    }
    # Replicas with local steps send nothing here and average their weights later.
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
    """Refuse replaced variables where workers send gradients to servers."""
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
