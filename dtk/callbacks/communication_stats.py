"""How many bytes training sends, and how long it waits for them."""

from __future__ import annotations

import time

from dtk.callbacks.base import StrategyCallback
from dtk.nests import Logs
from dtk.strategies import ParameterServerStrategy


class CommunicationStats(StrategyCallback):
    """Put the cost of communication into each epoch's logs.

    `comm_bytes` is the number of bytes that this rank handed to the transport per step, averaged
    over the epoch: gradients, statistics and metrics (see `Communicator.bytes_sent`). `comm_share`
    is the part of the epoch's time in which a collective was under way, including time that it
    waits for slower ranks or overlaps with computing. Validation does not count. With one process
    both are 0.

    Raises:
        ValueError: At train begin, if steps run behind parameter servers.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.CommunicationStats()])
        >>> history.history["comm_bytes"], history.history["comm_share"]
        ([0.0], [0.0])
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: int | None = None
        self._end: tuple[float, ...] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise for strategies that do not use the communicator."""
        if isinstance(self.strategy, ParameterServerStrategy):
            raise ValueError(
                "CommunicationStats: workers of parameter servers speak with the servers, not with "
                "each other; use dtk.callbacks.ServerReport(), which counts what they move"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the counts at the epoch's beginning."""
        self._begin, self._end = self._counts(), None
        self._first, self._steps = None, 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Note the epoch's first step: a resumed epoch may begin in the middle."""
        if self._first is None:
            self._first = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count steps."""
        self._steps = batch + 1 - (self._first or 0)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Stop counting for this epoch: its validation begins."""
        if self._end is None:
            self._end = self._counts()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's numbers to its logs."""
        self.trainer.flush()
        end = self._end or self._counts()
        sent, seconds, wall = (b - a for a, b in zip(self._begin, end, strict=True))
        if logs is not None:
            logs["comm_bytes"] = sent / max(1, self._steps)
            logs["comm_share"] = seconds / wall if wall else 0.0

    def _counts(self) -> tuple[float, ...]:
        groups = (self.strategy.communicator, self.strategy.model_communicator)
        sent = sum(group.bytes_sent for group in groups)
        return sent, sum(group.seconds_communicating for group in groups), time.perf_counter()
