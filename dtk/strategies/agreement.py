"""What ranks must agree on, and how they find out that they do not.

Before `fit` the ranks compare what they were given; before the first step they start from rank 0's
weights; after it and after every epoch they compare every weight, bit for bit, so that ranks that
train apart are stopped by the name of the first variable that differs.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtk.errors import DisagreementError, at_rank
from dtk.strategies import extended, reading
from dtk.strategies.choosing import Choosing

# Spreads rank-specific seeds over the 31 bits a seed may use (2^32 / golden ratio).
_SEED_STEP = 0x9E3779B1

_SAME_SCRIPT = "start the same script with the same arguments everywhere"
_SAME_DATA = (
    "every rank must be given the same global data in the same order, of which dtk takes this "
    "rank's rows: no shard(size, rank), no generator or shuffling that differs by rank; for a part "
    "per rank use dtk.data.shard"
)
_SAME_UPDATES = (
    "every rank must change weights in the same way: through an optimizer that is an attribute of "
    "the model, and with the same callbacks on every rank"
)


def raise_first_difference(
    mine: Sequence, theirs: Sequence, rank: int, other: int, cure: str = _SAME_SCRIPT
) -> None:
    """Compare two lists of (what, value).

    Raises:
        DisagreementError: At the first pair that differs.
    """
    for (what, value), (_, other_value) in zip(mine, theirs, strict=False):
        if value != other_value:
            raise DisagreementError(
                at_rank(
                    rank,
                    f"ranks disagree on the {what}: rank {rank} has {value!r}, rank {other} has "
                    f"{other_value!r}; {cure}",
                )
            )


def compare(mine: Sequence, communicator: Any, cure: str = _SAME_SCRIPT) -> None:
    """Raise on every rank where one rank's list of (what, value) differs from another's."""
    if _same_number(_numbers_of_all([_number_of(mine)], communicator)):
        return
    for rank, theirs in enumerate(communicator.allgather_object(mine)):
        raise_first_difference(mine, theirs, communicator.rank, rank, cure)


def _numbers_of_all(numbers: Sequence[int], communicator: Any) -> np.ndarray:
    """What every rank says, a row for each: one small message, where objects take two larger."""
    row = tf.constant([numbers], tf.int64)
    return communicator.allgather(row, [1] * communicator.size).numpy()


def _same_number(told: np.ndarray) -> bool:
    """Whether all ranks say the same number first. They hardly ever do not."""
    return len(set(told[:, 0])) == 1


def _number_of(value: Any) -> int:
    """A hash, of 63 bits and more than any rank."""
    digest = hashlib.blake2b(pickle.dumps(value), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 | 1 << 62


# What fit, evaluate and predict are given.


def check_same_call(strategy: Any, data: dict, callbacks: Sequence = ()) -> bool:
    """Compare data and dtk's own callbacks over all ranks, before anything else communicates.

    Args:
        strategy: The strategy.
        data: What to the data.
        callbacks: `fit`'s callbacks.

    Returns:
        Whether on some rank a callback of the script's own looks at single batches, and so may want
        to stop in the middle of an epoch.

    Raises:
        DisagreementError: With both ranks' values.
    """
    communicator = strategy.communicator
    if communicator.size == 1:
        return False
    ours = [type(c).__name__ for c in callbacks if type(c).__module__.startswith("dtk.")]
    mine = [(what, describe(value)) for what, value in data.items()]
    looks = any(map(_looks_at_batches, callbacks))
    told = _numbers_of_all([_number_of((ours, mine)), looks], communicator)
    if _same_number(told):
        return bool(told[:, 1].any())
    for rank, (their_callbacks, theirs) in enumerate(communicator.allgather_object((ours, mine))):
        raise_first_difference(
            [("callbacks of dtk, which communicate", ours)],
            [("", their_callbacks)],
            communicator.rank,
            rank,
            "give every rank the same ones; those that write or print do so on rank 0 alone",
        )
        raise_first_difference(mine, theirs, communicator.rank, rank, _SAME_DATA)
    return bool(told[:, 1].any())


def _looks_at_batches(callback: Any) -> bool:
    known = type(callback).__module__.startswith(("keras.src.callbacks.", "dtk."))
    if known and not isinstance(callback, keras.callbacks.LambdaCallback):
        return isinstance(callback, keras.callbacks.TerminateOnNaN)
    plain = keras.callbacks.Callback
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(plain, name)
        for name in ("on_train_batch_begin", "on_train_batch_end", "on_batch_end", "on_batch_begin")
    )


def describe(data: Any) -> str | None:
    """Data in a few words that must be the same on every rank; None where that cannot be told.

    Arrays are told apart by their shapes and a hash of all their bytes.

    Example:
        >>> describe(None), describe(np.zeros((3, 2)))[:14]
        (None, '3 rows (hash o')
    """
    if isinstance(data, tf.data.Dataset):
        batches = int(data.cardinality())
        return f"a dataset of {batches} batches" if batches >= 0 else None
    leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, np.ndarray | tf.Tensor)]
    if not leaves or not leaves[0].shape:
        return None
    hashes = [(leaf.shape, reading.hash_of(np.asarray(leaf))) for leaf in leaves]
    digest = hashlib.blake2b(repr(hashes).encode(), digest_size=4).hexdigest()
    return f"{leaves[0].shape[0]} rows (hash of all bytes: {digest})"


def check_same_batch(strategy: Any, batch: Any) -> None:
    """Raise on every rank when ranks have read different first batches.

    Args:
        strategy: The strategy.
        batch: This process's `Slices` of it.

    Raises:
        DisagreementError: With what the ranks have read.
    """
    communicator = strategy.communicator
    if communicator.size == 1 or isinstance(batch.digest, tuple):
        return
    rows, digest = int(batch.rows), int(batch.digest)
    mine = [("first batch of the data", f"{rows} rows (hash {digest & 0xFFFFFFFF:08x})")]
    compare(mine, communicator, _SAME_DATA)


def check_same_digest(strategy: Any, digest: int, when: str) -> None:
    """Raise on every rank when the digests of all batches read so far differ.

    Raises:
        DisagreementError: They do.
    """
    communicator = strategy.communicator
    told = _numbers_of_all([digest], communicator)
    if not _same_number(told):
        others = [rank for rank, number in enumerate(told[:, 0]) if number != told[0, 0]]
        raise DisagreementError(
            at_rank(
                communicator.rank,
                f"{when}, ranks have read different batches: those of ranks {others} are not "
                f"rank 0's; {_SAME_DATA}",
            )
        )


class ReadingCheck:
    """Compares the batches that ranks read: the first one at once, all of them at the end.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._digest = tf.constant(0, tf.int64)
        self._batches = 0

    def read(self, digest: tf.Tensor) -> None:
        """Told of each batch."""
        self._batches += 1
        self._digest = reading.add(self._digest, digest)
        if self._batches == 1:
            check_same_digest(self._strategy, int(digest), "at the first batch")

    def end(self) -> None:
        """Told when all were read."""
        if self._batches:
            check_same_digest(self._strategy, int(self._digest), "at the end of the data")


