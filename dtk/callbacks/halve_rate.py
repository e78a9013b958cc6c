"""CNTK's example of a cross-validation callback: halve the rate if the error falls too little."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from dtk.callbacks.cross_validation import CrossValidation, CrossValidationState
from dtk.callbacks.grow_batch_instead_of_decay import GrowBatchInsteadOfDecay
from dtk.callbacks.hyperparameters.rate import check_settable, multiply_rate, rate_now
from dtk.callbacks.sample_rate import sample_rate_of
from dtk.nests import Logs, Nest


def gains_enough(before: float, error: float, gain: float) -> bool:
    """Return whether an error has fallen by at least a part of itself; False for NaN.

    Example:
        >>> gains_enough(0.5, 0.475, 0.05), gains_enough(0.5, 0.48, 0.05)
        (True, False)
    """
    return before - error >= gain * abs(before)


class HalvingState(CrossValidationState):
    """The state that `HalveRate` saves with a checkpoint."""

    before: float | None  # the last error; None before the first
    made: int  # number of cuts so far


class HalveRate(CrossValidation):
    """Halve the learning rate if the cross-validation error falls too little; stop after some cuts.

    With `SampleRate` the rate per sample is halved, for any batch size.

    SGD's momentum buffer contains the rate (v = m v - lr g), so old gradients would count with the
    old rate. So the buffer is halved as well, as in `LearningRateScaling`.

    Args:
        every_samples: Training samples from one evaluation to the next.
        validation_data: `(x, y)`, `(x, y, sample_weight)` or a dataset, the same on every rank.
        gain: The part of itself by which the error must fall from one evaluation to the next.
        cuts: How often the rate is halved; training ends instead of a further cut.
        first: The error before the first evaluation, such as 1.0, the error rate of an
            untrained model (CNTK's example). None: the first evaluation only sets it.
        batch_size: Global batch of the evaluation for arrays; None for `fit`'s.
        monitor: As for `CrossValidation`.
        momentum_correction: Whether to rescale momentum buffers at cuts.

    Raises:
        ValueError: An argument is out of range; at train begin, if the optimizer has its own
            schedule, or `GrowBatchInsteadOfDecay` sets the rate (with `SampleRate` it does not).

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     dense = keras.layers.Dense(1, use_bias=False)
        ...     model = keras.Sequential([keras.Input((4,)), dense])
        ...     model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        >>> x, y = np.zeros((64, 4)), np.ones((64, 1))
        >>> history = model.fit(x, y, batch_size=32, epochs=9, verbose=0, callbacks=[
        ...     dtk.callbacks.HalveRate(64, (x, y), cuts=2)])
        HalveRate: error 1 after 1, learning rate 0.5 -> 0.25 (cut 1 of 2)
        HalveRate: error 1 after 1, learning rate 0.25 -> 0.125 (cut 2 of 2)
        HalveRate: error 1 after 1, training ends after 2 cuts
    """

    def __init__(
        self,
        every_samples: int,
        validation_data: Nest | tf.data.Dataset,
        gain: float = 0.05,
        cuts: int = 6,
        first: float | None = None,
        batch_size: int | None = None,
        monitor: str | Callable[[dict[str, float]], float] = "loss",
        momentum_correction: bool = True,
    ):
        super().__init__(every_samples, self._judge, validation_data, batch_size, monitor)
        if not 0 <= gain < 1:
            raise ValueError(f"gain must be 0 or more and less than 1, got {gain!r}")
        if not isinstance(cuts, int) or cuts < 0:
            raise ValueError(f"cuts must be an integer of at least 0, got {cuts!r}")
        self.gain, self.cuts, self.first = gain, cuts, first
        self.momentum_correction = momentum_correction
        self._before, self._made = first, 0

    def get_state(self) -> HalvingState:
        """Return `CrossValidation`'s state, the last error and the cuts, for `Checkpoint`."""
        return {**super().get_state(), "before": self._before, "made": self._made}

    def set_state(self, state: HalvingState) -> None:  # type: ignore[override]  # its own state, and no base's
        """Go on from a checkpoint's state; the optimizer's rate is already restored."""
        super().set_state(state)
        self._before, self._made = state["before"], state["made"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        super().on_train_begin(logs)
        check_settable(self.model.optimizer, type(self).__name__)
        for other in self.trainer.callbacks.callbacks:
            if isinstance(other, GrowBatchInsteadOfDecay) and "learning rate" in other.sets_here():
                raise ValueError(
                    f"{type(self).__name__} would halve a rate that {type(other).__name__} sets "
                    "anew in every epoch; add SampleRate(rate per sample), which takes both into "
                    "account, or use BatchSizeSchedule"
                )
        self._before, self._made = self.first, 0

    def _judge(self, index: int, average_error: float, samples: int, minibatches: int) -> bool:
        del index, samples, minibatches
        before, self._before = self._before, average_error
        if before is None or gains_enough(before, average_error, self.gain):
            return True
        told = f"error {average_error:.4g} after {before:.4g}"
        if self._made == self.cuts:
            self.say(f"{told}, training ends after {self.cuts} cuts")
            return False
        self._made += 1
        optimizer, sample_rate = self.model.optimizer, sample_rate_of(self.trainer)
        name = "learning rate" if sample_rate is None else "rate per sample"
        rate = rate_now(optimizer) if sample_rate is None else sample_rate.rate
        multiply_rate(optimizer, 0.5, self.momentum_correction)
        self.say(f"{told}, {name} {rate:.4g} -> {rate / 2:.4g} (cut {self._made} of {self.cuts})")
        return True
