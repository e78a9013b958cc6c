"""Start all ranks from one rank's weights."""

from __future__ import annotations

from dtk.callbacks.strategy_callback import StrategyCallback
from dtk.nests import Logs
from dtk.trainer.ranks import rank_checks, shared_weights


class BroadcastVariables(StrategyCallback):
    """Give every rank the root's weights and optimizer state when training begins.

    A dtk strategy already starts every rank from rank 0's values; use this callback for another
    root, or to say so explicitly. Each rank keeps its own dropout seeds and unfinished gradient
    accumulation. With one process the callback does nothing. A resumed checkpoint overrides it,
    whatever the order of callbacks.

    Args:
        root_rank: The rank whose values count.

    Raises:
        ValueError: At train begin, if there is no such rank.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.BroadcastVariables(root_rank=0)])
    """

    def __init__(self, root_rank: int = 0):
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the ranks' models, then broadcast."""
        trainer, size = self.trainer, self.strategy.size
        if not 0 <= self.root_rank < size:
            raise ValueError(
                f"BroadcastVariables: root_rank={self.root_rank} is outside the world of {size} "
                f"worker(s); use 0 to {size - 1}"
            )
        if trainer.strategy.world.size > 1:
            rank_checks.check_same_run(trainer, self.params)
            shared_weights.start_from(self.root_rank, trainer)
