"""A global batch that changes between the epochs of one `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dtk.callbacks.base import StrategyCallback
from dtk.strategies import fitting

Schedule = Sequence[int | tuple[int, int]]


def parse_schedule(schedule: Schedule) -> list[int]:
    """One global batch size per epoch, from sizes and `(count, size)` pairs; the last persists.

    Args:
        schedule: Each item is the size of one epoch, or `(count, size)` for `count` epochs.

    Raises:
        ValueError: It is empty, or an item is not positive integers.

    Example:
        >>> parse_schedule([64, (2, 128), 256])
        [64, 128, 128, 256]
    """
    return expand(schedule, "batch size", "size", "an integer of at least 1", _positive)


def expand(
    schedule: Any, what: str, value: str, demand: str, is_valid: Callable[[object], bool]
) -> list:
    """One value per epoch, from values and `(count, value)` pairs.

    Args:
        schedule: What the user gave.
        what: What it is a schedule of, for messages.
        value: What one item of it is called.
        demand: What a value must be.
        is_valid: Whether it is.

    Raises:
        ValueError: It is empty, not a list, or holds something else.

    Example:
        >>> expand([0.5, (2, 0.1)], "learning rate", "rate", "above 0", lambda rate: rate > 0)
        [0.5, 0.1, 0.1]
    """
    if isinstance(schedule, str | bytes) or not isinstance(schedule, Sequence):
        raise ValueError(
            f"a {what} schedule is a list of {value}s or (count, {value}), got {schedule!r}"
        )
    values: list = []
    for item in schedule:
        count, one = item if isinstance(item, list | tuple) and len(item) == 2 else (1, item)
        if not _positive(count) or not is_valid(one):
            raise ValueError(
                f"a {what} schedule holds {value}s or (count, {value}), a {value} being {demand} "
                f"and a count an integer of at least 1, got {item!r}"
            )
        values += [one] * count
    if not values:
        raise ValueError(f"a {what} schedule needs at least one {value}, got none")
    return values


def size_at(sizes: Sequence[int], epoch: int) -> int:
    """Batch size of an epoch; the last one persists.

    Example:
        >>> [size_at([64, 128], epoch) for epoch in range(4)]
        [64, 128, 128, 128]
    """
    return sizes[min(epoch, len(sizes) - 1)]


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_sizes(sizes: Iterable[int], adoption: Any) -> None:
    """Whether `fit` can read its data in batches of all these sizes.

    Raises:
        ValueError: A size is smaller than the number of workers, or the data cannot be cut anew.
    """
    for size in sorted(set(sizes)):
        fitting.check_batch_size(size, adoption.strategy)
    adoption.feed.check_rebatch()


class BatchSizeSchedule(StrategyCallback):
    """Change the global batch size between epochs, within one `fit`.

    "Don't decay the learning rate, increase the batch size" (Smith et al. 2018): where a schedule
    would divide the rate by a, multiply the batch by a. Sizes belong to epochs, not to how often
    `fit` was started: with `initial_epoch` or a resumed checkpoint, epoch 7 has epoch 7's size.

    Arrays are cut anew in the order Keras would have shuffled them. A `tf.data.Dataset` of batches
    is rebatched behind the script's own pipeline; as its rows cannot be counted beforehand, the
    progress bar shows no total in the first epoch of a new size. With `steps_per_epoch` the number
    of steps stays as given, and a new size begins the data from its start.

    Args:
        schedule: A list of sizes, one per epoch, or `(count, size)` pairs; the last persists. It
            overrides `fit`'s `batch_size`.

    Raises:
        ValueError: The schedule is malformed; at train begin, when a size is smaller than the
            number of workers or the data is a generator, a PyDataset or a pipeline per rank.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), epochs=3, verbose=0, callbacks=[
        ...     dtk.callbacks.BatchSizeSchedule([(2, 16), 32])])
        >>> int(model.optimizer.iterations)      # 4 + 4 + 2
        10
    """

    sets = ("batch size",)

    def __init__(self, schedule: Schedule):
        super().__init__()
        self.sizes = parse_schedule(schedule)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Check every size, and that the data can be cut anew, before the first epoch."""
        check_sizes(self.sizes, self.adoption)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Cut this epoch's batches."""
        self.adoption.feed.rebatch(size_at(self.sizes, epoch))
