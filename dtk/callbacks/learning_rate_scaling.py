"""The linear scaling rule with gradual warm-up (Goyal et al. 2017, arXiv:1706.02677)."""

from __future__ import annotations

import dataclasses
import math

import keras

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.hyperparameters.rate import Rate, Scaling, rate_now, rate_of, scaling_from
from dtk.nests import Logs
from dtk.trainer.gradients import shared_optimizer


def factor_for(rule: str | float, workers: int) -> float:
    """Return the factor of the learning rate for a number of workers.

    Example:
        >>> factor_for("linear", 4), factor_for("sqrt", 4), factor_for(2.5, 4)
        (4.0, 2.0, 2.5)
    """
    if rule == "linear":
        return float(workers)
    if rule == "sqrt":
        return math.sqrt(workers)
    if isinstance(rule, int | float) and not isinstance(rule, bool) and 0 < rule < math.inf:
        return float(rule)
    raise ValueError(f"rule must be 'linear', 'sqrt' or a positive number, got {rule!r}")


def warm_up(factor: float, progress: float) -> float:
    """Return the factor of the rate during the warm-up, rising linearly from 1 to `factor`.

    Example:
        >>> [warm_up(4.0, progress) for progress in (0.0, 0.5, 1.0, 2.0)]
        [1.0, 2.5, 4.0, 4.0]
    """
    return 1.0 + (factor - 1.0) * min(1.0, progress)


class LearningRateScaling(StrategyCallback):
    """Scale the learning rate with the number of workers, after a gradual warm-up.

    In dtk `batch_size` is the global batch. Use this callback if the global batch grows with the
    workers (`batch_size=32 * strategy.size`); if your script keeps its global batch, keep the rate.

    During the warm-up the rate rises with every iteration, linearly from the script's rate to the
    scaled rate, and this callback overrides others. Afterwards it does not touch the rate, so that
    ReduceLROnPlateau and LearningRateScheduler can set it. An optimizer with a
    `LearningRateSchedule` keeps its schedule, multiplied by the same factor.

    The momentum buffers of SGD, RMSprop and LARS contain the rate (v = m v - lr g). When the rate
    grows, old gradients would still count with the old rate; momentum correction multiplies the
    buffer by new/old at each change by this callback (Goyal et al., section 3). Other optimizers,
    such as Adam, do not need it: their buffers do not contain the rate.

    The rate of an optimizer is scaled once: a second `fit`, or a resumed one, finds it scaled and
    goes on with the rest of the warm-up. A job resumed with another number of workers keeps the
    rate that was saved.

    Args:
        rule: "linear" (times the number of workers), "sqrt" (times its square root), or the factor
            itself.
        warmup_epochs: Length of the warm-up, in epochs; may be a fraction. 0 scales at once.
        momentum_correction: Whether to rescale momentum buffers at changes.

    Raises:
        ValueError: An argument is out of range; at train begin, if the optimizer's rate is a plain
            function, or if there is a warm-up and the length of an epoch is unknown.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.LearningRateScaling(rule=2.0)])
        LearningRateScaling: 1 worker, global batch 32 (32 per worker), learning rate 0.1 -> 0.2
    """

    sets = ("learning rate",)

    def __init__(
        self,
        rule: str | float = "linear",
        warmup_epochs: float = 0,
        momentum_correction: bool = True,
    ):
        super().__init__()
        factor_for(rule, 1)
        if not (math.isfinite(warmup_epochs) and warmup_epochs >= 0):
            raise ValueError(
                f"warmup_epochs must be a finite number, 0 or more, got {warmup_epochs}"
            )
        self.rule = rule
        self.warmup_epochs = warmup_epochs
        self.momentum_correction = momentum_correction
        self._rate: Rate | None = None

    # The optimizer holds the state of scaling, so that neither a new callback nor a second fit
    # scales the rate again.

    def get_state(self) -> dict[str, float]:
        """Return the base rate, the factor, and the progress of the warm-up, for `Checkpoint`."""
        scaling = getattr(self.model.optimizer, _MARK, None)
        return {} if scaling is None else dataclasses.asdict(scaling)

    def set_state(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored.

        Args:
            state: The result of `get_state`.
        """
        setattr(self.model.optimizer, _MARK, scaling_from(state) if state else None)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        trainer = self.trainer
        count = len(self.beside(LearningRateScaling))
        if count > 1:
            raise ValueError(
                f"{count} LearningRateScaling callbacks in one fit, which scale one rate; keep one"
            )
        schedule = shared_optimizer.schedule_of(self.model.optimizer)
        if schedule is not None and not isinstance(
            schedule, keras.optimizers.schedules.LearningRateSchedule
        ):
            raise ValueError(
                f"LearningRateScaling: the optimizer's learning rate is a function ({schedule!r}), "
                "which cannot be scaled; give it a number or a LearningRateSchedule"
            )
        if self.warmup_epochs and trainer.feed.iterator.num_batches is None:
            raise ValueError(
                "LearningRateScaling: warmup_epochs needs to know how many steps an epoch has, and "
                "this data does not tell; give fit steps_per_epoch, or the dataset a cardinality "
                "(dataset.apply(tf.data.experimental.assert_cardinality(n)))"
            )
        self._rate = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Scale once. A checkpoint has been restored by now, but not at train begin."""
        self._epoch = epoch
        if self._rate is not None:
            return
        optimizer = self.model.optimizer
        scaling = getattr(optimizer, _MARK, None)
        fresh = scaling is None
        if scaling is None:
            scaling = Scaling(rate_now(optimizer), factor_for(self.rule, self.strategy.size))
            setattr(optimizer, _MARK, scaling)
        self._rate = rate_of(optimizer, scaling, self.momentum_correction)
        if self._rate.retrace:
            self.model.make_train_function(force=True)
        if fresh:
            self._announce(scaling)
        if not self.warmup_epochs and not scaling.warm:
            self._rate.apply(scaling.factor)
            scaling.warm = True

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Take one step of the warm-up."""
        if self._rate is None or self._rate.scaling.warm:
            return
        steps = self.trainer.feed.iterator.num_batches
        if steps is None:  # The first epoch of a new batch size, over a dataset.
            progress = self._epoch / self.warmup_epochs
        else:
            progress = (self._epoch + batch / steps) / self.warmup_epochs
        scaling = self._rate.scaling
        self._rate.apply(warm_up(scaling.factor, progress))
        scaling.warm = progress >= 1.0

    def _announce(self, scaling: Scaling) -> None:
        size, batch = self.strategy.size, self.trainer.feed.batch_size()
        base, scaled = scaling.base, scaling.base * scaling.factor
        batches = f"global batch {batch} ({batch / size:g} per worker), " if batch else ""
        over = f" over {self.warmup_epochs:g} epoch(s)" if self.warmup_epochs else ""
        workers = f"{size} worker{'s' * (size != 1)}"
        self.say(f"{workers}, {batches}learning rate {base:.6g} -> {scaled:.6g}{over}")


# The attribute of an optimizer that holds its `Scaling`.
_MARK = "_dtk_rate_scaling"
