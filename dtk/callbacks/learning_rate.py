"""The learning rate while `fit` runs: scaled with the workers, and warmed up."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import keras
import tensorflow as tf

from dtk.callbacks.strategy_callback import SavedCallback
from dtk.compat import keras_optimizers
from dtk.nests import Config, Logs
from dtk.optimizers import LARS
from dtk.schedules.runs import check_count, is_rate
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.strategy import Strategy


@keras.saving.register_keras_serializable(package="dtk")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Another schedule's rate times a factor that can change during training.

    Example:
        >>> import keras
        >>> inner = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.5)
        >>> round(float(ScaledSchedule(inner, 4.0)(0)), 6)
        0.4
    """

    def __init__(
        self,
        schedule: keras.optimizers.schedules.LearningRateSchedule | Config,
        factor: float = 1.0,
    ):
        if isinstance(schedule, dict):  # in a saved configuration
            schedule = keras.optimizers.schedules.deserialize(schedule)
        self.schedule: keras.optimizers.schedules.LearningRateSchedule = schedule
        self.factor = tf.Variable(factor, trainable=False, dtype=tf.float32, name="rate_factor")

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        return self.schedule(step) * self.factor

    def get_config(self) -> Config:
        """Return schedule and factor, as Keras saves them."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "factor": float(self.factor.numpy()),
        }


@dataclasses.dataclass
class Scaling:
    """A factor of an optimizer's learning rate, which the optimizer keeps from `fit` to `fit`."""

    base: float  # the script's rate
    factor: float  # factor of the rate after the warm-up
    applied: float = 1.0  # current factor of the rate
    warm: bool = False  # whether the warm-up is over
    epochs: float = 0.0  # epochs of the warm-up that are over
    taken: int = 0  # asynchronous steps of the warm-up

    @classmethod
    def begun(cls, optimizer: keras.Optimizer, factor: float) -> Scaling:
        """Return the scaling of a rate that nothing says was scaled, unless its schedule was."""
        schedule = shared_optimizer.schedule_of(optimizer)
        applied = float(schedule.factor) if isinstance(schedule, ScaledSchedule) else 1.0
        return cls(rate_now(optimizer) / applied, factor, applied)

    def begin(self, model: keras.Model) -> None:
        """Let a schedule be multiplied; steps are traced anew where that changes them."""
        optimizer = model.optimizer
        schedule = shared_optimizer.schedule_of(optimizer)
        if schedule is not None and not isinstance(schedule, ScaledSchedule):
            optimizer.learning_rate = schedule = ScaledSchedule(schedule)
            model.make_train_function(force=True)
        if schedule is not None:
            schedule.factor.assign(self.applied)

    def apply(
        self, optimizer: keras.Optimizer, factor: float, momentum_correction: bool = True
    ) -> None:
        """Set the rate to `base * factor`, and scale the momentum buffers by the change."""
        before = self.applied
        if factor == before:
            return
        schedule = shared_optimizer.schedule_of(optimizer)
        if isinstance(schedule, ScaledSchedule):
            schedule.factor.assign(factor)
        else:
            optimizer.learning_rate = self.base * factor
        self.applied = factor
        if momentum_correction:
            multiply_momentum(optimizer, factor / before)


def rate_now(optimizer: keras.Optimizer) -> float:
    """Return the rate of the next step."""
    return float(keras.ops.convert_to_tensor(optimizer.learning_rate).numpy())


def check_settable(optimizer: keras.Optimizer, who: str) -> None:
    """Raise if callbacks cannot set the rate, since the optimizer computes it."""
    schedule = shared_optimizer.schedule_of(optimizer)
    if schedule is not None:
        raise ValueError(
            f"{who} sets the learning rate, but the optimizer computes its own ({schedule!r}); "
            "give the optimizer a number (for rates per sample, or rates that change after so many "
            "samples, use dtk.callbacks.SampleRate)"
        )


def multiply_rate(
    optimizer: keras.Optimizer, factor: float, momentum_correction: bool = True
) -> None:
    """Multiply an optimizer's rate, which must be a number, and its momentum buffers."""
    Scaling(rate_now(optimizer), 1.0).apply(optimizer, factor, momentum_correction)


def innermost(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer inside wrappers, such as `LossScaleOptimizer`."""
    return keras_optimizers.chain(optimizer)[-1]


def momentum_buffers(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold a sum of past gradients times the learning rate."""
    inner = innermost(optimizer)
    if not isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop | LARS):
        return []
    return [v for v in inner.variables if v.name.endswith("_momentum")]