def check_same_run(adoption: Any, params: dict) -> None:
    """Raise on every rank when ranks differ in variables or steps, naming the first difference.

    Raises:
        DisagreementError: With both ranks' values.
    """
    mine = [
        ("epochs", params.get("epochs")),
        ("steps per epoch", params.get("steps")),
        ("random seed (every rank must shuffle alike)", extended.global_seed()),
        *_shapes(adoption),
    ]
    compare(mine, adoption.strategy.communicator)


def _shapes(adoption: Any) -> list:
    # The last word of a variable's path, such as "kernel" or "momentum": what stands before depends
    # on how many layers of its kind a process has made, which may differ.
    variables = adoption.shared_variables()
    return [
        ("number of variables", len(variables)),
        *(
            (f"variable {index}", f"{_last_word(v.path)} {tuple(v.shape)} {v.dtype}")
            for index, v in enumerate(variables)
        ),
    ]


def _last_word(path: str) -> str:
    return path.rpartition("/")[2].rpartition("_")[2]


# Weights.


def fingerprint(value: Any) -> str:
    """A short hash of a tensor's bytes."""
    array = np.ascontiguousarray(keras.ops.convert_to_tensor(value).numpy())
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=8).hexdigest()


def differing(variables: Sequence, strategy: Any) -> list[int]:
    """Indices of the Keras variables that are not bit-identical on all replicas."""
    communicator = strategy.communicator
    mine = [{fingerprint(copy) for copy in strategy.copies(v)} for v in variables]
    agreed = all(len(prints) == 1 for prints in mine)
    told = _numbers_of_all([_number_of(mine) if agreed else communicator.rank], communicator)
    if agreed and _same_number(told):
        return []
    columns = zip(*communicator.allgather_object(mine), strict=True)
    return [index for index, column in enumerate(columns) if len(set.union(*column)) > 1]


