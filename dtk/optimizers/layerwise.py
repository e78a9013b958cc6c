"""LARS and LAMB: a step length for each variable, from the ratio of two norms.

It uses Keras's private `_get_variable_index`, `_use_weight_decay` and `_apply_weight_decay`; tests
fail if one of them is gone.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
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


def dense(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient in the shape and dtype of its variable; repeated rows are summed first.

    Norms, decay and decaying moments involve every row of a table, also rows that a batch does not
    read, so a sparse gradient saves nothing here. Besides, the sum of squared slices is not the
    square of their sum.

    Example:
        >>> import tensorflow as tf
        >>> slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([0, 2, 0]))
        >>> dense(slices, tf.Variable(tf.zeros((3, 1)))).numpy().tolist()
        [[5.0], [0.0], [2.0]]
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = variable.shape[0]
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    return keras.ops.cast(gradient, variable.dtype)


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


def check_ranges(below_one: Mapping[str, object], positive: Mapping[str, object]) -> None:
    """Raise unless 0 <= value < 1, as for a momentum, and unless other values are above 0."""
    for name, value in below_one.items():
        check_number(name, value, "0.0 up to but below 1.0", lambda part: 0.0 <= part < 1.0)
    for name, value in positive.items():
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
        if self.built:
            return
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


@keras.saving.register_keras_serializable(package="dtk")
class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling: momentum SGD with a local rate for each variable.

        ratio = eta |w| / (|g| + beta |w|), and 1 if |w| or |g| is 0
        v = m v + rate * ratio * (g + beta w)
        w = w - v

    with eta the trust coefficient and beta the weight decay. As in SGD, the buffer v contains the
    rate; `LearningRateScaling` corrects it. `dtk.schedules.polynomial_decay` is the paper's rate.

    Biases and normalizations take plain momentum steps with the whole rate, see
    `LayerwiseOptimizer`. If these steps are too large, make eta ten times larger and the rate ten
    times smaller: no other steps change.

    Sparse gradients of embeddings are made dense: the decay and the norm involve every row.

    Args:
        learning_rate: A float, a schedule, or a function. A step has a length of about eta times
            the rate times the norm of the weights, so rates are larger than for SGD.
        momentum: m, 0.0 up to but below 1.0.
        trust_coefficient: eta, above 0.
        weight_decay: beta; None or 0.0 for none.
        exclude: Regular expressions for paths of other variables to skip.
        **kwargs: Arguments of every Keras optimizer: name, clipnorm, use_ema, ...

    Raises:
        ValueError: An argument is out of range.

    Source: You, Gitman & Ginsburg 2017, arXiv:1708.03888.

    Example:
        >>> import keras
        >>> w = keras.Variable([[3.0, 4.0]])
        >>> optimizer = LARS(10.0, momentum=0.0, trust_coefficient=0.01)
        >>> optimizer.apply([keras.ops.convert_to_tensor([[0.0, 2.0]])], [w])
        >>> w.numpy().tolist()      # 10 * 0.01 * |w| / |g| = 0.25 gradients
        [[3.0, 3.5]]
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float | None = None,
        exclude: Sequence[str] = (),
        **kwargs: object,
    ):
        super().__init__(learning_rate, exclude=exclude, weight_decay=weight_decay, **kwargs)
        check_ranges({"momentum": momentum}, {"trust_coefficient": trust_coefficient})
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make a momentum buffer for each variable."""
        if not self.built:
            super().build(variables)
            self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        momentum = self._momentums[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        gradient, decay = dense(gradient, variable), self.decay_of(variable)
        step = rate * (gradient + decay * variable)
        if self.adapts(variable):
            step *= ops.cast(self._ratio(gradient, variable, decay), variable.dtype)
        self.assign(momentum, self.momentum * momentum + step)
        self.assign_sub(variable, momentum)

    def _ratio(self, gradient: tf.Tensor, variable: keras.Variable, decay: float) -> tf.Tensor:
        slope, weights = norm(gradient), norm(variable)
        ratio = self.trust_coefficient * weights / (slope + decay * weights)
        return both_positive(weights, slope, ratio)

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
        }


@keras.saving.register_keras_serializable(package="dtk")
class LAMB(LayerwiseOptimizer, keras.optimizers.Lamb):
    """Layer-wise adaptive moments: Adam with a step for each variable of length rate times |w|.

        m = b1 m + (1 - b1) g           mhat = m / (1 - b1^t)
        v = b2 v + (1 - b2) g^2         vhat = v / (1 - b2^t)
        u = mhat / (sqrt(vhat) + epsilon) + decay w
        w = w - rate * (|w| / |u|) * u, with the ratio 1 if |w| or |u| is 0

    Biases and normalizations take plain Adam steps, see `LayerwiseOptimizer`.

    `keras.optimizers.Lamb` differs in two ways: its weight decay is decoupled, `w (1 - rate *
    decay)` before the step, so that the ratio neither sees nor scales it; and it adapts every
    variable, biases and normalizations too. For matrices without decay both are the same. Its
    default epsilon is 1e-7, the paper's 1e-6.

    Sparse gradients of embeddings are made dense: moments, decay and norm involve every row.

    Args:
        learning_rate: A float, a schedule, or a function.
        beta_1: b1, 0.0 up to but below 1.0.
        beta_2: b2, 0.0 up to but below 1.0.
        epsilon: Keeps the division finite, above 0.
        weight_decay: Factor of the weights in the update; None or 0.0 for none.
        exclude: Regular expressions for paths of other variables to skip.
        **kwargs: Arguments of every Keras optimizer: name, clipnorm, use_ema, ...

    Raises:
        ValueError: An argument is out of range.

    Source: You et al. 2020, arXiv:1904.00962.

    Example:
        >>> import keras
        >>> w = keras.Variable([[3.0, 4.0]])
        >>> optimizer = LAMB(0.1)
        >>> optimizer.apply([keras.ops.convert_to_tensor([[0.0, 2.0]])], [w])
        >>> w.numpy().round(4).tolist()      # a step of 0.1 |w|
        [[3.0, 3.5]]
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        exclude: Sequence[str] = (),
        **kwargs: object,
    ):
        betas, above_zero = {"beta_1": beta_1, "beta_2": beta_2}, {"epsilon": epsilon}
        check_ranges(betas, above_zero)
        super().__init__(learning_rate, exclude, weight_decay, **betas, **above_zero, **kwargs)

    def update_step(
        self,
        gradient: tf.Tensor | tf.IndexedSlices,
        variable: keras.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        update = self._adam(dense(gradient, variable), variable)
        update += self.decay_of(variable) * variable
        step = ops.cast(learning_rate, variable.dtype) * update
        if self.adapts(variable):
            weights, length = norm(variable), norm(update)
            step *= ops.cast(both_positive(weights, length, weights / length), variable.dtype)
        self.assign_sub(variable, step)

    def _adam(self, gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        self.assign_add(m, (1.0 - self.beta_1) * (gradient - m))
        self.assign_add(v, (1.0 - self.beta_2) * (ops.square(gradient) - v))
        t = ops.cast(self.iterations + 1, variable.dtype)
        mhat = m / (1.0 - ops.power(ops.cast(self.beta_1, variable.dtype), t))
        vhat = v / (1.0 - ops.power(ops.cast(self.beta_2, variable.dtype), t))
        return mhat / (ops.sqrt(vhat) + self.epsilon)
