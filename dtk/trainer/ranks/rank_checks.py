"""Comparisons between ranks: of arguments, data, callbacks, seeds and variables.

Before `fit` ranks compare what they were given, before the first step the first batch, and later
all batches read so far. If they differ, every rank raises an error that names the difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.cluster import progress
from dtk.communicators.base import Communicator
from dtk.compat import keras_models, keras_variables, tf_datasets, tf_replicas
from dtk.errors import DisagreementError, at_rank
from dtk.input import digests, slicing
from dtk.nests import Array
from dtk.pipelines import operations
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import settings
from dtk.trainer.strategy import Strategy

SAME_SCRIPT = "start the same script with the same arguments everywhere"


_SAME_ARRAYS = (
    "every rank must be given the same global data in the same order, of which dtk takes this "
    "rank's rows (for a part per rank use dtk.data.shard). If they are drawn, shuffled or split at "
    "random, call keras.utils.set_random_seed(7) first, at the top of the script"
)
_SAME_DATA = (
    f"{_SAME_ARRAYS}. In a pipeline: no shard(size, rank), no generator that differs by rank, no "
    "map or interleave with deterministic=False. A function of Python in a map draws in the order "
    "of threads unless num_parallel_calls is left out; so does tf.map_fn, without "
    "parallel_iterations=1. A dataset that shuffles and was read before goes on in the order that "
    "each rank's read-ahead came to: make it anew for each fit, on all ranks"
)
# Of ranks that bring data of their own.
_SAME_STEPS = (
    "every rank must take as many steps, with whatever data: give fit the same epochs and "
    "steps_per_epoch everywhere"
)

# Keras's callbacks that save a model's optimizer, which all ranks gather where each has a part.
SAVERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)

_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")

# What a rank compares with other ranks: pairs of a description and a value.
Facts: TypeAlias = Sequence[tuple[str, object]]
_Told = TypeVar("_Told")


def compare(mine: Facts, communicator: Communicator, cure: str = SAME_SCRIPT) -> None:
    """Compare lists of (what, value) over all ranks; raise where they differ, naming the first."""
    rank = communicator.rank
    for other, theirs in enumerate(told_by_all(mine, communicator) or ()):
        for (what, value), (_, other_value) in zip(mine, theirs, strict=False):
            if value != other_value:
                message = (
                    f"ranks disagree on the {what}: rank {rank} has {value!r}, rank {other} has "
                    f"{other_value!r}; {cure}"
                )
                raise DisagreementError(at_rank(rank, message))


def told_by_all(value: _Told, communicator: Communicator) -> list[_Told] | None:
    """Gather a value of each rank; None if all have the same, by its hash, which is sent first."""
    digest = hashlib.blake2b(pickle.dumps(value), digest_size=8).digest()
    numbers = numbers_of_all([int.from_bytes(digest, "big", signed=True)], communicator)
    return None if len({*numbers[:, 0]}) == 1 else communicator.allgather_object(value)


def numbers_of_all(numbers: Sequence[int], communicator: Communicator) -> Array:
    """Gather numbers of all ranks by one small message (objects take two larger ones)."""
    row = tf.constant([numbers], tf.int64)
    return communicator.allgather(row, [1] * communicator.size).numpy()


# What fit, evaluate and predict are given.


def check_same_call(
    strategy: Strategy,
    data: Mapping[str, object],
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> bool:
    """Compare data and callbacks that communicate, before anything else communicates.

    Returns whether a callback of any rank may stop training in the middle of an epoch.
    """
    communicator = strategy.world
    if communicator.size == 1:
        return False
    savers = SAVERS if strategy.shard_optimizer else ()
    ours = [
        type(c).__name__
        for c in callbacks
        if type(c).__module__.startswith("dtk.") or isinstance(c, savers)
    ]
    what = "callbacks of dtk and those that save" if savers else "callbacks of dtk"
    cure = "give every rank the same callbacks; dtk protects their files from each other"
    compare([(f"{what}, which communicate", ours)], communicator, cure)
    is_pipeline = any(isinstance(value, tf.data.Dataset) for value in data.values())
    described = [(what, describe(value)) for what, value in data.items()]
    compare(described, communicator, _SAME_DATA if is_pipeline else _SAME_ARRAYS)
    caches = [name for value in data.values() for name in _unshared_caches(value)]
    numbers = [len(caches), sum(map(_stops_in_epoch, callbacks))]
    gathered = numbers_of_all(numbers, communicator)
    if gathered[:, 0].any():
        _check_caches(caches, communicator)
    return bool(gathered[:, 1].any())


def _unshared_caches(data: object) -> list[str]:
    """Return the files of a pipeline's caches that one process alone may use."""
    if not isinstance(data, tf.data.Dataset | tf_datasets.PerRankDataset):
        return []
    names = operations.cache_files(tf_datasets.read_alone(data))
    if tf_datasets.is_of_this_rank(data):
        return names
    return [name for name in names if not tf.io.gfile.exists(f"{name}.index")]  # yet to be written


def _check_caches(mine: Sequence[str], communicator: Communicator) -> None:
    """Raise on every rank where two of one host cache their rows in the same file."""
    users: dict[tuple[str, str], int] = {}
    for rank, names in enumerate(communicator.allgather_object(mine)):
        for name in names:
            other = users.setdefault((communicator.hosts[rank], name), rank)
            if other != rank:
                message = (
                    f"ranks {other} and {rank} of one host both cache their data in {name!r}, and "
                    "TensorFlow lets one process write a file; give each rank its own: "
                    '.cache(f"{path}.{strategy.rank}")'
                )
                raise ValueError(at_rank(communicator.rank, message))


