"""The weights that ranks share, bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.compat import keras_variables
from dtk.compat.keras_variables import components
from dtk.errors import DisagreementError, at_rank
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import rank_checks
from dtk.trainer.strategy import Strategy

_SAME_UPDATES = (
    "every rank must change weights in the same way: through an optimizer that is an attribute of "
    "the model, and with the same callbacks on every rank"
)


# A tensor of so many elements is summed up on its own device: from an H100, weights came to the
# host at 11 GB/s, and are hashed there at 1 GB/s.
_LARGE = 1 << 18
_AT_ONCE = 1 << 22  # elements; sums of all at once would need many times the memory of a table
_WORDS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


def fingerprint(value: tf.Tensor | tf.Variable) -> str:
    """Compute a short hash of a tensor's bytes."""
    tensor = keras.ops.convert_to_tensor(value)
    if tensor.dtype.is_floating and tensor.shape.num_elements() >= _LARGE:
        tensor = _sums_of_bits(tensor)
    array = np.ascontiguousarray(tensor.numpy())
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=8).hexdigest()


def _sums_of_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Add up a tensor's numbers as integers, each times a square that tells its place."""
    sums = []
    with tf.device(tensor.device):
        flat = tf.reshape(tensor, [-1])
        for start in range(0, tensor.shape.num_elements(), _AT_ONCE):
            words = tf.bitcast(flat[start : start + _AT_ONCE], _WORDS[tensor.dtype.size])
            part = tf.cast(words, tf.int64)
            odd = 2 * tf.range(tf.size(part, tf.int64)) + 1
            sums.append(tf.reduce_sum(part * odd * odd))
        return tf.stack(sums)


class Differences(NamedTuple):
    """Variables that should be bit-identical between ranks and are not."""

    # their indices on this rank; the same on all ranks that hold the same variables
    mine: list[int]
    anywhere: bool  # whether any rank has such variables; the same on all ranks


def differing(variables: Sequence[keras.Variable], strategy: Strategy) -> Differences:
    """Find the variables that should be bit-identical between ranks and are not.

    They should be on all ranks; parts of a model, on the ranks that hold the same part.
    """
    world, places = strategy.world, strategy.model_communicator.size
    mine = [{fingerprint(copy) for copy in components(v.value)} for v in variables]
    shared = [i for i, v in enumerate(variables) if keras_variables.is_of_all(v)]
    own = [
        i
        for i, v in enumerate(variables)
        if not keras_variables.is_of_all(v) and keras_variables.flat_shard_of(v) is None
    ]
    prints = [mine[i] for i in shared], [mine[i] for i in own]
    everywhere = rank_checks.told_by_all(prints, world) or [prints] * world.size
    of_all = _differing([of_all for of_all, _ in everywhere])
    of_place = [
        _differing([of_part for _, of_part in everywhere[place::places]]) for place in range(places)
    ]
    indices = [shared[i] for i in of_all] + [own[i] for i in of_place[world.rank % places]]
    return Differences(sorted(indices), anywhere=bool(of_all) or any(of_place))


def _differing(prints: Sequence[Sequence[set[str]]]) -> list[int]:
    columns = enumerate(zip(*prints, strict=True))
    return [index for index, column in columns if len(set.union(*column)) > 1]


def check_same_weights(trainer: ModelState, when: str) -> None:
    """Raise on every rank when replicas hold different weights or optimizer state."""
    variables = trainer.equal_variables()
    differences = differing(variables, trainer.strategy)
    if differences.anywhere:
        first = repr(variables[differences.mine[0]].path) if differences.mine else "on other ranks"
        message = (
            f"{when}, {len(differences.mine)} of {len(variables)} variables of model "
            f"{trainer.model.name!r} differ between workers, the first is {first}; "
            f"{_SAME_UPDATES}"
        )
        raise DisagreementError(at_rank(trainer.strategy.rank, message))


