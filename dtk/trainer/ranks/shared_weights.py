"""Weights that all ranks hold: compared bit for bit, sent from one rank, or averaged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat import keras_shards
from dtk.errors import DisagreementError, at_rank
from dtk.trainer.contract import Strategy, Trainer
from dtk.trainer.ranks.rank_checks import _shapes, compare, number_of, numbers_of_all, same_number
from dtk.trainer.ranks.seeds import spread_seeds

_SAME_UPDATES = (
    "every rank must change weights in the same way: through an optimizer that is an attribute of "
    "the model, and with the same callbacks on every rank"
)


# Weights.


def fingerprint(value: tf.Tensor | tf.Variable) -> str:
    """Compute a short hash of a tensor's bytes.

    Args:
        value: A tensor or variable.

    Returns:
        16 hexadecimal digits.
    """
    array = np.ascontiguousarray(keras.ops.convert_to_tensor(value).numpy())
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=8).hexdigest()


def differing(variables: Sequence[keras.Variable], strategy: Strategy) -> list[int]:
    """Find the variables that are not bit-identical wherever they should be.

    That is on all ranks; for a part of a variable on the ranks that hold the same part.

    Args:
        variables: Keras variables, in the same order on all ranks.
        strategy: Their strategy.

    Returns:
        Their indices, equal on all ranks.
    """
    world = strategy.world
    mine = [{fingerprint(copy) for copy in strategy.copies(v)} for v in variables]
    agreed = all(len(prints) == 1 for prints in mine)
    parts = [keras_shards.shard_of(v) is not None for v in variables]
    of_all = [p for p, is_part in zip(mine, parts, strict=True) if not is_part]
    of_part = [p for p, is_part in zip(mine, parts, strict=True) if is_part]
    numbers = [number_of(of_all), number_of(of_part)] if agreed else [world.rank] * 2
    gathered = numbers_of_all(numbers, world)
    groups = strategy.model_communicator.size
    same_parts = all(same_number(gathered[place::groups, 1:]) for place in range(groups))
    if agreed and same_number(gathered) and same_parts:
        return []
    columns = zip(*world.allgather_object(mine), strict=True)
    return [
        index
        for index, (column, is_part) in enumerate(zip(columns, parts, strict=True))
        if any(len(set.union(*group)) > 1 for group in _groups(column, groups if is_part else 1))
    ]


def _groups(column: Sequence[set[str]], groups: int) -> list[Sequence[set[str]]]:
    """Divide what all ranks hold into what should be equal."""
    return [column[place::groups] for place in range(groups)]


def check_same_weights(trainer: Trainer, when: str) -> None:
    """Raise on every rank when replicas hold different weights or optimizer state.

    Args:
        trainer: Of the model.
        when: Such as "after the first step".

    Raises:
        DisagreementError: Naming the variables.
    """
    variables = trainer.equal_variables()
    indices = differing(variables, trainer.strategy)
    if indices:
        first = variables[indices[0]].path
        raise DisagreementError(
            at_rank(
                trainer.strategy.rank,
                f"{when}, {len(indices)} of {len(variables)} variables of model "
                f"{trainer.model.name!r} differ between workers, the first is {first!r}; "
                f"{_SAME_UPDATES}",
            )
        )


def start_from(
    root: int, trainer: Trainer, variables: Sequence[keras.Variable] | None = None
) -> list[str]:
    """Give every rank `root`'s values of the variables that differ.

    Parts of variables come from the rank of `root`'s model that holds the same part.

    Args:
        root: The rank whose values count.
        trainer: Of the model.
        variables: Which; None is all weights and optimizer state.

    Returns:
        The paths of the variables that differed.
    """
    variables = trainer.shared_variables() if variables is None else variables
    strategy = trainer.strategy
    wanted = [variables[index] for index in differing(variables, strategy)]
    parts = [v for v in wanted if keras_shards.shard_of(v) is not None]
    _broadcast([v for v in wanted if keras_shards.shard_of(v) is None], root, strategy.world)
    _broadcast(parts, root // strategy.model_communicator.size, strategy.communicator)
    return [variable.path for variable in wanted]


def _broadcast(variables: Sequence[keras.Variable], root: int, communicator: Communicator) -> None:
    if not variables:
        return
    values = [keras.ops.convert_to_tensor(v) for v in variables]
    for variable, value in zip(variables, communicator.broadcast(values, root), strict=True):
        variable.assign(value)


def average(
    variables: Sequence[keras.Variable], share: tf.Tensor | None, strategy: Strategy
) -> None:
    """Average floating-point variables that differ over all ranks.

    Args:
        variables: Keras variables; those that are no floats stay as they are.
        share: Weight of this rank's in the mean, scalar; all ranks' add up to 1.
        strategy: Their strategy.
    """
    floats = [v for v in variables if keras.backend.is_float_dtype(v.dtype)]
    wanted = [floats[index] for index in differing(floats, strategy)]
    values = [keras.ops.convert_to_tensor(v) * tf.cast(share, v.dtype) for v in wanted]
    for variable, mean in zip(wanted, strategy.communicator.allreduce(values), strict=True):
        variable.assign(mean)


def start_from_epoch_of_rank_0(trainer: Trainer) -> None:
    """Set the epoch to start at to that of rank 0.

    Args:
        trainer: The model's trainer.
    """
    epoch = trainer.initial_epoch()
    number = tf.constant(-1 if epoch is None else epoch, tf.int64)
    gathered = int(trainer.strategy.world.broadcast(number))
    trainer.set_initial_epoch(None if gathered < 0 else gathered)


def agree_on_weights(trainer: Trainer) -> None:
    """Start from rank 0's weights, as `fit` does when it begins, for steps taken without it.

    Args:
        trainer: The model's trainer.

    Raises:
        DisagreementError: Ranks have different variables.
    """
    if trainer.strategy.world.size > 1:
        compare(_shapes(trainer), trainer.strategy.world)
        start_from(0, trainer, trainer.agreed_variables())
    spread_seeds(trainer)
