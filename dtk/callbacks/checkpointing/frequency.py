"""When a checkpoint is due, by epochs, steps or samples; and when an epoch is the best so far."""

from __future__ import annotations

import math

import keras

from dtk.callbacks.strategy_callback import count_rows
from dtk.compat.keras_data import Feed
from dtk.nests import Logs
from dtk.schedules.runs import is_count

_BETTER_WHEN_LARGER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "cosine")
_BETTER_WHEN_SMALLER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy", "poisson")


class Frequency:
    """Counts steps and samples since the last checkpoint, alike on all ranks.

    Example:
        >>> Frequency(save_freq=500).each_epoch, Frequency().each_epoch
        (False, True)
    """

    def __init__(self, save_freq: str | int = "epoch", save_every_samples: int | None = None):
        if save_freq != "epoch" and not is_count(save_freq):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of steps (1 or more), got {save_freq!r}"
            )
        if save_every_samples is not None and not is_count(save_every_samples):
            raise ValueError(
                "save_every_samples must be a number of samples (1 or more), or None, got "
                f"{save_every_samples!r}"
            )
        if save_every_samples is not None and save_freq != "epoch":
            raise ValueError(
                f"save_freq={save_freq!r} and save_every_samples={save_every_samples!r} were both "
                "given; keep one"
            )
        self._save_freq = save_freq
        self._every_samples = save_every_samples
        self.steps = self.samples = 0
        self._last_step = 0
        # Rows since the last checkpoint, and in this epoch, when they were last looked at; steps
        # since then; rows of a step.
        self._looked = self._total = self._unseen = 0
        self._rate = 0.0

    @property
    def each_epoch(self) -> bool:
        """Whether one is due after every epoch."""
        return self._save_freq == "epoch" and self._every_samples is None

    @property
    def due(self) -> bool:
        """Whether one is due now, by what was counted."""
        if self._every_samples is not None:
            return self.samples >= self._every_samples
        return isinstance(self._save_freq, int) and self.steps >= self._save_freq

    def begin_epoch(self, done: int, model: keras.Model) -> None:
        """Begin to count the steps of an epoch."""
        self._last_step = done
        self._looked += round(self._unseen * self._rate)
        self._unseen = 0
        self._total = count_rows(model) if done and self._every_samples is not None else 0

    def count(self, done: int, feed: Feed, model: keras.Model | None = None) -> None:
        """Count what the epoch has done since the last call."""
        steps = max(0, done - self._last_step)
        self.steps += steps
        if self._every_samples is not None and steps:
            before, after = feed.rows_counted(self._last_step), feed.rows_counted(done)
            if before is None or after is None:
                self._estimate(steps, model)
            else:
                self.samples += after - before
        self._last_step = max(done, self._last_step)

    def _estimate(self, steps: int, model: keras.Model | None) -> None:
        """Count rows by those of the steps before, and look where enough may have come.

        To look takes a collective. It is done whenever half of what was left at the last look may
        be there, or steps since the last checkpoint are twice as many: batches may have grown.
        """
        assert self._every_samples is not None
        self._unseen += steps
        left = self._every_samples - self._looked
        enough = self._unseen * self._rate >= left / 2 or 2 * self._unseen >= self.steps
        if model is not None and enough:
            total = count_rows(model)
            self._rate = (total - self._total) / self._unseen
            self._looked += total - self._total
            self._total, self._unseen = total, 0
        self.samples = self._looked + round(self._unseen * self._rate)

    def saved(self) -> None:
        """Note that there is a checkpoint."""
        self.steps = self.samples = 0
        self._looked = -round(self._unseen * self._rate)


def better_when_larger(monitor: str | None, mode: str) -> bool:
    """Return whether larger values of a monitored number are better.

    Example:
        >>> better_when_larger("val_accuracy", "auto"), better_when_larger("val_loss", "auto")
        (True, False)
    """
    if monitor is None:
        return False
    if not isinstance(monitor, str) or not monitor:
        raise ValueError(
            f"monitor={monitor!r}; expected the name of a number of the logs, such as 'val_loss', "
            "or None"
        )
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


def improvement(
    monitor: str | None, larger_is_better: bool, best: float | None, logs: Logs | None
) -> float | None:
    """Return an epoch's value of the monitored number if it is better than the best, else None.

    Example:
        >>> improvement("val_loss", False, None, {"val_loss": 0.5})
        0.5
        >>> improvement("val_loss", False, 0.5, {"val_loss": 0.6}) is None
        True
    """
    if monitor is None or logs is None:
        return None
    if monitor not in logs:
        raise ValueError(
            f"Checkpoint: monitor={monitor!r} is not among this epoch's logs "
            f"({', '.join(sorted(logs))})"
        )
    value = float(logs[monitor])
    if best is None:
        better = not math.isnan(value)
    else:
        better = value > best if larger_is_better else value < best
    return value if better else None
