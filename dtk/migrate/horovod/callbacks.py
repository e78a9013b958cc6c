"""Horovod's callbacks, for models compiled after `hvd.init()`."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from dtk.callbacks.broadcast_variables import BroadcastVariables
from dtk.callbacks.learning_rate import multiply_momentum
from dtk.errors import ReplacedError
from dtk.migrate.horovod import job
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Logs

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(BroadcastVariables):
    """Start all ranks from one rank's weights and optimizer state.

    `fit` starts them from rank 0's without it. It does so when training begins; Horovod did after
    the first batch.

    Args:
        root_rank: The rank whose values count.
        device: Changes nothing: dtk places its messages itself.
        local_variables: Must be empty: dtk keeps all variables equal on all ranks.

    Raises:
        ReplacedError: There are local variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: object = None):
        if local_variables is not None and not isinstance(local_variables, tf.Variable):
            local_variables = list(local_variables) or None  # type: ignore[call-overload]
        if local_variables is not None:
            raise ReplacedError("local_variables: dtk keeps all variables equal on all ranks")
        if device:
            job.hint(f"BroadcastGlobalVariablesCallback(device={device!r}) changes nothing")
        super().__init__(root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Average logs over all ranks after each epoch: `fit` does it, with and without this callback.

    Logs of training are those of the rows of all ranks; each rank's validation is of its own data,
    and the logs that callbacks see are the mean over ranks, as Horovod's callback makes them.

    Args:
        device: Changes nothing: dtk places its messages itself.
    """

    def __init__(self, device: str = ""):
        super().__init__()
        if device:
            job.hint(f"MetricAverageCallback(device={device!r}) changes nothing")


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)`, as Horovod's callback does.

    With t the epoch, in steps with a fraction: t = epoch + batch / steps_per_epoch,

        rate(t) = initial_lr * multiplier(t)              start_epoch <= epoch < end_epoch

    and where the rate changes from r to r', a step's momentum is multiplied by r' / r: dtk
    multiplies the momentum's buffers, since Keras 3 compiles the coefficient into the step. Under
    `nesterov=True` the look-ahead keeps the uncorrected coefficient.

    Args:
        initial_lr: The rate at the start of training.
        multiplier: A function of the epoch, or the base of `multiplier ** (epoch - start_epoch)`.
        start_epoch: The first epoch in which the rate is set.
        end_epoch: The first epoch after those in which it is; None: all.
        staircase: Whether the rate changes with the epoch only, not with every batch.
        momentum_correction: Whether momentum follows the rate; only if the optimizer has any.
        steps_per_epoch: Steps of an epoch; None: those of the running `fit`.

    Raises:
        ValueError: `initial_lr` is None; or, at train begin, the number of steps is unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: float(multiplier ** (epoch - start_epoch))
        )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Learn the number of steps from `fit`."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: the steps of an epoch are unknown; give "
                    "steps_per_epoch="
                )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of this step."""
        epoch, end = self.current_epoch, self.end_epoch
        if epoch < self.start_epoch or (end is not None and epoch >= end):
            return
        if not self.staircase:
            self._set_rate(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set_rate(epoch)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, rate = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        if self.momentum_correction and before:
            multiply_momentum(optimizer, rate / before)

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the rate, as "lr"."""
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    With t = epoch + (batch + 1) / steps_per_epoch (Goyal et al., arXiv:1706.02677),

        rate(t) = initial_lr / size * (t * (size - 1) / warmup_epochs + 1)

    Args:
        initial_lr: The rate after the warm-up.
        warmup_epochs: Epochs of the warm-up.
        momentum_correction: Whether momentum follows the rate.
        steps_per_epoch: Steps of an epoch; None: those of the running `fit`.
        verbose: 1: rank 0 prints the rate when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            size = job.size()
            epoch += 1.0 / (self.steps_per_epoch or 1)  # round numbers at the end of each epoch
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the rate; say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and job.rank() == 0:
            message = f"finished gradual learning rate warmup to {self._rate():g}."
            print(f"\nEpoch {epoch + 1}: {message}")


BestModelCheckpoint = replaced(
    "callbacks.BestModelCheckpoint",
    'write keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True), which rank 0 writes',
)