def check_same_reads(trainer: ModelState, variables: Sequence[tf.Variable], when: str) -> None:
    """Raise on every rank when variables that steps only read hold other values on one of them."""
    ranks = trainer.strategy.communicator  # those of one stage of a pipeline
    named = {f"{i} {variable.name}": variable for i, variable in enumerate(variables)}
    prints = {name: fingerprint(variable) for name, variable in named.items()}
    everywhere = rank_checks.told_by_all(prints, ranks) or [prints]
    differing = [name for name in prints if len({one.get(name) for one in everywhere}) > 1]
    first = next((name for name in differing if all(name in one for one in everywhere)), None)
    if first is None:  # ranks read other variables, as where a sharded optimizer divides them
        return
    values = ranks.allgather_object(_shown(named[first]))
    message = (
        f"{when}, variable {named[first].name!r}, which steps of model {trainer.model.name!r} "
        f"read, differs between workers: {'; '.join(values)} on ranks 0 to {ranks.size - 1}. A "
        "callback that sets it must run on every rank, not on rank 0 alone"
    )
    raise DisagreementError(at_rank(trainer.strategy.rank, message))


def _shown(variable: tf.Variable) -> str:
    first = variable.numpy().ravel()[:3].tolist()
    return f"{', '.join(map(str, first))}{', ...' if variable.shape.num_elements() > 3 else ''}"


def start_from(
    root: int, trainer: ModelState, variables: Sequence[keras.Variable] | None = None
) -> list[str]:
    """Give every rank `root`'s values of the variables that differ.

    Parts of variables come from the rank of `root`'s model that holds the same part.
    """
    variables = trainer.shared_variables() if variables is None else variables
    strategy = trainer.strategy
    wanted = [variables[index] for index in differing(variables, strategy).mine]
    if strategy.shard_optimizer and any(v.path.endswith("/iteration") for v in wanted):
        raise DisagreementError(
            at_rank(
                strategy.rank,
                f"the optimizers of model {trainer.model.name!r} have taken different numbers of "
                "steps: with shard_optimizer=True each rank holds a part of an optimizer's state, "
                "so load it on every rank, or use dtk.callbacks.Checkpoint",
            )
        )
    parts = [v for v in wanted if not keras_variables.is_of_all(v)]
    _broadcast([v for v in wanted if keras_variables.is_of_all(v)], root, strategy.world)
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
    """Average floating-point variables that differ over all ranks."""
    floats = [v for v in variables if keras.backend.is_float_dtype(v.dtype)]
    wanted = [floats[index] for index in differing(floats, strategy).mine]
    values = [keras.ops.convert_to_tensor(v) * tf.cast(share, v.dtype) for v in wanted]
    for variable, mean in zip(wanted, strategy.communicator.allreduce(values), strict=True):
        variable.assign(mean)


def agree_on_weights(trainer: ModelState) -> None:
    """Start from rank 0's weights before steps outside `fit`, as `fit` does itself."""
    if trainer.strategy.world.size > 1:
        shapes = rank_checks.shapes_of(trainer, trainer.shared_variables())
        rank_checks.compare(shapes, trainer.strategy.communicator)
        start_from(0, trainer, trainer.agreed_variables())


# Windows of gradient accumulation. In an epoch each replica adds to its own part. Between epochs
# each holds the whole, as files do: whichever rank saves then, it saves what one process would.


def join_windows(trainer: ModelState) -> None:
    """Give every replica the sums of all replicas. All ranks call it together."""
    strategy = trainer.strategy
    for exchange, variables in shared_optimizer.windows_of(trainer.model):
        if exchange.divided and exchange.in_window:
            sums = [tf.add_n(copies_of(v, strategy)) for v in variables]
            totals = strategy.communicator.allreduce(sums)
            for variable, total in zip(variables, totals, strict=True):
                strategy.set_per_replica(variable, [total for _ in strategy.local_ranks()])
            exchange.divided = False


def divide_windows(trainer: ModelState) -> None:
    """Let rank 0 go on with the whole and the others with zeros, before steps."""
    strategy = trainer.strategy
    for exchange, variables in shared_optimizer.windows_of(trainer.model):
        for variable in () if exchange.divided else variables:
            strategy.set_sum(variable, copies_of(variable, strategy)[0])
        exchange.divided = True


@contextlib.contextmanager
def whole_windows(trainer: ModelState) -> Iterator[None]:
    """Return a context in which replicas hold the whole, wherever training is, to be saved.

    All ranks enter it together.
    """
    divided = any(exchange.divided for exchange, _ in shared_optimizer.windows_of(trainer.model))
    join_windows(trainer)
    try:
        yield
    finally:
        if divided:
            divide_windows(trainer)


def copies_of(variable: keras.Variable, strategy: Strategy) -> list[tf.Tensor]:
    """Return what this process's replicas hold of a variable."""
    return [tf.convert_to_tensor(v) for v in strategy.experimental_local_results(variable.value)]