def _stops_in_epoch(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback may stop training after a batch: a script's does what it likes.

    Of Keras's own only TerminateOnNaN stops, and functions that a script has put into a callback.
    """
    plain, kind = keras.callbacks.Callback, type(callback)
    hooks = {name: getattr(callback, name, None) for name in _BATCH_HOOKS}
    looks = any(
        hook is not None and getattr(hook, "__func__", hook) is not getattr(plain, name)
        for name, hook in hooks.items()
    )
    own = kind.__module__.startswith("dtk.") or (
        keras_models.is_from_keras(kind) and kind is not keras.callbacks.TerminateOnNaN
    )
    return looks and (not own or any(name in vars(callback) for name in _BATCH_HOOKS))


def describe(data: object) -> str | None:
    """Describe data in a few words that must be the same on every rank.

    The words for arrays hold a hash of all their shapes and bytes.

    Example:
        >>> describe(None), describe(np.zeros((3, 2)))[:14]
        (None, '3 rows (hash o')
    """
    if tf_datasets.is_of_this_rank(data):
        return "a dataset of this rank's own batches"
    if isinstance(data, tf.data.Dataset):
        batches = int(data.cardinality())
        return f"a dataset of {batches} batches" if batches >= 0 else None
    leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, np.ndarray | tf.Tensor)]
    if not leaves or not leaves[0].shape:
        return None
    hashes = [(leaf.shape, digests.hash_of(np.asarray(leaf))) for leaf in leaves]
    digest = hashlib.blake2b(repr(hashes).encode(), digest_size=4).hexdigest()
    return f"{leaves[0].shape[0]} rows (hash of all bytes: {digest})"


def check_same_batch(strategy: Strategy, batch: slicing.Slices) -> None:
    """Raise on every rank when ranks have read different first batches."""
    communicator = strategy.world
    if communicator.size == 1 or not slicing.is_known(batch.digest):
        return
    rows, digest = int(batch.rows), int(batch.digest)
    mine = [("first batch of the data", f"{rows} rows (hash {digest & 0xFFFFFFFF:08x})")]
    compare(mine, communicator, _SAME_DATA)


def check_same_digest(strategy: Strategy, digest: int, when: str) -> None:
    """Raise on every rank when the digests of all batches read so far differ."""
    everywhere = told_by_all(digest, strategy.world)
    if everywhere is not None:
        others = [rank for rank, one in enumerate(everywhere) if one != everywhere[0]]
        message = (
            f"{when}, ranks have read different batches: those of ranks {others} are not "
            f"rank 0's; {_SAME_DATA}"
        )
        raise DisagreementError(at_rank(strategy.rank, message))


@contextlib.contextmanager
def comparing_batches(strategy: Strategy) -> Iterator[None]:
    """Return a context in which ranks compare what they read: the first batch, at the end all."""
    batches, total = 0, tf.constant(0, tf.int64)

    def read(digest: tf.Tensor) -> None:
        nonlocal batches, total
        batches, total = batches + 1, digests.add(total, digest)
        if batches == 1:
            check_same_digest(strategy, int(digest), "at the first batch")

    with strategy.extended.observing_batches(read):
        yield
    progress.end_of_data()
    if batches:
        check_same_digest(strategy, int(total), "at the end of the data")


def comparer(strategy: Strategy) -> Callable[[tf.Tensor], None]:
    """Return what takes the digests of a loop's batches: ranks compare after 1, 2, 4, 8, ..."""
    batches, total = 0, tf.constant(0, tf.int64)

    def read(digest: tf.Tensor) -> None:
        nonlocal batches, total
        if tf_replicas.computes_as_one_replica():  # this rank reads without the others
            return
        batches, total = batches + 1, digests.add(total, digest)
        if batches & (batches - 1) == 0:
            check_same_digest(strategy, int(total), f"at batch {batches} of a distributed dataset")

    return read


def check_same_run(trainer: ModelState, params: Mapping[str, object]) -> None:
    """Raise on every rank when ranks differ in variables or steps, naming the first difference."""
    mine = [
        ("initial epoch", params.get("initial_epoch")),
        ("epochs", params.get("epochs")),
        ("steps per epoch", params.get("steps")),
    ]
    if trainer.same_data:
        mine += [("random seed (every rank must shuffle alike)", tf_replicas.global_seed())]
    shapes, strategy = shapes_of(trainer, trainer.shared_variables()), trainer.strategy
    if strategy.model_communicator.size == 1:
        compare([*mine, *shapes], strategy.world, SAME_SCRIPT if trainer.same_data else _SAME_STEPS)
    else:
        compare(mine, strategy.world)
        compare(shapes, strategy.communicator)  # ranks of one model may hold different variables
    compare(settings.settings_of(trainer.model), strategy.communicator, settings.SAME_SETTINGS)


def shapes_of(trainer: ModelState, variables: Sequence[keras.Variable]) -> list[tuple[str, object]]:
    """Return the number of variables and the shape and kind of each, to compare."""
    of_model = f"of model {trainer.model.name!r}"
    # Only the last word of a path, such as "kernel" or "momentum": the rest depends on how many
    # layers of a kind a process has made, which may differ.
    pairs: list[tuple[str, object]] = [(f"number of variables {of_model}", len(variables))]
    for i, v in enumerate(variables):
        last_word = v.path.rpartition("/")[2].rpartition("_")[2]
        what = f"{last_word} {keras_variables.whole_shape(v)} {v.dtype}"
        pairs.append((f"variable {i} {of_model}", what))
    return pairs
