"""A test after successful training."""

from __future__ import annotations

import tensorflow as tf

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.evaluation import Evaluation
from dtk.nests import Logs, Nest


class FinalTest(StrategyCallback):
    """Evaluate once, after `fit` succeeds, with the last weights or the ones a callback restored.

    The numbers cover all data and are equal on every rank. Rank 0 prints them, and History gets
    them as `test_loss` and so on, each a list of one. There is no test if an exception (also from
    SIGTERM) ends `fit`, but there is one if a callback stops it early.

    Args:
        x: Arrays, or a dataset of batches `(x, y)`; the same on every rank.
        y: Targets, for arrays.
        batch_size: Global batch for arrays; None for `fit`'s.

    Attributes:
        result: Loss and metrics by name; None before the test.

    Raises:
        DisagreementError: At train begin, if ranks have different data.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x, y = np.zeros((64, 4)), np.zeros((64, 1))
        >>> test = dtk.callbacks.FinalTest(x, y)
        >>> history = model.fit(x, y, verbose=0, callbacks=[test])
        FinalTest: loss 0
        >>> test.result, history.history["test_loss"]
        ({'loss': 0.0}, [0.0])

    Source: `TestConfig` of CNTK 2.
    """

    def __init__(self, x: Nest | tf.data.Dataset, y: Nest = None, batch_size: int | None = None):
        super().__init__()
        self._evaluation = Evaluation("test data", x if y is None else (x, y), batch_size)
        self.result: dict[str, float] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the data over all ranks."""
        self._evaluation.check(self.trainer)
        self.result = None

    def on_end_agreed(self, logs: Logs | None = None) -> None:
        """Test: no callback changes the weights after this point."""
        self.result = self._evaluation.run(self.trainer).numbers
        for name, value in self.result.items():
            self.model.history.history[f"test_{name}"] = [value]
        self.say(", ".join(f"{name} {value:.4g}" for name, value in self.result.items()))
