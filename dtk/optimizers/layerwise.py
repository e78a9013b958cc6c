"""Base of LARS and LAMB: a step length for each variable, from the ratio of two norms.

It uses Keras's private `_get_variable_index`, `_use_weight_decay` and `_apply_weight_decay`; a test
fails if one of them is gone.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from keras import ops

from dtk.errors import check_number
from dtk.nests import Config

# Types that Keras takes for a learning rate.
LearningRate: TypeAlias = (
    float | keras.optimizers.schedules.LearningRateSchedule | Callable[[], float]
)


def norm(x: tf.Tensor) -> tf.Tensor:
    """Return the L2 norm of all entries, in float32 or wider: squares in half precision overflow.

    Example:
        >>> from keras import ops
        >>> float(norm(ops.convert_to_tensor([300.0, -400.0], "float16")))
        500.0
    """
    x = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
    return ops.sqrt(ops.sum(ops.square(x)))


def both_positive(first: tf.Tensor, second: tf.Tensor, ratio: tf.Tensor) -> tf.Tensor:
    """Return the ratio if both norms are above 0, else 1."""
    return ops.where(ops.logical_and(first > 0, second > 0), ratio, 1.0)


def check_rate(value: object) -> None:
    """Raise for a learning rate that is a negative number, a string or None."""
    if isinstance(value, (str, numbers.Number)) or value is None:
        expected = "a number of at least 0, a schedule, or a function"
        check_number("learning_rate", value, expected, lambda rate: rate >= 0)


def check_below_one(name: str, value: object) -> None:
    """Raise unless 0 <= value < 1, as for a momentum."""
    check_number(name, value, "0.0 up to but below 1.0", lambda part: 0.0 <= part < 1.0)


def check_positive(name: str, value: object) -> None:
    """Raise unless a value is above 0."""
    check_number(name, value, "more than 0.0", lambda number: number > 0.0)


class LayerwiseOptimizer(keras.optimizers.Optimizer):
    """Optimizer that adapts its rate to each variable, which the papers call a layer.

    Variables of rank 0 and 1 are skipped: biases, and the scales and offsets of normalizations.
    They take the algorithm's plain step, with a ratio of 1 and no weight decay. `exclude` skips
    others. `exclude_from_weight_decay` works as in Keras and only removes the decay.

    Weight decay is part of the gradient or the update, and so of the norms, unlike Keras's
    decoupled decay. Clipping, accumulation, loss scaling and moving averages are Keras's own.

    Skip variables that parameter servers hold in parts: the ratio needs the whole variable.

    Args:
        learning_rate: A float, a schedule, or a function.
        exclude: Regular expressions; a variable is skipped if one matches in its path, such as
            "dense_1/kernel".
        weight_decay: Factor of the weights in the step; None or 0.0 for none.
        **kwargs: Arguments of every Keras optimizer: name, clipnorm, use_ema, ...

    Raises:
        ValueError: `exclude` is a string.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        exclude: Sequence[str] = (),
        weight_decay: float | None = None,
        **kwargs: object,
    ):
        check_rate(learning_rate)
        if weight_decay is not None:
            check_number("weight_decay", weight_decay, "0.0 or more, or None", lambda d: d >= 0)
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **kwargs)
        if isinstance(exclude, str):
            raise ValueError(
                f"exclude={exclude!r} is a string; expected a list of regular expressions, such as "
                f"[{exclude!r}]"
            )
        self.exclude = tuple(exclude)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Decide which variables are skipped: steps would see variables without a path."""
        super().build(variables)
        self._skipped = tuple(self.skips(variable) for variable in variables)

    def skips(self, variable: keras.Variable) -> bool:
        """Return whether a variable is neither adapted nor decayed.

        Args:
            variable: The variable.
        """
        path = getattr(variable, "path", variable.name)
        return len(variable.shape) <= 1 or any(re.search(text, path) for text in self.exclude)

    def adapts(self, variable: keras.Variable) -> bool:
        """Return whether a variable, known since `build`, has its own ratio.

        Args:
            variable: The variable.
        """
        return not self._skipped[self._get_variable_index(variable)]

    def decay_of(self, variable: keras.Variable) -> float:
        """Return the weight decay of a variable; 0.0 if it is skipped or excluded from decay.

        Args:
            variable: The variable.
        """
        decays = self.weight_decay and self.adapts(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Do nothing: Keras would decay before the step, but here the decay is in the step."""

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        return {**super().get_config(), "exclude": list(self.exclude)}
