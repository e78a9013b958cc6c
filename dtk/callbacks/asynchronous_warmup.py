"""A smaller rate for the first asynchronous steps, as in Multiverso's asynchronous SGD."""

from __future__ import annotations

import dataclasses
import math
from typing import TypedDict

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.hyperparameters.rate import Rate, Scaling, rate_now, rate_of, scaling_from
from dtk.callbacks.learning_rate_scaling import LearningRateScaling
from dtk.nests import Logs
from dtk.strategies import ParameterServerStrategy

SHAPES = ("staircase", "linear")
# The attribute of an optimizer that holds its `Scaling`.
_MARK = "_dtk_asynchronous_warmup"


def warmup_factor(step: int, start: float, steps: int, shape: str) -> float:
    """Return the factor of the rate at an asynchronous step.

    Example:
        >>> [warmup_factor(n, 0.25, 100, "staircase") for n in (0, 99, 100, 300, 999)]
        [0.25, 0.25, 0.5, 1.0, 1.0]
        >>> [warmup_factor(n, 0.25, 100, "linear") for n in (0, 50, 100, 999)]
        [0.25, 0.625, 1.0, 1.0]
    """
    if shape == "staircase":
        return min(1.0, start * (step // steps + 1))
    return min(1.0, start + (1.0 - start) * step / steps)


class WarmupState(TypedDict):
    """The state that `AsynchronousWarmup` saves with a checkpoint."""

    taken: int  # steps taken
    scaling: dict[str, float] | None  # fields of the optimizer's `Scaling`


class AsynchronousWarmup(StrategyCallback):
    """Begin asynchronous training with a fraction of the learning rate, and raise it to the whole.

    Stale gradients do most harm while weights still move far. The factor grows with the number of
    asynchronous steps of the whole job. Serial steps, of a `dtk.strategies.SerialStart`, take the
    whole rate and do not count. After the warm-up this callback does not touch the rate. A schedule
    is multiplied by the factor.

    Args:
        start: The factor to begin with, above 0 and at most 1.
        steps: Length of one stair, or of the linear rise, in steps.
        shape: "staircase" (each stair adds `start`) or "linear".

    Raises:
        ValueError: An argument is out of range; at train begin, if training is not asynchronous or
            `LearningRateScaling` would set the same rate.

    Example:
        >>> import dtk
        >>> warmup = dtk.callbacks.AsynchronousWarmup(start=0.2, steps=600)
        >>> model.fit(x, y, callbacks=[warmup])  # doctest: +SKIP

    Source: the asynchronous SGD of CNTK and Multiverso, with its defaults.
    """

    sets = ("learning rate",)

    def __init__(self, start: float = 0.2, steps: int = 600, shape: str = "staircase"):
        super().__init__()
        if not 0.0 < start <= 1.0:
            raise ValueError(f"start must be above 0 and at most 1, got {start!r}")
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a number of steps, 1 or more, got {steps!r}")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        self.start, self.steps, self.shape = start, steps, shape
        self._taken = 0
        self._rate: Rate | None = None

    def get_state(self) -> WarmupState:
        """Return the steps taken and the scaling of the rate, for `Checkpoint`."""
        scaling = getattr(self.model.optimizer, _MARK, None)
        told = None if scaling is None else dataclasses.asdict(scaling)
        return {"taken": self._taken, "scaling": told}

    def set_state(self, state: WarmupState) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored.

        Args:
            state: The result of `get_state`.
        """
        self._taken = state["taken"]
        scaling = scaling_from(state["scaling"]) if state["scaling"] else None
        setattr(self.model.optimizer, _MARK, scaling)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        strategy = self.strategy
        if not isinstance(strategy, ParameterServerStrategy) or not strategy.consistency.tau:
            how = getattr(strategy, "consistency", type(strategy).__name__)
            raise ValueError(
                f"AsynchronousWarmup: {how} takes no step asynchronously; leave this callback out, "
                'or use ParameterServerStrategy("async")'
            )
        if any(isinstance(c, LearningRateScaling) for c in self.trainer.callbacks.callbacks):
            raise ValueError(
                "AsynchronousWarmup and LearningRateScaling would set the same rate; keep one"
            )
        self._rate = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Find the rate. A checkpoint has been restored by now, but not at train begin."""
        if self._rate is not None or self._over():
            return
        optimizer = self.model.optimizer
        scaling = getattr(optimizer, _MARK, None)
        if scaling is None or scaling.applied == 1.0:
            # The rate is whole: the script may have changed it since.
            scaling = Scaling(rate_now(optimizer), 1.0)
        setattr(optimizer, _MARK, scaling)
        self._rate = rate_of(optimizer, scaling, momentum_correction=False)
        if self._rate.retrace:
            self.model.make_train_function(force=True)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of the following steps."""
        if self._rate is None or not self.strategy.schedule_of(self.model).tau:
            return
        self._rate.apply(warmup_factor(self._taken, self.start, self.steps, self.shape))
        self._taken += self.model.steps_per_execution
        if self._over():
            self._rate.apply(1.0)
            self._rate = None

    def _over(self) -> bool:
        length = self.steps
        if self.shape == "staircase":
            length *= math.ceil(1.0 / self.start) - 1
        return self._taken > length
