"""Best value of a monitored number, by which the best weights are kept."""

from __future__ import annotations

import math

_BETTER_WHEN_LARGER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "cosine")


_BETTER_WHEN_SMALLER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy", "poisson")


def better_when_larger(monitor: str, mode: str) -> bool:
    """Return whether larger values of a monitored number are better.

    Example:
        >>> better_when_larger("val_accuracy", "auto"), better_when_larger("val_loss", "auto")
        (True, False)
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
    if mode != "auto":
        return mode == "max"
    name = monitor.lower()
    if any(word in name for word in _BETTER_WHEN_SMALLER):
        return False
    if any(word in name for word in _BETTER_WHEN_LARGER):
        return True
    raise ValueError(f"the name {monitor!r} does not tell whether more is better; give mode")


class BestValue:
    """Best value that a number in the epochs' logs has had so far.

    Example:
        >>> best = BestValue("val_loss", "auto")
        >>> [best.improves({"val_loss": loss}) for loss in (0.5, 0.6, 0.4)], best.value
        ([True, False, True], 0.4)
    """

    def __init__(self, monitor: str | None, mode: str):
        if monitor is not None and (not isinstance(monitor, str) or not monitor):
            raise ValueError(
                f"monitor={monitor!r}; expected the name of a number of the logs, such as "
                "'val_loss', or None"
            )
        self.monitor = monitor
        self.larger_is_better = monitor is not None and better_when_larger(monitor, mode)
        self.value: float | None = None

    def improves(self, logs: dict[str, float] | None) -> bool:
        """Take an epoch's logs, and return whether they hold a better value than all before."""
        if self.monitor is None or logs is None:
            return False
        if self.monitor not in logs:
            raise ValueError(
                f"Checkpoint: monitor={self.monitor!r} is not among this epoch's logs "
                f"({', '.join(sorted(logs))})"
            )
        value = float(logs[self.monitor])
        if math.isnan(value) or (
            self.value is not None
            and (value <= self.value if self.larger_is_better else value >= self.value)
        ):
            return False
        self.value = value
        return True