def multiply_momentum(optimizer: keras.Optimizer, factor: float) -> None:
    for buffer in momentum_buffers(optimizer) if factor != 1.0 else ():
        buffer.assign(buffer.value * factor)


def epochs_per_worker(epochs: int, strategy: Strategy, minimum: int = 1) -> int:
    """Return how many epochs each worker runs if all share them: `ceil(epochs / size)`.

    Under a dtk strategy an epoch is one pass of all workers together over the data, so the number
    of epochs does *not* depend on the number of workers, and most scripts need no division. Divide
    in scripts for the other convention, where every worker passes over all data by itself
    (unsharded `tf.data` with a per-worker batch), or to trade epochs for a larger learning rate.
    Divide before `fit`, so that the progress bar and every schedule see the real number.

    Args:
        epochs: Epochs of one worker.
        strategy: A dtk strategy, or an object with a `size`.
        minimum: The least number to return.

    Returns:
        The number of epochs, at least `minimum`.

    Raises:
        ValueError: `epochs` is negative or `minimum` below 1.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> epochs_per_worker(30, strategy)
        30
    """
    if epochs < 0:
        raise ValueError(f"epochs must be 0 or more, got {epochs}")
    if minimum < 1:
        raise ValueError(f"minimum must be at least 1, got {minimum}")
    return max(minimum, math.ceil(epochs / strategy.size))


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
    if is_rate(rule) and rule:
        return float(rule)
    raise ValueError(f"rule must be 'linear', 'sqrt' or a positive number, got {rule!r}")


def warm_up(factor: float, progress: float) -> float:
    """Return the factor of the rate during the warm-up, rising linearly from 1 to `factor`.

    Example:
        >>> [warm_up(4.0, progress) for progress in (0.0, 0.5, 1.0, 2.0)]
        [1.0, 2.5, 4.0, 4.0]
    """
    return 1.0 + (factor - 1.0) * min(1.0, progress)


class _ScalesRate(SavedCallback):
    """Callback that scales the rate of an optimizer once, since the optimizer holds the scaling.

    So neither a new callback nor a second fit scales the rate again.
    """

    sets = ("learning rate",)
    _holds: str  # by which name the optimizer holds the numbers, and saves them
    _scaling: Scaling | None

    def on_train_agreed(self, logs: Logs | None = None) -> None:
        """Take rank 0's scaling: BackupAndRestore has restored it there alone."""
        self._hold(self.strategy.world.broadcast_object(self._held()))

    def _held(self) -> dict[str, float]:
        """Return the numbers of the optimizer's scaling; none if there is none."""
        numbers = keras_optimizers.saved_numbers(self.model.optimizer).numbers
        return dict(numbers.get(self._holds, {}))

    def _found(self) -> Scaling | None:
        numbers = self._held()
        return Scaling(**numbers) if numbers else None  # type: ignore[arg-type]

    def _hold(self, numbers: dict[str, float]) -> None:
        """Let the optimizer hold the numbers of a scaling."""
        keras_optimizers.saved_numbers(self.model.optimizer).numbers[self._holds] = numbers

    def _go_on(self, scaling: Scaling) -> None:
        """Scale by this from now on; what the optimizer holds changes with it."""
        self._hold(vars(scaling))
        self._scaling = scaling
        scaling.begin(self.model)