def check_same_weights(adoption: Any, when: str) -> None:
    """Raise on every rank when replicas hold different weights or optimizer state.

    Args:
        adoption: The model's adoption.
        when: Such as "after the first step".

    Raises:
        DisagreementError: Naming the variables.
    """
    variables = adoption.equal_variables()
    apart = differing(variables, adoption.strategy)
    if apart:
        first = variables[apart[0]].path
        raise DisagreementError(
            at_rank(
                adoption.strategy.rank,
                f"{when}, {len(apart)} of {len(variables)} variables of model "
                f"{adoption.model.name!r} differ between workers, the first is {first!r}; "
                f"{_SAME_UPDATES}",
            )
        )


def start_from(root: int, adoption: Any, variables: Sequence | None = None) -> list[str]:
    """Give every rank `root`'s values of the variables that differ.

    Args:
        root: Whose values count.
        adoption: The model's adoption.
        variables: Which; None is all weights and optimizer state.

    Returns:
        The paths of the variables that differed.
    """
    variables = adoption.shared_variables() if variables is None else variables
    wanted = [variables[index] for index in differing(variables, adoption.strategy)]
    if wanted:
        values = adoption.strategy.communicator.broadcast(
            [keras.ops.convert_to_tensor(v) for v in wanted], root
        )
        for variable, value in zip(wanted, values, strict=True):
            variable.assign(value)
    return [variable.path for variable in wanted]


def average(variables: Sequence, share: Any, strategy: Any) -> None:
    """Give every rank the mean of what the ranks hold of the floating-point ones that differ.

    Args:
        variables: Keras variables.
        share: What this rank's count in the mean; all ranks' add up to 1.
        strategy: The strategy.
    """
    floats = [v for v in variables if keras.backend.is_float_dtype(v.dtype)]
    wanted = [floats[index] for index in differing(floats, strategy)]
    values = [keras.ops.convert_to_tensor(v) * tf.cast(share, v.dtype) for v in wanted]
    for variable, mean in zip(wanted, strategy.communicator.allreduce(values), strict=True):
        variable.assign(mean)


def _start_from_epoch_of_rank_0(adoption: Any) -> None:
    epoch = adoption.initial_epoch()
    number = tf.constant(-1 if epoch is None else epoch, tf.int64)
    told = int(adoption.strategy.communicator.broadcast(number))
    adoption.set_initial_epoch(None if told < 0 else told)


def agree_on_weights(adoption: Any) -> None:
    """What `fit` does when it begins, for steps taken without it."""
    if adoption.strategy.communicator.size > 1:
        compare(_shapes(adoption), adoption.strategy.communicator)
        start_from(0, adoption, adoption.agreed_variables())
    spread_seeds(adoption)


# Seeds.


def spread_seeds(adoption: Any) -> None:
    """Give every replica random masks of its own, reproducibly: seeds derive from rank 0's."""
    strategy = adoption.strategy
    for state in adoption.seed_states():
        base = keras.ops.convert_to_tensor(state).numpy()
        base = strategy.communicator.broadcast_object(base)
        strategy.set_per_replica(state, [fold_seed(base, rank) for rank in strategy.local_ranks()])


def fold_seed(state: np.ndarray, rank: int) -> np.ndarray:
    """Seed state of one rank, derived from rank 0's; rank 0 keeps its own.

    Args:
        state: Rank 0's state, shape `[2]`: seed and counter.
        rank: Whose state is wanted.
    """
    return np.array([spread_seed(int(state[0]), rank), int(state[1])], state.dtype)


