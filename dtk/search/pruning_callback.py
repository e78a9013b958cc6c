"""Pruning of trials by what `fit` logs."""

from __future__ import annotations

import keras
import optuna

from dtk.nests import Logs
from dtk.search.trial import DistributedTrial


class PruningCallback(keras.callbacks.Callback):
    """Report a metric to the trial after every epoch, and end the trial when it is to be pruned.

    All ranks prune at the same epoch: logs are equal on them, and rank 0's pruner decides. Give it
    to `fit` after callbacks that change the logs.

    Args:
        trial: What the objective was given; `optuna.Trial` in plain Optuna works, too.
        monitor: Name of the metric in the logs.

    Raises:
        optuna.TrialPruned: From `fit`, on all ranks.

    Example:
        >>> import optuna
        >>> study = optuna.create_study(direction="maximize")
        >>> callback = PruningCallback(study.ask(), monitor="val_accuracy")
        >>> callback.on_epoch_end(0, {"val_accuracy": 0.9})
    """

    def __init__(self, trial: DistributedTrial | optuna.Trial, monitor: str = "val_loss"):
        super().__init__()
        self.trial = trial
        self.monitor = monitor

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Report the epoch's value, and ask whether to prune."""
        value = (logs or {}).get(self.monitor)
        if value is None:
            raise ValueError(
                f"PruningCallback(monitor={self.monitor!r}): the logs of epoch {epoch + 1} have "
                f"{', '.join(sorted(logs or {})) or 'nothing'}; give validation_data to fit for "
                "val_*, or another monitor"
            )
        self.trial.report(float(value), epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(
                f"Trial was pruned after epoch {epoch + 1}, with {self.monitor} {float(value):.4g}"
            )