class LearningRateScaling(_ScalesRate):
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
    rate that was saved. `Checkpoint` knows, and so do Keras's `.keras` and `.weights.h5` files,
    also of BackupAndRestore, if the model is loaded inside the scope. Older `.h5` files and
    `tf.train.Checkpoint` do not: leave this callback out after loading a scaled rate from these.

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

    _holds = "rate_scaling"

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
        self.rule, self.warmup_epochs = rule, warmup_epochs
        self.momentum_correction = momentum_correction
        self._scaling: Scaling | None = None
        # Epochs of the warm-up in fits before this one, which counts its own from 0 again.
        self._before: float | None = None

    def get_state(self) -> dict[str, object]:
        """Return the base rate, the factor, and the progress of the warm-up, for `Checkpoint`."""
        return {**self._held()}

    def set_state(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored.

        Args:
            state: The result of `get_state`.
        """
        self._hold(cast("dict[str, float]", state))

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
        self._scaling = self._before = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Scale once. A checkpoint has been restored by now, but not at train begin."""
        self._epoch = epoch
        if self._scaling is not None:
            return
        optimizer = self.model.optimizer
        scaling = self._found()
        if scaling is None:
            scaling = Scaling.begun(optimizer, factor_for(self.rule, self.strategy.size))
            self._announce(scaling)
        self._go_on(scaling)
        if not self.warmup_epochs and not scaling.warm:
            scaling.apply(optimizer, scaling.factor, self.momentum_correction)
            scaling.warm = True

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Take one step of the warm-up."""
        scaling = self._scaling
        if scaling is None or scaling.warm:
            return
        epochs = self._epochs_at(batch)
        if self._before is None:  # a resumed fit counts on; another one may begin at 0 again
            self._before = max(0.0, scaling.epochs - epochs)
        progress = (self._before + epochs) / self.warmup_epochs
        factor = warm_up(scaling.factor, progress)
        scaling.apply(self.model.optimizer, factor, self.momentum_correction)
        scaling.warm = progress >= 1.0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Note how far the warm-up has come."""
        if self._scaling is not None and self._before is not None:
            self._scaling.epochs = self._before + self._epochs_at(batch + 1)

    def _epochs_at(self, batch: int) -> float:
        # Without the number of steps: the first epoch of a new batch size, over a dataset.
        return self._epoch + batch / (self.trainer.feed.iterator.num_batches or math.inf)

    def _announce(self, scaling: Scaling) -> None:
        size, batch = self.strategy.size, self.trainer.feed.batch_size()
        base, scaled = scaling.base, scaling.base * scaling.factor
        batches = f"global batch {batch} ({batch / size:g} per worker), " if batch else ""
        over = f" over {self.warmup_epochs:g} epoch(s)" if self.warmup_epochs else ""
        workers = f"{size} worker{'s' * (size != 1)}"
        self.say(f"{workers}, {batches}learning rate {base:.6g} -> {scaled:.6g}{over}")


SHAPES = ("staircase", "linear")


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


class AsynchronousWarmup(_ScalesRate):
    """Begin asynchronous training with a fraction of the learning rate, and raise it to the whole.

    Stale gradients do most harm while weights still move far. The factor grows with the number of
    asynchronous steps of the whole job. Serial steps, of a `dtk.strategies.SerialStart`, take the
    whole rate and do not count. After the warm-up this callback does not touch the rate. A schedule
    is multiplied by the factor. An optimizer is warmed up once: a second `fit`, or a resumed one,
    goes on where the last one was, as with `LearningRateScaling`.

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

    saved = ("taken",)
    _holds = "asynchronous_warmup"

    def __init__(self, start: float = 0.2, steps: int = 600, shape: str = "staircase"):
        super().__init__()
        if not 0.0 < start <= 1.0:
            raise ValueError(f"start must be above 0 and at most 1, got {start!r}")
        check_count("steps", steps)
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        self.start, self.steps, self.shape = start, steps, shape
        self._taken = 0
        self._scaling: Scaling | None = None

    def get_state(self) -> dict[str, object]:
        """Return the steps taken and the scaling of the rate, for `Checkpoint`."""
        return {**super().get_state(), "scaling": self._held()}

    def set_state(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored."""
        super().set_state(state)
        self._hold(cast("dict[str, float] | None", state["scaling"]) or {})

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        strategy = self.strategy
        if not self.has_servers or not strategy.consistency.tau:
            how = getattr(strategy, "consistency", type(strategy).__name__)
            raise ValueError(
                f"AsynchronousWarmup: {how} takes no step asynchronously; leave this callback out, "
                'or use ParameterServerStrategy("async")'
            )
        if self.beside(LearningRateScaling):
            raise ValueError(
                "AsynchronousWarmup and LearningRateScaling would set the same rate; keep one"
            )
        self._scaling = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Find the rate. A checkpoint has been restored by now, but not at train begin."""
        scaling = self._found()
        if scaling is not None:
            self._taken = max(self._taken, int(scaling.taken))
        if self._scaling is not None or self._over():
            return
        if scaling is None or scaling.applied == 1.0:
            # The rate is whole: the script may have changed it since.
            scaling = Scaling(rate_now(self.model.optimizer), 1.0)
        self._go_on(scaling)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of the following steps."""
        if self._scaling is None or not self.strategy.schedule_of(self.model).tau:
            return
        factor = warmup_factor(self._taken, self.start, self.steps, self.shape)
        self._taken += self.model.steps_per_execution
        self._scaling.taken = self._taken
        over = self._over()
        self._scaling.apply(self.model.optimizer, 1.0 if over else factor, False)
        if over:
            self._scaling = None

    def _over(self) -> bool:
        length = self.steps
        if self.shape == "staircase":
            length *= math.ceil(1.0 / self.start) - 1
        return self._taken > length