def spread_seed(seed: int, rank: int) -> int:
    """One seed per rank: rank 0 keeps the given one."""
    return (seed + rank * _SEED_STEP) % 2**31 if rank else seed


# The callback.


def tell(callbacks: Sequence, event: str, *args: Any) -> None:
    """Call `event` on the callbacks that define it."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*args)


class Meeting(keras.callbacks.Callback):
    """Runs before the user's callbacks: what they see at the end of an epoch is the world's."""

    def __init__(self, adoption: Any):
        super().__init__()
        self.adoption = adoption

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Close blocks of replicas that train apart, and average numbers that no metric counts."""
        if not self.adoption.trains_apart:
            return
        self.adoption.meet()
        logs = {} if logs is None else logs
        told = self.adoption.strategy.communicator.allgather_object(logs)
        for name in logs:
            values = [one[name] for one in told]
            if isinstance(values[0], float) and len(set(values)) > 1:
                logs[name] = sum(values) / len(values)


class Agreement(keras.callbacks.Callback):
    """Runs after the user's callbacks, so that what one of them decided on one rank holds on all.

    Callbacks that must act on what all others have done, such as one that saves their state, define

        on_train_agreed(logs)           every on_train_begin has run and the ranks start equal
        on_epoch_agreed(epoch, logs)    every on_epoch_end has run and the ranks agree on stopping
        on_end_agreed(logs)             every on_train_end has run: training ended without exception
        on_fit_left()                   `fit` is over, or was left by an exception

    Args:
        adoption: The model's adoption.
        every_batch: Whether to agree on stopping after every batch; else after every epoch.
    """

    def __init__(self, adoption: Any, every_batch: bool = False):
        super().__init__()
        self.adoption = adoption
        self._every_batch = every_batch
        self._stepped = False
        self._steps = 0
        self._choosing = Choosing(adoption)

    @property
    def _alone(self) -> bool:
        return self.adoption.strategy.communicator.size == 1

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Compare, then start from rank 0's weights, optimizer state and epoch."""
        adoption = self.adoption
        if not self._alone:
            check_same_run(adoption, self.params)
            start_from(0, adoption, adoption.agreed_variables())
            _start_from_epoch_of_rank_0(adoption)
        spread_seeds(adoption)
        tell(adoption.callbacks.callbacks, "on_train_agreed", logs)
        self._choosing.begin()
        self._stepped = False
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Shuffle anew, alike on every rank."""
        self.adoption.feed.tell_learned_steps()
        self.adoption.new_epoch(epoch)
        self.adoption.feed.shuffle(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """The last callback to hear of it, so none of the others' is timed."""
        self._choosing.begin_step(batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """After the first step, make sure that it was the same step everywhere."""
        self._choosing.end_step(batch, logs)
        if not self._stepped:
            self._stepped = True
            if not self.adoption.trains_apart:
                self._check("after the first step")
        self._steps += 1
        if self._steps & (self._steps - 1) == 0 and self._steps > 1:
            self.adoption.check_same_reading("train", f"after step {self._steps}")
        if self._every_batch and not self._alone:
            self._agree_on_stopping()
        if self.model.stop_training:
            self.adoption.settle()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stop everywhere when anyone wants to stop; go on from equal weights."""
        self.adoption.settle()
        self.adoption.check_same_reading("train", f"after epoch {epoch + 1}")
        self._check(f"after epoch {epoch + 1}")
        if not self._alone:
            self._agree_on_stopping()
        self._choosing.end_epoch()
        tell(self.adoption.callbacks.callbacks, "on_epoch_agreed", epoch, logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Nobody changes the weights any more."""
        tell(self.adoption.callbacks.callbacks, "on_end_agreed", logs)

    def _check(self, when: str) -> None:
        if self.adoption.strategy.num_replicas_in_sync > 1:
            check_same_weights(self.adoption, when)

    def _agree_on_stopping(self) -> None:
        # After every batch, where a callback looks at batches: one small number, not an object.
        wish = tf.constant(int(self.model.stop_training))
        self.model.stop_training = bool(self.adoption.strategy.communicator.allreduce(wish, "max"))
