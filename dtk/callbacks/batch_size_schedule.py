"""A global batch size that changes between the epochs of one `fit`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dtk.callbacks.base import StrategyCallback
from dtk.nests import Logs
from dtk.schedules.runs import is_count, parse_runs
from dtk.trainer.distributed_trainer import DistributedTrainer

Schedule = Sequence[int | tuple[int, int]]


def parse_schedule(schedule: Schedule) -> list[int]:
    """Turn sizes and `(count, size)` pairs into one global batch size per epoch; the last persists.

    Args:
        schedule: Each item is the size of one epoch, or `(count, size)` for `count` epochs.

    Returns:
        One size for each epoch of the schedule, in rows.

    Raises:
        ValueError: The schedule is empty, or an item is not made of positive integers.

    Example:
        >>> parse_schedule([64, (2, 128), 256])
        [64, 128, 128, 256]
    """
    runs = parse_runs(schedule, "batch size", is_count, "an integer of at least 1")
    return [int(size) for count, size in runs for _ in range(count)]


def size_at(sizes: Sequence[int], epoch: int) -> int:
    """Return the batch size of an epoch; the last size persists.

    Example:
        >>> [size_at([64, 128], epoch) for epoch in range(4)]
        [64, 128, 128, 128]
    """
    return sizes[min(epoch, len(sizes) - 1)]


def check_sizes(sizes: Iterable[int], trainer: DistributedTrainer) -> None:
    """Refuse data that `fit` cannot read in batches of other sizes."""
    del sizes
    trainer.feed.check_rebatch()


class BatchSizeSchedule(StrategyCallback):
    """Change the global batch size between epochs, within one `fit`.

    "Don't decay the learning rate, increase the batch size" (Smith et al. 2018): where a schedule
    would divide the rate by a, multiply the batch by a. Sizes belong to epochs, however often `fit`
    was started: with `initial_epoch` or a resumed checkpoint, epoch 7 has epoch 7's size.

    Arrays are cut anew in the order in which Keras would have shuffled them. A `tf.data.Dataset` of
    batches is rebatched after the script's own pipeline; since its rows cannot be counted
    beforehand, the progress bar shows no total in the first epoch of a new size. With
    `steps_per_epoch` the number of steps stays the same, and a new size begins the data from the
    start.

    Args:
        schedule: A list of sizes, one per epoch, or `(count, size)` pairs; the last persists. It
            overrides `fit`'s `batch_size`.

    Raises:
        ValueError: The schedule is malformed; at train begin, if a size is smaller than the number
            of workers or the data is a generator, a PyDataset or a pipeline per rank.

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

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that the data can be cut anew, before the first epoch."""
        check_sizes(self.sizes, self.trainer)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Cut this epoch's batches."""
        self.trainer.feed.rebatch(size_at(self.sizes, epoch))
